"""jax's persistent compilation cache works with the optimizers: it holds no pickled code, and a second start gives the same numbers."""

import hashlib
import os
import pickle
import pickletools
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINING = """
import sys
import optax, torch
import bridge, torch_api

SHAPES = [(300, 300), (64, 16), (64, 16), (7,)]
OPTIMIZERS = {
    "AdamW": lambda params: torch_api.MaskedAdamW(params, lr=1e-2),
    "optax": lambda params: torch_api.OptaxOptimizer(params, tx=optax.adam(1e-2)),
}
for name, make in OPTIMIZERS.items():
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(params)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    print(name, *(p.detach().numpy().tobytes().hex() for p in params))

torch.manual_seed(3)
model = torch.nn.Linear(7, 5)
x, optimizer = torch.randn(4, 7), torch_api.MaskedAdam(model.named_parameters(), lr=1e-2)
step = torch_api.JaxTrainStep(model, lambda model, x: (model(x) ** 2).mean(), optimizer)
print("train step", *(float(step(x)) for _ in range(3)))
x = torch.randn(4, 7, requires_grad=True)
bridge.jax_function(lambda x: x * x)(x).sum().backward()
print("function", x.grad.numpy().tobytes().hex())
"""


class Command:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return os.system, (self.text,)


def train(folder, warnings="error"):
    """Train in a new process that caches its programs in `folder`; return the lines it prints, the parameters of each optimizer."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    env |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run([sys.executable, "-W", warnings, "-c", TRAINING], capture_output=True, text=True, env=env, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a cache folder that one process has filled, and the lines which that process printed."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, train(folder)


def entries(folder):
    """Return the content of each cache file; jax's files with access times are left out."""
    return {file: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file() and not file.name.endswith("-atime")}


def parts(content):
    """Yield the content of an entry and its decompressed form, with and without a leading digest."""
    for start in (0, 16, 20, 32, 64):
        yield content[start:]
        try:
            yield zlib.decompress(content[start:])
        except zlib.error:
            continue


def is_pickle(part):
    """Return whether the bytes start with a pickle; the pickle is not run."""
    if part[:1] != pickle.PROTO or part[1] not in range(2, pickle.HIGHEST_PROTOCOL + 1):
        return False
    try:
        return len(list(pickletools.genops(part))) > 1
    except ValueError:
        return False


def test_no_entry_holds_a_pickle(filled):
    found = entries(filled[0])
    assert found
    assert not [file.name for file, content in found.items() if any(map(is_pickle, parts(content)))]
    code = zlib.compress(pickle.dumps([Command("true")]))
    assert any(map(is_pickle, parts(hashlib.sha256(code).digest() + code)))  # the check itself can fail


def test_second_start_gives_the_same_numbers_and_compiles_nothing(filled):
    folder, first = filled
    before = entries(folder).keys()
    assert train(folder) == first
    assert entries(folder).keys() == before


def test_replaced_entry_runs_no_code(filled, tmp_path):
    folder, first = filled
    mark, before = tmp_path / "mark", entries(folder)
    code = zlib.compress(pickle.dumps([Command(f"touch {mark}")]))
    try:
        for file in before:
            file.write_bytes(hashlib.sha256(code).digest() + code)
        assert train(folder, warnings="ignore") == first  # jax warns about each entry that it cannot read
        assert not mark.exists()
    finally:
        for file, content in before.items():
            file.write_bytes(content)
