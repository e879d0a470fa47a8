"""Values that a train step materializes on purpose (gradients with several readers, attention weights), and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from oracles import jitted
from torch import nn
from torch.nn import functional as F

import bridge
from bridge._process import x64
from bridge._tracing import context, materialize
from bridge._tracing.ops import attention

pytestmark = pytest.mark.unoptimized

KINDS = ["plain", "causal", "bool", "dead row", "float", "dead float", "scale", "broadcast"]


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, n, d, generator=generator, dtype=torch.float64) for n, d in ((5, 4), (6, 4), (6, 7))]


def options(kind):
    if kind in ("bool", "dead row"):
        mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(3)) > 0.5
        mask[:, 0] = True
        mask[2] = kind == "bool"
        return {"attn_mask": mask}
    if kind == "dead float":  # torch's math path, whose derivatives are not NaN
        return {"attn_mask": torch.linspace(-2, 2, 30, dtype=torch.float64).view(5, 6).index_fill(0, torch.tensor([2]), -torch.inf)}
    if kind == "float":
        return {"attn_mask": torch.linspace(-2, 2, 30, dtype=torch.float64).view(5, 6)}
    if kind == "broadcast":
        return {"attn_mask": torch.linspace(-2, 2, 12, dtype=torch.float64).view(2, 1, 1, 6)}
    return {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}}[kind]


class Attention(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.how)


def gradients(function, inputs):
    return jax.grad(lambda *x: jnp.sum(jnp.sin(function({}, *x))), argnums=(0, 1, 2))(*inputs)


def torchs(inputs, how):
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **how).sin().sum(), leaves)


def alike(ours, theirs):
    return all(np.allclose(np.asarray(a), b.numpy(), rtol=1e-9, atol=1e-11) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_gradient_match_torch(kind):
    inputs, how = tensors(), options(kind)
    with x64():
        arrays = [jnp.asarray(x.numpy()) for x in inputs]
        function = bridge.module_function(Attention(**how))
        assert alike([function({}, *arrays)], [F.scaled_dot_product_attention(*inputs, **how)])
        assert alike(gradients(function, arrays), torchs(inputs, how))


def test_comparison_detects_a_gradient_without_the_shared_sum(monkeypatch):
    inputs = tensors()
    monkeypatch.setattr(attention, "_normalization_tangent", lambda change, out: jnp.zeros_like(out))
    with x64():
        arrays = [jnp.asarray(x.numpy()) for x in inputs]
        assert not alike(gradients(bridge.module_function(Attention()), arrays), torchs(inputs, {}))


def plain(scores, dead, kept, value):
    """The same attention with jax's own derivatives."""
    weights = jax.nn.softmax(scores, axis=-1)
    weights = weights if dead is None else jnp.where(dead, 0.0, weights)
    return jnp.matmul(weights if kept is None else weights * kept, value)


def attended(scores, dead, kept, value):
    return attention.softmax_matmul(scores if dead is None else attention.mask_scores(scores, ~dead), kept, value)


@pytest.mark.parametrize("flags", ["none", "dead", "kept", "both"])
def test_all_derivatives_equal_those_of_the_plain_expression(flags):
    random = np.random.default_rng(0)
    with x64():
        scores, value, ds, dv = (jnp.asarray(random.normal(size=shape)) for shape in ((3, 4), (4, 2), (3, 4), (4, 2)))
        dead = jnp.asarray([[False], [True], [False]]) if flags in ("dead", "both") else None
        kept = jnp.asarray(random.integers(0, 2, (3, 4)) * 2.0) if flags in ("kept", "both") else None
        results = []
        for f in (attended, plain):

            def every(s, v, f=f):
                of = lambda s, v: f(s, dead, kept, v)  # noqa: E731
                loss = lambda s, v: jnp.sum(jnp.cos(of(s, v)))  # noqa: E731
                batch = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(jnp.stack([s, ds]), v)
                return of(s, v), jax.jvp(of, (s, v), (ds, dv)), jax.hessian(loss, (0, 1))(s, v), batch

            results.append(jitted(every)(scores, value))
        for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def products(jaxpr):
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns) + sum(
        products(getattr(x, "jaxpr", x)) for eqn in jaxpr.eqns for x in eqn.params.values() if hasattr(getattr(x, "jaxpr", x), "eqns")
    )


def test_undifferentiated_argument_of_attention_costs_no_product():
    scores, value = jnp.ones((3, 4)), jnp.ones((4, 2))
    counts = []
    for wanted in ((0,), (1,), (0, 1)):
        grad = jax.grad(lambda s, v: jnp.sum(attention.softmax_matmul(s, None, v)), wanted)
        counts.append(products(jax.make_jaxpr(grad)(scores, value).jaxpr))
    assert counts == [2, 2, 3]


def test_half_precision_stays_near_float64():
    inputs = tensors()
    with x64():
        arrays = [jnp.asarray(x.numpy()).astype(jnp.bfloat16) for x in inputs]
        ours = gradients(bridge.module_function(Attention()), arrays)
    for a, b in zip(ours, torchs(inputs, {}), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float64), b.numpy(), rtol=0.1, atol=0.03)


def test_large_scores_of_half_types_are_not_rounded_before_the_softmax():
    q, k, v = tensors()
    halves = [x.bfloat16() for x in (8 + q / 10, 3 + k / 10, v)]  # scores near 48, where a step of bfloat16 is 0.25
    q, k, v = (x.double() for x in halves)
    exact = F.scaled_dot_product_attention(q, k, v)
    rounded = (q @ k.mT / 2).bfloat16().double().softmax(-1) @ v  # rounding before the softmax would be visible
    with x64():
        ours = bridge.module_function(Attention())({}, *(jnp.asarray(x.float().numpy()).astype(jnp.bfloat16) for x in halves))
    assert np.abs(np.asarray(ours, np.float64) - exact.numpy()).max() < 1e-2 < (exact - rounded).abs().max() / 4


def test_overflow_behind_a_causal_mask_has_no_effect():
    q, k, v = (torch.ones(1, 1, 4, 4, dtype=torch.float16) for _ in range(3))
    q[..., 3, :] = 0
    k[..., 3, :] = 60000
    arrays = [jnp.asarray(x.numpy()) for x in (q, k, v)]
    function = bridge.module_function(Attention(is_causal=True))
    assert np.isfinite(np.asarray(function({}, *arrays))).all()
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients(function, arrays))
    wide = [x.astype(jnp.float32).at[..., 3, :].set(jnp.inf) if i == 1 else x.astype(jnp.float32) for i, x in enumerate(arrays)]
    assert np.isfinite(np.asarray(function({}, *wide))[..., :3, :]).all()


# ---------------------------------------------------------------------- barriers


def test_gradient_gets_a_barrier_and_derivatives_do_not_change():
    x = jnp.linspace(-1, 1, 7)
    f = lambda wanted: lambda x: jnp.sum(jnp.sin(materialize.materialize_grad(x * x, wanted)))  # noqa: E731
    barriers = [str(jax.make_jaxpr(jax.grad(f(wanted)))(x)).count("optimization_barrier") for wanted in (True, False)]
    assert barriers == [1, 0]
    assert "optimization_barrier" not in str(jax.make_jaxpr(f(True))(x))
    for derivative in (jax.grad, jax.hessian, jax.jacfwd):
        np.testing.assert_allclose(derivative(f(True))(x), derivative(f(False))(x), rtol=1e-6)


def test_integers_and_other_devices_have_no_barriers(monkeypatch):
    barriers = lambda x: str(jax.make_jaxpr(lambda x: materialize.materialize_grad(materialize.materialize(x)))(x)).count("barrier")  # noqa: E731
    assert barriers(jnp.arange(3)) == 0
    assert barriers(jnp.ones(3)) > 0
    monkeypatch.setattr(context.context, "device", torch.device("cuda"))
    assert barriers(jnp.ones(3)) == 0


@pytest.mark.parametrize("take", ["unbind", "split", "chunk"])
def test_gradient_of_split_parts_is_one_concatenation(take):
    class Parts(nn.Module):
        def forward(self, x):
            a, b, c = {"unbind": lambda: x.unbind(1), "split": lambda: x.split([1, 1, 1], -2), "chunk": lambda: x.chunk(3, 1)}[take]()
            return a * b.sin() + c

    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4).requires_grad_()
    (expected,) = torch.autograd.grad(Parts()(x).cos().sum(), x)
    with x64():
        function = jax.grad(lambda x: jnp.sum(jnp.cos(bridge.module_function(Parts())({}, x))))
        array = jnp.asarray(x.detach().numpy())
        np.testing.assert_allclose(function(array), expected.numpy(), rtol=1e-12)
        text = str(jax.make_jaxpr(function)(array))
    assert "pad[" not in text
    assert text.count("concatenate[") == 1
