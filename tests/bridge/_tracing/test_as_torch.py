"""Traced torch code follows torch where torch and jax differ: in-place writes, indices, derivatives at zero, older arguments."""

import functools
import re

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bad_inputs_modules import Applies
from sampling import sampled
from torch import nn

import bridge
import torch_api
from bridge._tracing import op_registry, tensor
from bridge._tracing.ops import elementwise, index, subgradients

pytestmark = pytest.mark.quick

I = torch.tensor([0, 2, 1])  # noqa: E741
MASK = torch.tensor([True, False, True])
BYTES = torch.tensor([1, 0, 1], dtype=torch.uint8)


def scaled(x, factor):
    with torch.no_grad():
        return x.mul_(factor)


def written_through(take):
    """Return a function that writes through `take(tensor)` and then reads the tensor."""

    def function(x):
        h = x * 1
        take(h).mul_(3.0)
        return h * x

    return function


def placed(key, value):
    def function(x):
        h = x * 1
        h[key] = value if not callable(value) else value(x)
        return h * x

    return function


WRITES = {
    "contiguous of a turned tensor": written_through(lambda h: h.transpose(0, 1).contiguous()),
    "contiguous": written_through(lambda h: h.contiguous()),
    "contiguous of an expanded tensor": written_through(lambda h: h[:1].expand(2, 3, 3).contiguous()),
    "reshape of a turned tensor": written_through(lambda h: h.transpose(0, 1).reshape(-1)),
    "detach": written_through(lambda h: h.detach()),
    "data": written_through(lambda h: h.data),
    "a part of data": written_through(lambda h: h.data[0]),
    "view_as": written_through(lambda h: h.view_as(h)),
    "reshape_as": written_through(lambda h: h.reshape_as(torch.ones(6, 3))),
    "expand_as": written_through(lambda h: h.expand_as(h)),
    "type_as": written_through(lambda h: h.type_as(h)),
    "no_grad": lambda x: scaled(x * 1, 3.0) * x,
    "no_grad of a part": lambda x: (lambda h: (scaled(h[0], 3.0), h * x)[1])(x * 1),
    "no_grad into a new tensor": lambda x: (lambda z: (scaled(z.copy_(x.detach()), 2.0), z * x)[1])(torch.zeros(2, 3, 3)),
    "an index under no_grad": lambda x: (lambda h: (torch.no_grad()(h.__setitem__)((0, 1), 5.0), h * x)[1])(x * 1),
}
INDICES = {
    "number and tensor": lambda x: x[0, :, I],
    "tensor and number": lambda x: x[:, I, 1],
    "ellipsis": lambda x: x[0, ..., I],
    "number, new dim, tensor": lambda x: x[1, None, :, I],
    "number, two tensors": lambda x: x[0, I, I],
    "tensor of numbers": lambda x: x[torch.tensor(1), :, I],
    "negative": lambda x: x[-1, :, I],
    "uint8": lambda x: x[:, BYTES],
    "uint8 and number": lambda x: x[0, :, BYTES],
    "bools": lambda x: x[:, [True, False, True]],
    "set number and tensor": placed((0, slice(None), I), lambda x: x[0] * 2),
    "set with a mask behind": placed((slice(None), MASK), 0.0),
    "set with two masks": placed((torch.tensor([True, False]), [True, False, True]), 0.0),
    "set with a mask and places": placed((torch.tensor([True, True]), torch.tensor([0, 2])), 0.0),
    "set with a mask of values": lambda x: placed((slice(None), x[0, 0] > 0), 0.0)(x),
    "set with a mask before": lambda x: placed(x[:, 0, 0] > 0, 7.0)(x),
}
SLOPES = {
    "abs": lambda x: x.abs(),
    "operator": lambda x: abs(x),
    "l1_loss": lambda x: F.l1_loss(x, x.detach()),
    "norm 1": lambda x: x.norm(p=1),
    "norm 3": lambda x: x.norm(p=3, dim=1),
    "norm 0.5": lambda x: torch.linalg.vector_norm(x, 0.5, dim=1),
    "norm inf": lambda x: x.norm(p=float("inf")),
    "norm 2": lambda x: x.norm(dim=1),
    "std": lambda x: x.std(0),
    "std_mean": lambda x: torch.std_mean(x, 0)[0],
    "cosine": lambda x: F.cosine_similarity(x, torch.ones(2, 3, 3), dim=1),
    "atan2": lambda x: torch.atan2(x, x.detach()),
    "relu6": lambda x: F.relu6(x),
    "relu6 at six": lambda x: F.relu6(x + 6),
    "hardsigmoid": lambda x: F.hardsigmoid(x - 3),
    "hardswish above": lambda x: F.hardswish(x + 3),
    "hardswish below": lambda x: F.hardswish(x - 3),
    "bce of zero": lambda x: F.binary_cross_entropy(x, torch.ones(2, 3, 3)),
    "bce of one": lambda x: F.binary_cross_entropy(x + 1, torch.zeros(2, 3, 3)),
    "bce": lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.ones(2, 3, 3)),
}
ARGUMENTS = {
    "sum": lambda x: F.mse_loss(x, x.detach() * 2, size_average=False),
    "each": lambda x: F.mse_loss(x, x.detach() * 2, reduce=False),
    "by place": lambda x: F.l1_loss(x, x.detach() * 2, False),
    "mean": lambda x: F.mse_loss(x, x.detach() * 2, size_average=True, reduction="sum"),
    "bce": lambda x: F.binary_cross_entropy(torch.sigmoid(x), x.detach().sigmoid(), size_average=False),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduce=False),
    "classes": lambda x: F.cross_entropy(x.reshape(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), size_average=False),
    "vecdot": lambda x: torch.linalg.vecdot(x, x * 2),
    "vecdot along another dim": lambda x: torch.linalg.vecdot(x, x * 2, dim=0),
    "strides": lambda x: x * float(x.transpose(0, 1).stride(0)) + float(x.transpose(1, 2).is_contiguous()),
}
# Cases for which torch 2.6 has other derivatives than 2.13: NaN, or the one-sided derivative of the other side.
SINCE = {"slope: atan2", "slope: hardswish above", "slope: hardswish below"}
OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
CASES = {f"{kind}: {name}": case for kind, table in
         {"write": WRITES, "index": INDICES, "slope": SLOPES, "argument": ARGUMENTS}.items() for name, case in table.items()}  # fmt: skip


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
@pytest.mark.parametrize("name", sampled(CASES, every=2))
def test_values_and_gradients_match_torch(name):
    if OLDER and name in SINCE:
        pytest.skip("this torch has another derivative there")
    function = CASES[name]
    x = torch.zeros(2, 3, 3) if name.startswith("slope") else torch.linspace(-1, 1, 18).reshape(2, 3, 3).sin()
    x.requires_grad_()
    out = function(x)
    weights = torch.linspace(1, 2, out.numel()).reshape(out.shape)
    (out * weights).sum().backward()
    pure, given, by = bridge.module_function(Applies(function)), bridge.to_jax(x.detach()), bridge.to_jax(weights)
    both = jax.jit(jax.value_and_grad(lambda x: (pure({}, x) * by).sum())).lower(given)
    value, grad = both.compile()(given)
    np.testing.assert_allclose(pure({}, given), out.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, (out * weights).sum().detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, x.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("where", "name", "broken", "case"),
    [
        (tensor, "write_without_grad", lambda old, new: jax.lax.stop_gradient(new), "write: data"),
        (tensor, "DETACH_FUNCTIONS", frozenset(), "write: detach"),
        (index, "_split_key", lambda key: (key, None), "index: number and tensor"),
        (elementwise, "safe_sqrt", jax.numpy.sqrt, "slope: std"),
        (elementwise, "zero_subgradient_at_zero", lambda function, x: function(x), "slope: norm 3"),
        (subgradients, "sign", lambda x: jax.numpy.ones_like(x), "slope: abs"),
    ],
)
def test_comparison_detects_a_broken_operator(where, name, broken, case, monkeypatch):
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        test_values_and_gradients_match_torch(case)


class Codebook(nn.Module):
    """A module with a moving average in a buffer that it writes through `.data`, as codebooks do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("average", torch.ones(3))

    def forward(self, x):
        h = self.layer(x)
        self.average.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return (h - self.average).square().mean()


def test_buffer_written_through_data_is_kept():
    torch.manual_seed(0)
    eager, ours = Codebook(), Codebook()
    ours.load_state_dict(eager.state_dict())
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    train_step = torch_api.JaxTrainStep(ours, lambda m, x: m(x), torch_api.MaskedSGD(ours.named_parameters(), lr=0.1))
    for _ in range(20):
        x = torch.randn(4, 3)
        optimizer.zero_grad()
        loss = eager(x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(train_step(x), loss.detach(), rtol=1e-4, atol=1e-6)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_named_tuple_results_hold_arrays():
    values, places = bridge.module_function(Applies(lambda x: x.max(1)))({}, jax.numpy.ones((2, 3)))
    np.testing.assert_array_equal(values, [1, 1])
    np.testing.assert_array_equal(places, [0, 0])
    model = nn.Linear(3, 3)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    train_step = torch_api.JaxTrainStep(model, lambda m, x: (m(x).sum(), m(x).max(1)), optimizer, has_aux=True)
    values, _ = train_step(torch.ones(2, 3))[1]
    assert isinstance(values, torch.Tensor)
    assert values.shape == (2,)


@pytest.mark.parametrize(
    "name", ["torch.histc", "torch.nn.functional.fractional_max_pool2d", "torch.Tensor.apply_", "torch.ops.aten.slice"]
)
def test_error_names_a_function_that_can_be_registered(name):
    """torch's own names for some of these functions contain classes that cannot be imported."""
    func = functools.reduce(getattr, name.split(".")[1:], torch)
    with pytest.raises(NotImplementedError, match=rf"^{re.escape(name)} has no .* torch2jax\.implements\({re.escape(name)}\)"):
        raise op_registry.unsupported_op_error(func)


def test_error_names_the_public_function_of_a_builtin():
    beneath = torch._C._VariableFunctions.block_diag
    assert beneath is not torch.block_diag
    assert "implements(torch.block_diag)" in str(op_registry.unsupported_op_error(beneath))


def test_known_value_can_be_formatted_and_a_traced_one_raises():
    seen = []
    pure = bridge.module_function(Applies(lambda x: seen.append(f"{torch.ones(3).sum() + x.shape[0]:.1f} {x}") or x))
    pure({}, jax.numpy.ones(2))
    assert seen[0].startswith("5.0 Traced(")
    broken = bridge.module_function(Applies(lambda x: x * len(f"{x.sum():.1f}")))
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: broken({}, x))(jax.numpy.ones(2))
