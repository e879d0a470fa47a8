"""Operators accept torch's names of arguments and have one implementation each; products of groups."""

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bad_inputs_modules import Applies
from torch import nn
from traced_oracle import compare

import bridge
from bridge._tracing.op_registry import ARGUMENT_ALIASES, OPS, add_ops, builtin_op, op

pytestmark = pytest.mark.quick

# Arguments in a schema that Python code cannot give, or that are handled before the implementation is called.
ELSEWHERE = {"self", "out", "dtype", "layout", "device", "pin_memory", "generator", "memory_format", "non_blocking", "requires_grad"}
INSIDE = {
    "layer_norm": "cudnn_enable",
    "group_norm": "cudnn_enabled",
    "elu": "scale input_scale",  # used by the backward pass of selu
    "elu_": "scale input_scale",
    "mm": "out_dtype",  # only for CUDA, here and below
    "bmm": "out_dtype",
    "addmm": "out_dtype",
    "baddbmm": "out_dtype",
    "orgqr": "input2",  # tau in the documentation
    "ormqr": "input2 input3",  # tau and other
    "linalg_householder_product": "input",  # A
    "linalg_matrix_rank": "input",  # A
    "linalg_tensorsolve": "other",  # B
    "sort": "reverse",  # for lists, in TorchScript
    "mul": "l n",
    "ldexp": "i",
    "flatten": "out_dim",  # for named tensors
}


def schemas(name):
    """Yield the argument names of each overload that Python code can call; TorchScript overloads have one-letter names."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            names = [a.name for a in schema.arguments if not a.is_out]
            script = overload in ("int", "float", "complex", "str", "bool", "Scalar_Scalar") or {"a", "b"} & set(names)
            if not script and "Dimname" not in str(schema) and "names" not in names and overload != "t":
                yield names


def unknown(func):
    entry, name = OPS[func], func.__name__
    known = entry.signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return set()
    wanted = {n for names in schemas(name) for n in names} - ELSEWHERE - set(INSIDE.get(name, "").split())
    return {n for n in wanted if n not in known and ARGUMENT_ALIASES.get(n) not in known and not n.startswith("scales")}


def builtins():
    return [f for f, entry in OPS.items() if (entry.signature is not None and inspect.isbuiltin(f)) or inspect.ismethoddescriptor(f)]


def test_operators_accept_every_argument_name_of_torch():
    found = {f.__name__: sorted(names) for f in builtins() if OPS[f].signature is not None and (names := unknown(f))}
    assert len(builtins()) > 500
    assert found == {}


def test_second_implementation_of_a_function_raises():
    before = dict(OPS)
    for register in (
        op("sinh", "cos"),
        op("cos_"),
        builtin_op("cos"),
        lambda f: add_ops({torch.cos: OPS[torch.sin], torch.Tensor.apply_: OPS[torch.sin]}),
    ):
        with pytest.raises(
            ValueError,
            match=r"torch\.\S+ has two implementations, bridge\._tracing\.ops\.elementwise\.\S+ and \S+\. Register each function once",
        ):
            register(jax.numpy.sin)
    assert before == OPS  # the table is unchanged


def test_only_the_registry_adds_implementations():
    files = (Path(bridge.__file__).parent / "_tracing").rglob("*.py")
    assert [
        f"{file.name}: {line}" for file in files for line in file.read_text().splitlines() if re.search(r"OPS(\[.*\] =|\.update)", line)
    ] == ["op_registry.py:     OPS.update(entries)"]


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return torch.randn


def test_products_accept_arguments_by_name(tensors):
    a, b = tensors(3, 4), tensors(4, 5)
    compare(lambda a, b: torch.mm(input=a, mat2=b), a, b)
    compare(lambda a, b: a[None].bmm(mat2=b[None]), a, b)
    compare(lambda a, b: torch.mv(a, vec=b[:, 0]), a, b)
    compare(lambda a: torch.dot(a[0], tensor=a[1]), a)
    compare(lambda a: torch.vdot(a[0], other=a[1]) + torch.inner(a[0], other=a[1]), a)
    compare(lambda x, a, b: torch.addmv(x, mat=a, vec=b[:, 0], alpha=2), tensors(3), a, b)
    compare(lambda x, a, b: x.baddbmm(batch1=a[None], batch2=b[None], beta=0.5, alpha=2), tensors(1, 3, 5), a, b)
    compare(lambda a, b: torch.linalg.vecdot(x=a, y=b.mT[:3]), a, b)


def test_views_with_arguments_by_name_are_views(tensors):
    def exchanged(x):
        y = x.clone()
        y.swapaxes(axis0=0, axis1=1).mul_(2)
        y.tensor_split(sections=2, dim=1)[0].add_(1)
        torch.hsplit(y, indices=(1, 2))[1].neg_()
        return y

    compare(exchanged, tensors(4, 6))


GROUPED = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm")


@GROUPED
def test_grouped_products_match_torch(tensors):
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second group is empty
    rows, matrices, columns, each = tensors(8, 16), tensors(3, 16, 24), tensors(16, 8), tensors(3, 16, 16)
    compare(lambda a, b: F.grouped_mm(a, b, offs=offs), rows, matrices)
    compare(lambda a, b: F.grouped_mm(a, b, offs=offs), each, columns)
    compare(lambda a, b: F.grouped_mm(a, b, offs=offs), tensors(16, 8), tensors(8, 16))
    compare(lambda a, b: F.grouped_mm(a, b), each, matrices)


@GROUPED
def test_rows_behind_the_last_group_are_zero(tensors):
    """torch leaves the memory of these rows and of their gradient uninitialized; here both are zero."""
    offs, rows, matrices = torch.tensor([2, 5], dtype=torch.int32), tensors(8, 16), tensors(2, 16, 16)
    compare(lambda a, b: F.grouped_mm(a, b, offs=offs)[:5], rows[:5], matrices)
    pure = bridge.module_function(Applies(lambda a, b: F.grouped_mm(a, b, offs=offs).square().sum()))
    slope = jax.jit(jax.grad(lambda a: pure({}, a, bridge.to_jax(matrices))))(bridge.to_jax(rows))
    assert np.array_equal(np.any(np.asarray(slope), 1), np.arange(8) < 5)


class Asks(nn.Module):
    """A module that checks for a tracer before it reads whether a mask has zeros, as transformers does."""

    def forward(self, x, mask):
        is_traced = hasattr(x, "jax") and isinstance(mask.jax(), jax.core.Tracer)
        return x if not is_traced and mask.all() else x * mask


def test_code_may_check_for_a_tracer():
    compare(lambda x: Asks()(x, x > 0), torch.tensor([1.0, -2.0]))
