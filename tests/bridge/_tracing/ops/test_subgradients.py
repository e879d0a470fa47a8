"""Operations with our own derivative rules match torch to second order; operations that a train step must not contain."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import unoptimized
from bad_inputs_modules import Applies
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bridge
import torch_api
from bridge._ir.queries import Properties, properties_of
from bridge._process import x64
from bridge._tracing.ops import layers, windows
from bridge._tracing.ops import losses as torch_losses
from bridge._xla import compile_options

POOLS = [
    case
    for case in itertools.product([(7, 8), (6, 6)], [(2, 2), (2, 3), (3, 3), ((1, 2), (2, 2)), ((2, 3), (3, 3))], [0, 1], [False, True])
    if case[2] == 0 or case[1][0] in (2, 3)
]


def pooled_by_torch(x, kernel, stride, padding, ceil_mode, weights=None):
    x = torch.tensor(x, requires_grad=True)
    out = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    weights = torch.ones_like(out) if weights is None else weights(out)
    return out.detach().numpy(), torch.autograd.grad(out, x, weights)[0].numpy()


def pooled_by_jax(x, kernel, stride, padding, ceil_mode, rule, weights=None):
    @jax.jit  # one program instead of one per operation
    def both(x):
        out, back = jax.vjp(lambda x: rule(2, x, kernel, stride, padding, 1, ceil_mode), x)
        return out, back(jnp.ones_like(out) if weights is None else jnp.asarray(weights(out)))[0]

    with x64():
        return tuple(map(np.asarray, both(jnp.asarray(x))))


def cosines(out):
    values = np.cos(np.arange(np.prod(out.shape), dtype=np.float64)).reshape(tuple(out.shape))
    return torch.from_numpy(values) if isinstance(out, torch.Tensor) else values


@pytest.mark.parametrize(("size", "window", "padding", "ceil_mode"), POOLS)
def test_max_pool_gives_the_gradient_to_the_first_maximum(size, window, padding, ceil_mode):
    x = np.random.default_rng(0).integers(0, 3, (2, 3, *size)).astype(np.float64)  # most windows have equal maxima
    given = x, *window, padding, ceil_mode
    for ours, theirs in zip(pooled_by_jax(*given, windows.max_pool, cosines), pooled_by_torch(*given, cosines), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_comparison_detects_a_gradient_at_the_last_maximum():
    x = np.zeros((1, 1, 4, 4))
    turned = lambda n, x, *rest: windows.max_pool(n, x[..., ::-1, ::-1], *rest)  # noqa: E731
    given = x, 2, 2, 0, False
    assert np.abs(pooled_by_jax(*given, turned)[1] - pooled_by_torch(*given)[1]).max() == 1


def test_max_pool_with_nan_is_nan_with_gradient_at_the_last():
    x = np.array([[[[1.0, np.nan], [np.nan, 2.0]]]])
    for ours, theirs in zip(pooled_by_jax(x, 2, 2, 0, False, windows.max_pool), pooled_by_torch(x, 2, 2, 0, False), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_integers_can_be_pooled():
    x = np.arange(16, dtype=np.int32).reshape(1, 1, 4, 4)
    np.testing.assert_array_equal(windows.max_pool(2, jnp.asarray(x), 2), [[[[5, 7], [13, 15]]]])


TWICE = {
    "max pool": (lambda x: F.max_pool2d(x, 2) ** 3, (2, 3, 4, 4)),
    "layer norm": (lambda x: F.layer_norm(x, (6,)) ** 3, (3, 6)),
    "group norm": (lambda x: F.group_norm(x, 2) ** 3, (2, 4, 3)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True) ** 3, (5, 3, 2, 2)),
    "instance norm": (lambda x: F.instance_norm(x) ** 3, (2, 3, 4)),
    "causal attention": (lambda x: F.scaled_dot_product_attention(x, x.cos(), x.sin(), is_causal=True) ** 3, (2, 4, 3)),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_match_torch(name):
    function, shape = TWICE[name]
    x = torch.randn(shape, dtype=torch.float64)
    weigh = lambda out, cos, shape: (out * cos.reshape(shape)).sum()  # noqa: E731

    def scalar(x):
        out = function(x)
        return weigh(out, torch.arange(out.numel(), dtype=torch.float64).cos(), out.shape)

    direction = torch.randn(shape, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):  # from torch 2.15 on its other kernels have no second derivative
        _, expected = torch.autograd.functional.vhp(scalar, x, direction)
    module = bridge.module_function(Applies(function))
    with x64():

        def traced(x):
            out = module({}, x)
            return weigh(out, jnp.cos(jnp.arange(out.size, dtype=jnp.float64)), out.shape)

        @jax.jit  # one program instead of one per operation
        def derivatives(a, v):
            first, forward = jax.jvp(jax.grad(traced), (a,), (v,))
            return first, jax.vjp(jax.grad(traced), a)[1](v)[0], forward, jax.vmap(jax.grad(traced))(jnp.stack([a, v]))

        first, backward, forward, each = derivatives(jnp.asarray(x.numpy()), jnp.asarray(direction.numpy()))
        np.testing.assert_allclose(each[0], first, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(backward, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(forward, expected, rtol=1e-9, atol=1e-9)


def test_comparison_detects_a_variance_rule_without_the_mean(monkeypatch):
    def without(axes, x, scale, eps):
        mean = jnp.mean(x, axes, keepdims=True)
        var = jnp.mean(jnp.square(x - jax.lax.stop_gradient(mean)), axes, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + eps) * scale

    monkeypatch.setattr(layers, "_standardize", without)  # right up to the first derivative
    with pytest.raises(AssertionError):
        test_second_derivatives_match_torch("layer norm")


def sums_of(function, x, w, b):
    """Return how often a compiled gradient sums over an array as large as x."""
    gradient = jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(function(*given))), argnums=(0, 1, 2)))
    text = gradient.lower(x, w, b).compile(compiler_options=unoptimized.options()).as_text()
    return len(re.findall(r" reduce\(%?\S+, ", text))


def test_gradient_of_batch_norm_needs_two_sums():
    def plain(x, w, b):
        mean, var = jnp.mean(x, (0, 2, 3), keepdims=True), jnp.var(x, (0, 2, 3), keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * w.reshape(1, -1, 1, 1) + b.reshape(1, -1, 1, 1)

    class Normalised(nn.Module):
        def forward(self, x, w, b):
            return F.batch_norm(x, None, None, w, b, training=True)

    module, given = bridge.module_function(Normalised()), (jnp.ones((4, 3, 5, 5)), jnp.ones(3), jnp.ones(3))
    ours, jaxs = sums_of(lambda *given: module({}, *given), *given), sums_of(plain, *given)
    assert (ours, jaxs > ours) == (4, True)  # mean, variance, and two more in the backward pass


def test_max_pool_gradient_finds_the_maximum_once():
    gradient = jax.grad(lambda x: jnp.sum(windows.max_pool(2, x, 2)))
    text = str(jax.make_jaxpr(gradient)(jnp.ones((1, 1, 4, 4), jnp.float32)))
    assert len(re.findall(r"i32\[\S+\] = optimization_barrier", text)) == 1


def test_gradient_of_an_empty_batch_is_empty():
    module = bridge.module_function(Applies(lambda x: F.batch_norm(x, None, None, training=True)))
    assert jax.grad(lambda x: module({}, x).sum())(jnp.zeros((0, 4, 3))).shape == (0, 4, 3)


def convolutional_step():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()
    )
    optimizer = torch_api.MaskedAdamW(model.named_parameters())
    step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)
    step(torch.rand(16, 1, 8, 8))
    (program,) = step._programs.values()
    return program


@pytest.mark.usefixtures("standard_promotion")
def test_convolutional_train_step_has_no_scatter_and_no_library_convolution():
    program = convolutional_step()
    assert not re.search(r"scatter|reduce_window", str(program.jaxpr))
    text = program.call.as_text()
    entry = text[text.index("\nENTRY") :]
    # two forward, two for kernels, one for an input; none is a library call
    assert len(re.findall(r" convolution\(", entry)) == len(re.findall(r" convolution\(", text)) == 5


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_convolution_is_found_in_program_and_gradient(groups):
    x, w = jnp.ones((1, 4, 5)), jnp.ones((4, 4 // groups, 3))
    conv = jax.jit(lambda w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=groups))
    assert properties_of(jax.make_jaxpr(jax.grad(lambda w: conv(w).sum()))(w)).has_grouped_convolution == (groups == 2)


class OnCPU:
    platform = "cpu"


class OnGPU:
    platform = "gpu"


@pytest.fixture
def _clear_probe_cache():
    compile_options._is_supported.cache_clear()
    yield
    compile_options._is_supported.cache_clear()


@pytest.mark.usefixtures("_clear_probe_cache")
def test_train_option_is_left_out_if_unknown_or_harmful(monkeypatch):
    assert compile_options.train_options(OnGPU, Properties(has_large_product=True)) == {}
    barriers = {compile_options._PASSES_OPTION: compile_options._BARRIER_REMOVAL}
    monkeypatch.setattr(compile_options, "_NO_CONVOLUTIONS", "NONSENSE")
    assert compile_options.train_options(OnCPU, Properties(has_large_product=True)) == barriers  # as with a jaxlib that lacks the option
    monkeypatch.undo()
    compile_options._is_supported.cache_clear()
    assert compile_options.train_options(OnCPU, Properties(has_grouped_convolution=True, has_large_product=True)) == barriers
    known = compile_options.train_options(OnCPU, Properties(has_large_product=True))
    assert known in (barriers, {**barriers, compile_options.LIBRARY_OPTION: compile_options._NO_CONVOLUTIONS})
    assert compile_options.train_options(OnCPU, Properties()) in (
        barriers,
        {**barriers, compile_options.LIBRARY_OPTION: compile_options._REDUCTIONS_ONLY},
    )
    assert compile_options.train_options(OnCPU, Properties(has_grouped_convolution=True)) == barriers
    in_loops = compile_options.train_options(OnCPU, Properties(has_barrier_in_loop=True, has_large_product=True))
    assert in_loops == {
        **known,
        compile_options._PASSES_OPTION: f"{compile_options._BARRIER_REMOVAL},{compile_options._SMALL_LOOP_OUTLINING}",
    }
    assert compile_options._PASSES_OPTION not in compile_options.train_options(OnCPU, Properties(has_barrier_in_reduction=True))
    monkeypatch.setenv("XLA_FLAGS", f"--{compile_options.LIBRARY_OPTION}=LIBRARY_FUSION_TYPE_REDUCE")
    assert compile_options.train_options(OnCPU, Properties(has_large_product=True)) == barriers
    monkeypatch.setenv("XLA_FLAGS", f"--{compile_options.LIBRARY_OPTION}=LIBRARY_FUSION_TYPE_REDUCE --{compile_options._PASSES_OPTION}=dce")
    assert compile_options.train_options(OnCPU, Properties(has_large_product=True)) == {}


def test_gelu_and_cross_entropy_have_the_derivatives_of_plain_expressions():
    with x64():
        x, index = jnp.linspace(-3.0, 3.0, 12).reshape(3, 4), jnp.asarray([3, 0, 9])
        pairs = [
            (lambda x: layers._gelu(True, x), lambda x: 0.5 * x * (1 + jax.lax.erf(x / np.sqrt(2.0)))),
            (lambda x: torch_losses._take_one_per_row(1, x**2, index)[:2], lambda x: jnp.stack([x[0, 3], x[1, 0]]) ** 2),
        ]
        for ours, plain in pairs:
            losses = [lambda x, f=f: jnp.sum(jnp.sin(f(x))) for f in (ours, plain)]
            for derivative in (jax.grad, jax.jacfwd, jax.hessian):
                np.testing.assert_allclose(*(derivative(loss)(x) for loss in losses), rtol=1e-9, atol=1e-12)
