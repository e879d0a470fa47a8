"""The mistakes of `make mistakes` fit the code, and every package has one. Not quick, because `make mistakes` would count these tests."""

import planted_mistakes
import pytest
from planted_mistakes import MISTAKES, ROOT


@pytest.mark.parametrize(("path", "right", "wrong"), MISTAKES, ids=[path for path, *_ in MISTAKES])
def test_each_mistake_occurs_once_in_its_file(path, right, wrong):
    assert (ROOT / path).read_text().count(right) == 1
    assert right != wrong


def test_each_package_has_a_mistake():
    packages = {path.parent for package in ("bridge", "torch_api") for path in (ROOT / package).rglob("*.py") if path.stem != "__init__"}
    assert packages - {(ROOT / path).parent for path, *_ in planted_mistakes.MISTAKES} == set()
    assert len(MISTAKES) == 24
