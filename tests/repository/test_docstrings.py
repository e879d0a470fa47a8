"""Docstrings of the public classes and functions: which arguments they explain, and whether their examples run."""

import dataclasses
import doctest
import inspect
import re

import jax
import pytest

import bridge
import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


def is_ours(thing):
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.split(".")[0] in ("bridge", "torch_api")


PACKAGES = (bridge, bridge.rules, bridge.matrix_rules, torch_api)
PUBLIC = {f"{package.__name__}.{name}": getattr(package, name) for package in PACKAGES for name in package.__all__}
OURS = {name: thing for name, thing in PUBLIC.items() if is_ours(thing)}
MODULES = sorted({thing.__module__ for thing in OURS.values()})
CLASSES = sorted(name for name, thing in OURS.items() if inspect.isclass(thing))


def sections(thing):
    """Return the sections of a docstring by title, without indentation."""
    parts = re.split(r"^(Args|Raises|Returns|Example):\n", inspect.getdoc(thing), flags=re.MULTILINE)
    return {title: inspect.cleandoc(re.split(r"\n(?=\S)", text)[0]) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def explained(thing):
    """Return the names of arguments that begin an entry of the section Args, with their asterisks."""
    entries = re.findall(r"^([*\w][*\w, ]*): \S", sections(thing).get("Args", ""), flags=re.MULTILINE)
    return [name for entry in entries for name in entry.split(", ")]


def arguments(thing):
    """Return the arguments of a function or of the constructor that a class itself defines."""
    function = thing
    if inspect.isclass(thing):
        if hasattr(thing, "_fields"):
            return list(thing._fields)
        function = thing.__init__
        if not inspect.isfunction(function):
            return []
    code = inspect.unwrap(function).__code__
    names, count = code.co_varnames, code.co_argcount + code.co_kwonlyargcount
    plain = [name for name in names[:count] if name != "self"]
    return plain + ["*" * stars + name for stars, name in zip(_stars(code), names[count:], strict=False)]


def _stars(code):
    return [stars for stars, flag in ((1, inspect.CO_VARARGS), (2, inspect.CO_VARKEYWORDS)) if code.co_flags & flag]


def failures(name, thing):
    """Run the examples of a docstring and return what went wrong, as text."""
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing), {}, name, None, 0)
    text = []
    with jax.numpy_dtype_promotion("standard"):  # jax's default
        results = doctest.DocTestRunner(verbose=False).run(example, out=text.append)
    return f"{name} has no example" if not results.attempted else "".join(text) if results.failed else ""


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_examples_of_public_names_run(module):
    failed = [failures(name, thing) for name, thing in OURS.items() if thing.__module__ == module]
    assert not any(failed), "\n".join(failed)


@pytest.mark.parametrize("name", sorted(OURS))
def test_docstring_explains_each_argument(name):
    thing = OURS[name]
    assert set(explained(thing)) == set(arguments(thing)), f"{name}: the section Args explains other arguments"
    assert "Example" in sections(thing)


@pytest.mark.parametrize("name", CLASSES)
def test_docstring_of_a_class_says_what_it_raises(name):
    cls = OURS[name]
    is_plain = hasattr(cls, "_fields") or dataclasses.is_dataclass(cls) or issubclass(cls, Warning)
    assert is_plain or "Raises" in sections(cls)


def test_a_wrong_docstring_is_found():
    def wrong(a, *b, c=0, **d):
        """Do nothing.

        Args:
          a, *b: known.
          e: unknown.

        Example:
          >>> 1 + 1
          3
        """

    assert arguments(wrong) == ["a", "c", "*b", "**d"]
    assert explained(wrong) == ["a", "*b", "e"]
    assert re.search(r"in wrong.*Expected:\s+3\nGot:\s+2", failures("wrong", wrong), re.DOTALL)
