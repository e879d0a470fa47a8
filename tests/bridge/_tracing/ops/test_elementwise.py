"""Each torch operation under jax matches eager torch: values, dtypes and gradients, in float32 and float64."""

import inspect
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_cases
from bad_inputs_modules import Applies
from unoptimized import options

import bridge
from bridge._process import x64

CASES = [(f"{kind}: {name}", function, inputs) for kind, rows in torch_cases.TABLES.items() for name, function, inputs in rows]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
# Operations for which torch is less exact than float64: its derivative of digamma, and a constant 1/6 in float32.
LESS = {"unary: digamma": 1e-8, "activations: hardsigmoid": 1e-7}


# jaxlib 0.10.2 crashes when it fuses several results of which some are gathered.
PLAIN = {"xla_backend_extra_options": ""} | options()


def made(spec, dtype, generator):
    kind, shape = spec if isinstance(spec[0], str) else ("normal", spec)
    if kind.startswith("int:"):
        return torch.randint(int(kind[4:]), shape, generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "bool":
        return x > 0
    return {"normal": x, "pos": x.abs() + 0.3, "p": x.sigmoid() * 0.9 + 0.05}[kind].to(dtype)


def inputs_of(name, specs, dtype):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return [made(spec, dtype, generator) for spec in specs]


def by_torch(function, inputs):
    """Return the value, weights, and the gradients of the weighted sum."""
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    weights = torch.arange(out.numel(), dtype=torch.float64).cos().reshape(out.shape).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True) if out.requires_grad else [None] * len(wanted)
    return out.detach(), weights, [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]


def by_jax(function, inputs, weights):
    fn = bridge.module_function(Applies(function))
    places = [i for i, x in enumerate(inputs) if x.is_floating_point()]

    def weighed(weights, *xs):
        out = fn({}, *xs)
        return jnp.sum(out.astype(weights.dtype) * weights), out

    (_, out), grads = jax.jit(jax.value_and_grad(weighed, argnums=[i + 1 for i in places], has_aux=True), compiler_options=PLAIN)(
        jnp.asarray(weights.numpy()), *(jnp.asarray(x.numpy()) for x in inputs)
    )
    return out, grads


def compare(name, function, specs, dtype):
    inputs = inputs_of(name, specs, dtype)
    want, weights, want_grads = by_torch(function, inputs)
    with x64(dtype is torch.float64):
        got, got_grads = by_jax(function, inputs, weights if weights.is_floating_point() else weights.to(dtype))
        if dtype is torch.float64 or want.is_floating_point():
            assert str(got.dtype) == str(want.dtype).removeprefix("torch."), "another dtype"
        for ours, theirs, what in [(got, want, "value"), *((a, b, "gradient") for a, b in zip(got_grads, want_grads, strict=True))]:
            ours, theirs = np.asarray(ours), theirs.numpy()
            assert ours.shape == theirs.shape, what
            size = max(1.0, float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=max(TOLERANCE[dtype], LESS.get(name, 0)) * size, err_msg=what)


@pytest.fixture(autouse=True)
def _default_dtype(request):
    dtype = request.node.callspec.params.get("dtype", torch.float32) if hasattr(request.node, "callspec") else torch.float32
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.nightly)], ids=["float32", "float64"])
@pytest.mark.parametrize(("name", "function", "specs"), CASES, ids=[name for name, *_ in CASES])
def test_operation_matches_torch(name, function, specs, dtype):
    compare(name, function, specs, dtype)


@pytest.mark.parametrize(
    "broken",
    [
        lambda x: x.sum(0) * (1 + 1e-4 * isinstance(x, bridge._tracing.tensor.TracedTensor)),
        lambda x: x.sum(0) + (x.detach() - x).sum(0) * isinstance(x, bridge._tracing.tensor.TracedTensor),
    ],
    ids=["value", "gradient"],
)
def test_comparison_detects_a_wrong_operation(broken):
    with pytest.raises(AssertionError, match=r"value|gradient"):
        compare("broken", broken, [(3, 4)], torch.float32)


# torch raises IndexError for each; a program returns NaN there and does not count from the end.
@pytest.mark.parametrize("wrong", [-1, -3, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: F.embedding(i, x)[:, 0],
        lambda x, i: F.embedding(i, x, padding_idx=1)[:, 0],
        lambda x, i: F.cross_entropy(x, i, reduction="none"),
        lambda x, i: F.cross_entropy(x, i, torch.ones(3), reduction="none", label_smoothing=0.1),
        lambda x, i: F.nll_loss(x, i, reduction="none"),
        lambda x, i: x.gather(1, i[:, None])[:, 0],
        lambda x, i: x.index_select(0, i)[:, 0],
    ],
    ids=["embedding", "embedding with padding", "cross_entropy", "weighed cross_entropy", "nll_loss", "gather", "index_select"],
)
def test_out_of_range_index_gives_nan(function, wrong):
    x, index = torch.randn(3, 3), torch.tensor([0, wrong, 1])
    with pytest.raises((IndexError, RuntimeError)):
        function(x, index)
    fn = jax.jit(bridge.module_function(Applies(function)), compiler_options=PLAIN)
    for dtype in (jnp.int8, jnp.int32):
        got = np.asarray(fn({}, jnp.asarray(x.numpy()), jnp.asarray(index.numpy(), dtype)))
        np.testing.assert_array_equal(np.isnan(got), [False, True, False])
    right = torch.tensor([0, 2, 1])
    got = fn({}, jnp.asarray(x.numpy()), jnp.asarray(right.numpy(), jnp.int32))
    np.testing.assert_allclose(np.asarray(got), function(x, right).numpy(), rtol=1e-6)


def test_ignored_label_and_plain_index_may_be_negative():
    x = torch.randn(3, 3)
    for function, index in [
        (lambda x, i: F.cross_entropy(x, i, ignore_index=-1), torch.tensor([0, -1, 1])),
        (lambda x, i: F.cross_entropy(x, i), torch.tensor([0, -100, 1])),
        (lambda x, i: x[i], torch.tensor([0, -1, 1])),
        (lambda x, i: x[-1] + 0 * x[i], torch.tensor([0, 2, 1])),
    ]:
        got = bridge.module_function(Applies(function))({}, jnp.asarray(x.numpy()), jnp.asarray(index.numpy()))
        np.testing.assert_allclose(np.asarray(got), function(x, index).numpy(), rtol=1e-6)


def test_traced_tensors_know_their_ndim_and_sign():
    seen = []
    fn = bridge.module_function(Applies(lambda x, i: seen.append((x.ndimension(), i.ndimension(), x.is_signed(), i.is_signed())) or x))
    jax.jit(fn)({}, jnp.ones((2, 3)), jnp.ones(3, jnp.uint8))
    assert seen == [(2, 1, True, False)]


def test_checks_apply_to_known_values_only():
    ask = bridge.module_function(Applies(lambda x: x * bool(torch._is_all_true(x > 0))))
    np.testing.assert_array_equal(ask({}, jnp.asarray([1.0, -1.0])), [0.0, 0.0])
    np.testing.assert_array_equal(jax.jit(ask)({}, jnp.asarray([1.0, -1.0])), [1.0, -1.0])


@pytest.mark.parametrize("validate", [None, False], ids=["validated", "not validated"])
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.distributions.Normal(a, b.exp(), **VALIDATE).log_prob(a * 2 + b),
        lambda a, b: torch.distributions.Categorical(logits=a, **VALIDATE).log_prob(torch.tensor([0, 2])) * b[:, 0],
    ],
    ids=["normal", "categorical"],
)
def test_distributions_with_validation_match_torch(function, validate, monkeypatch):
    if validate is None and "_is_all_true" not in inspect.getsource(torch.distributions.Distribution):
        pytest.skip("this torch validates by a branch on the values")
    monkeypatch.setitem(VALIDATE, "validate_args", validate)
    compare("distributions", function, [(2, 3), (2, 3)], torch.float32)


VALIDATE = {}
