"""Multi-output fusion is requested for our programs only: jaxlib 0.10.2 crashes on some programs with user code."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from bridge._compat import jax as fusion_jax
from bridge._xla import compile as fusion_compile
from bridge._xla import multi_output_fusion
from bridge.environment import _fuses_outputs

# Gradients of many kinds of indexing, which crash jaxlib 0.10.2 with multi-output fusion.
INDEXING = """
import bridge, torch_api, torch
import jax.numpy as jnp

i = torch.tensor([2, 0, 1, 1, 2])

def loss(x, i):
    y = x[i] + x[i, :] + x[i, i][:, None] + x[jnp.array([0, 1, 2, 0, 1])] + jnp.take(x, i, 0) + x[i, 1:2]
    return jnp.sum(y * jnp.cos(jnp.arange(20.0).reshape(5, 4)))
"""
# An update of ours, compiled with multi-output fusion in the same process before.
OURS = """
q = torch.nn.Parameter(torch.ones(100))
q.grad = torch.ones(100)
torch_api.MaskedAdamW([q]).step()
print("update", flush=True)
"""
PROGRAMS = {
    "jax_function": """
x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
bridge.jax_function(loss)(x, i).backward()
assert x.grad.abs().sum() > 0
""",
    "JaxTrainStep": """
model = torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.ones(3, 4, dtype=torch.float64))})
optimizer = torch_api.MaskedAdamW(model.named_parameters())
value = torch_api.JaxTrainStep(model, lambda model, i: loss(jnp.asarray(model["x"]), jnp.asarray(i)), optimizer)(i)
assert value.isfinite()
""",
}

OWN = {
    "jit": """
import jax
from bridge import jax_function
jax.jit(jax.grad(lambda x: loss(x, jnp.asarray(i))))(jnp.ones((3, 4), jnp.float32))
"""
}


@pytest.fixture(scope="module", params=["", pytest.param("1", marks=pytest.mark.nightly)], ids=["by program", "by process"])
def ended(request):
    """Run the programs one after another in one process, which prints each name it got through; return its output."""
    programs = PROGRAMS | ({} if request.param else OWN)
    code = INDEXING + OURS + "".join(f"{program}print({name!r}, flush=True)\n" for name, program in programs.items())
    env = os.environ | {"MASKBRIDGE_XLA_FLAGS": request.param, "XLA_FLAGS": ""}
    return programs, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)


def test_programs_with_user_code_compile_without_the_flag(ended):
    programs, done = ended
    assert done.stdout.split() == ["update", *programs], done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]


FUSES = pytest.mark.skipif(not fusion_jax.has_per_program_flag(), reason="this XLA writes each result from a separate loop")


def lowered():
    x = jax.ShapeDtypeStruct((1024,), "float32")
    return jax.jit(lambda x: (x * 2.5, jnp.sin(x) + x)).lower(x)


def loops(program):
    return program.as_text().count(" fusion(")


@FUSES
def test_only_the_requesting_program_is_fused(monkeypatch):
    monkeypatch.delenv(multi_output_fusion.FUSION_VARIABLE, raising=False)
    asks = "XLA_FLAGS" in os.environ and multi_output_fusion.FUSION_FLAG in os.environ["XLA_FLAGS"]
    inside, beside = [], []
    asked = fusion_jax._with_entry

    def meanwhile(*options):
        thread = threading.Thread(target=lambda: beside.append(loops(lowered().compile())))
        thread.start(), thread.join()
        return asked(*options)

    monkeypatch.setattr(fusion_jax, "_with_entry", meanwhile)
    inside.append(loops(fusion_compile.compile_lowered(lowered(), fuse_outputs=True)))
    assert inside == [1]
    assert beside == [1 if asks else 2]
    assert loops(lowered().compile()) == beside[0]
    assert loops(fusion_compile.compile_lowered(lowered(), fuse_outputs=False)) == 2
    monkeypatch.setenv(multi_output_fusion.FUSION_VARIABLE, "0")
    assert loops(fusion_compile.compile_lowered(lowered(), fuse_outputs=True)) == beside[0]


@FUSES
def test_failed_compilation_resets_the_request():
    class Fails:
        def compile(self, compiler_options):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fusion_compile.compile_lowered(Fails(), fuse_outputs=True)
    assert fusion_jax._thread_option.option is None


@FUSES
def test_hook_is_installed_once_and_returns_jaxs_options():
    from jax._src import compiler

    fusion_compile.compile_lowered(lowered(), fuse_outputs=True)
    hook = compiler.get_compile_options
    fusion_compile.compile_lowered(lowered(), fuse_outputs=True)
    assert compiler.get_compile_options is hook
    plain = hook(num_replicas=1, num_partitions=1)
    assert plain.SerializeAsString() == hook.__wrapped__(num_replicas=1, num_partitions=1).SerializeAsString()


def test_options_that_cannot_be_parsed_are_unchanged():
    class Options:
        def SerializeAsString(self):  # noqa: N802 - jax's name
            return b""

    options = Options()
    assert fusion_jax._with_entry(options, "a") is options


def test_varints_above_127_take_several_bytes():
    """300 and a field of 5000 bytes, encoded by hand from the protobuf description."""
    assert fusion_jax._varint(300) == bytes([0b10101100, 0b00000010])
    assert fusion_jax._field(500, bytes(5000))[:4] == bytes([0b10100010, 0b00011111, 0b10001000, 0b00100111])


@pytest.mark.parametrize("missing", ["get_compile_options", "ParseFromString"])
def test_fusion_is_not_requested_per_program_without_private_names(monkeypatch, missing):
    from jax._src import compiler
    from jax._src.lib import xla_client

    class Options:
        pass

    fusion_jax.has_per_program_flag.cache_clear()
    if missing == "get_compile_options":
        monkeypatch.delattr(compiler, missing)
    else:
        monkeypatch.setattr(xla_client, "CompileOptions", Options)
    assert not fusion_jax.has_per_program_flag()
    monkeypatch.undo()
    fusion_jax.has_per_program_flag.cache_clear()
    assert fusion_jax.has_per_program_flag()


@FUSES
def test_doctor_detects_fusion_in_a_compiled_program(monkeypatch):
    monkeypatch.delenv(multi_output_fusion.FUSION_VARIABLE, raising=False)
    assert _fuses_outputs()
    monkeypatch.setenv(multi_output_fusion.FUSION_VARIABLE, "0")
    assert _fuses_outputs() == (multi_output_fusion.FUSION_FLAG in os.environ.get("XLA_FLAGS", ""))
