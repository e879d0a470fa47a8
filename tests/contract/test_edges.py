"""Rare transformations and rare uses of optimizers: numbers, errors and lifetimes are right."""

import copy
import gc
import pickle
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import bridge
import torch_api

pytestmark = [pytest.mark.unoptimized, pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def drawn(shapes):
    return {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def go(optimizer, params, steps=1, value=1.0, **extra):
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.full_like(p, value)
        optimizer.step(**extra)


def simple(update, init=lambda params: optax.EmptyState()):
    return optax.GradientTransformation(init, update)


def reload(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("again", [reload, lambda optimizer: None], ids=["reloaded", "going on"])
def test_shared_step_count_never_decreases(again):
    params = drawn({"a": (2,), "b": (3,)})
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    go(optimizer, params, 3)
    optimizer.set_trainable("a", False)
    again(optimizer)
    go(optimizer, params, 5)
    optimizer.set_trainable("a", True)
    go(optimizer, params)
    assert optimizer.state[params["b"]]["count"].item() == optimizer.state[params["a"]]["count"].item() == 9


def test_callbacks_with_different_closures_are_distinct():
    def one(path, x):
        rate = 0.1 if "a" in str(path) else 0.5
        return jax.pure_callback(lambda y: np.float32(-rate) * np.asarray(y), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    params = drawn({"a": (4,), "b": (4,)})
    go(torch_api.OptaxOptimizer(params.items(), optax.stateless(lambda g, p: jax.tree_util.tree_map_with_path(one, g))), params)
    assert (params["a"][0].item(), params["b"][0].item()) == pytest.approx((0.9, 0.5))


@pytest.mark.parametrize("options", [{"decay_mask": "w"}, {"decay_mask": "w", "weight_decay": 1}])
def test_masking_a_static_weight_decay_raises(options):
    def factory(learning_rate=0.1, weight_decay=0.1):
        decayed = optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()
        return optax.chain(decayed, optax.sgd(learning_rate))

    params = drawn({"w": (2,), "b": (2,)})
    with pytest.raises(ValueError, match=r"decay_mask needs a transformation that .* takes weight_decay as a traced number"):
        torch_api.OptaxOptimizer(params.items(), factory, **options)


def test_hooks_run_once_when_hyper_params_are_given():
    params = drawn({"a": (2,), "b": (2,)})
    optimizer = torch_api.MultiOptimizer(params.items(), ("a", bridge.Momentum(learning_rate=0.1)), ("b", bridge.Adam(learning_rate=0.1)))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    go(optimizer, params, hyper_params=[{"learning_rate": 0.2}, None])
    assert calls == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_subclass_steps_once_when_hyper_params_are_given():
    class Counting(torch_api.MultiOptimizer):
        steps = 0

        def step(self, closure=None, **extra):
            self.steps += 1
            return super().step(closure, **extra)

    params = drawn({"a": (2,)})
    optimizer = Counting(params.items(), ("a", bridge.Momentum(learning_rate=0.1)))
    go(optimizer, params, hyper_params=[{"learning_rate": 0.2}])
    assert optimizer.steps == 1
    assert params["a"][0].item() == pytest.approx(0.8)


@pytest.mark.parametrize("lr", [torch.tensor(0.1), np.float32(0.1), jnp.float32(0.1)], ids=["torch", "numpy", "jax"])
def test_lr_may_be_a_scalar_array_or_tensor(lr):
    params = drawn({"w": (2,)})
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.sgd, lr=lr)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    go(optimizer, params)
    assert params["w"][0].item() == pytest.approx(0.9)


def test_shared_state_may_be_edited_through_any_parameter():
    params = drawn({"a": (2,), "b": (2,)})
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.inject_hyperparams(optax.adam)(0.1))
    go(optimizer, params)
    optimizer.state[params["b"]]["learning_rate"] = torch.tensor(0.0)
    before = params["a"].detach().clone()
    go(optimizer, params)
    assert torch.equal(params["a"], before)


def test_constant_with_one_value_per_element_is_applied():
    anchor = {"b": jnp.arange(6.0)}
    pull = optax.stateless(lambda g, p: jax.tree.map(lambda x, w, a: x + 0.1 * (w - a), g, p, anchor))
    params = drawn({"b": (6,)})
    go(torch_api.OptaxOptimizer(params.items(), optax.chain(pull, optax.sgd(0.1))), params)
    expected = 1 - 0.1 * (1 + 0.1 * (1 - np.arange(6.0)))
    np.testing.assert_allclose(params["b"].detach().clone().numpy(), expected, rtol=1e-6)


def test_init_may_read_other_leaves():
    def init(params):
        return {"m": jax.tree.map(jnp.zeros_like, params), "n": jnp.float32(jax.tree.leaves(params)[1].size)}

    def update(g, state, params=None):
        total = sum(jnp.sum(x) for x in jax.tree.leaves(g))
        return jax.tree.map(lambda x: -0.01 * x * total / state["n"], g), state

    params = drawn({"a": (2,), "b": (3,)})
    optimizer = torch_api.OptaxOptimizer(params.items(), simple(update, init))
    go(optimizer, params, 2)
    assert params["a"][0].item() == pytest.approx(1 - 2 * 0.01 * 5 / 3)
    reload(optimizer)
    go(optimizer, params)


@pytest.mark.parametrize("names", ["abc", "ab"])
def test_parameters_may_be_named_like_labels_of_a_partition(names):
    labels = {name: "ab"[i % 2] for i, name in enumerate(names)}
    inner = {"a": optax.adam(0.1), "b": optax.adam(0.2)}
    params = drawn(dict.fromkeys(names, (3,)))
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.chain(optax.clip_by_global_norm(1.0), optax.partition(inner, labels)))
    go(optimizer, params)
    reload(optimizer)
    go(optimizer, params)
    assert params["a"][0].item() == pytest.approx(0.8, abs=1e-4)
    assert params["b"][0].item() == pytest.approx(0.6, abs=1e-4)


class Counted(NamedTuple):
    count: Any
    inner: Any


def test_per_leaf_and_shared_state_fields_may_have_the_same_name():
    adam = optax.scale_by_adam()

    def update(g, state, params=None):
        updates, inner = adam.update(g, state.inner, params)
        return jax.tree.map(lambda u: -0.1 * u, updates), Counted(jax.tree.map(lambda c, x: c + x, state.count, g), inner)

    tx = simple(update, lambda params: Counted(jax.tree.map(jnp.zeros_like, params), adam.init(params)))
    params = drawn({"a": (4,), "b": (3,)})
    optimizer = torch_api.OptaxOptimizer(params.items(), tx)
    go(optimizer, params, 2)
    shapes = sorted(tuple(t.shape) for t in optimizer.state[params["a"]].values())
    assert shapes == [(), (4,), (4,), (4,)]
    reload(optimizer)
    go(optimizer, params)
    assert all(t.item() == 3 for t in optimizer.state[params["b"]].values() if t.ndim == 0)


@pytest.mark.parametrize("freeze", [{"mask": "w"}, {}], ids=["by mask", "by requires_grad"])
def test_transformation_does_not_see_a_frozen_leaf(freeze):
    params = drawn({"w": (4, 4), "b": (4,)})
    params["b"].requires_grad_(bool(freeze))
    tx = simple(
        lambda g, state, params=None: (jax.tree.map(lambda x: -0.1 * x, g), state),
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[1]), params),
    )
    optimizer = torch_api.OptaxOptimizer(params.items(), tx, **freeze)
    go(optimizer, params)
    assert (params["w"][0, 0].item(), params["b"][0].item()) == (pytest.approx(0.9), 1.0)


def test_parameter_that_requires_grad_later_is_trained():
    params = drawn({"w": (4, 4), "b": (4,)})
    params["b"].requires_grad_(False)
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.adam(0.1))
    go(optimizer, params)
    params["b"].requires_grad_(True)
    go(optimizer, params)
    assert params["b"][0].item() == pytest.approx(0.9, abs=1e-5)
    assert optimizer.state[params["b"]]["count"].item() == 1


@pytest.mark.parametrize("wrap", [lambda tx: optax.apply_if_finite(tx, 2), lambda tx: tx], ids=["in a cond", "alone"])
def test_bfloat16_moments_are_computed_as_in_optax(wrap):
    tx = wrap(optax.adam(0.1, mu_dtype=jnp.bfloat16))
    params = drawn({"w": (6, 5)})
    optimizer = torch_api.OptaxOptimizer(params.items(), tx)
    tree = {"w": jnp.ones((6, 5))}
    state = tx.init(tree)
    for step in range(5):
        g = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        params["w"].grad = g
        optimizer.step()
        updates, state = jax.jit(tx.update)({"w": jnp.asarray(g.numpy())}, state, tree)
        tree = optax.apply_updates(tree, updates)
    assert optimizer.state[params["w"]]["mu"].dtype == torch.bfloat16
    np.testing.assert_allclose(params["w"].detach().clone().numpy(), np.asarray(tree["w"]), atol=1e-5)


def first(name, p):
    return "x"


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch_api.MultiOptimizer(ps, ("a", bridge.Adam(learning_rate=0.1))),
        lambda ps: torch_api.PartitionedOptimizer(ps, {"x": (optax.adam, {"learning_rate": 0.1})}, lambda name, p: "x"),
        lambda ps: torch_api.PartitionedOptimizer(ps, {"x": (optax.adam, {"lr": 0.1})}, first),
        lambda ps: torch_api.OptaxOptimizer(ps, optax.adamw, lr=0.1),
    ],
)
def test_optimizers_can_be_pickled(make):
    params = drawn({"a": (3,), "b": (2,)})
    optimizer = make(params.items())
    go(optimizer, params)
    other = pickle.loads(pickle.dumps(optimizer))
    own = dict(zip(params, [p for group in other.param_groups for p in group["params"]], strict=True))
    go(optimizer, params)
    go(other, own)
    assert all(torch.equal(params[name], own[name]) for name in params)


def test_checkpoint_with_other_options_replaces_them_as_in_torch():
    params, fresh = drawn({"a": (3,)}), drawn({"a": (3,)})
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.sgd, lr=0.1, momentum=0.9)
    go(optimizer, params, 2)
    other = torch_api.OptaxOptimizer(fresh.items(), optax.sgd, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["momentum"] == 0.9
    with torch.no_grad():
        fresh["a"].copy_(params["a"])
    go(optimizer, params)
    go(other, fresh)
    assert torch.equal(params["a"], fresh["a"])


def test_a_checkpoint_with_other_labels_is_refused():
    make = lambda labels: torch_api.PartitionedOptimizer(  # noqa: E731
        drawn({"a": (3,), "b": (2,)}).items(), {label: optax.adam(0.1) for label in labels}, dict(zip("ab", labels, strict=True))
    )
    with pytest.raises(ValueError, match=r"has the label 'x', expected 'u'"):
        make("uv").load_state_dict(make("xy").state_dict())


def test_optional_hyperparameter_can_be_switched_off_and_on():
    params = drawn({"a": (3,)})
    optimizer = torch_api.OptaxOptimizer(params.items(), optax.sgd, lr=0.1, momentum=0.9)
    go(optimizer, params)
    optimizer.param_groups[0]["momentum"] = None
    go(optimizer, params)
    assert params["a"][0].item() == pytest.approx(0.8)
    optimizer.param_groups[0]["momentum"] = 0.5
    go(optimizer, params)


def test_integer_updates_are_applied():
    params = drawn({"a": (3,)})
    signs = optax.stateless(lambda g, p: jax.tree.map(lambda x: -jnp.sign(x).astype(jnp.int32), g))
    go(torch_api.OptaxOptimizer(params.items(), signs, lr=0.5), params)
    assert params["a"].tolist() == [0.5, 0.5, 0.5]


def test_integer_lr_of_a_definition_is_traced():
    params = drawn({"a": (3,)})
    optimizer = torch_api.MultiOptimizer(params.items(), ("a", bridge.Momentum(learning_rate=1)))
    go(optimizer, params)
    compiled = bridge.compilations()
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        go(optimizer, params)
    assert bridge.compilations() == compiled


def test_closures_are_not_compiled_and_not_kept_alive():
    tx = optax.chain(optax.adam(0.1))
    compiled = None
    for _ in range(3):
        params = drawn({"a": (3,)})
        optimizer = torch_api.OptaxOptimizer(params.items(), tx)

        def closure(p=params["a"]):
            p.grad = torch.ones(3)
            return p.sum()

        optimizer.step(closure)
        assert compiled in (None, bridge.compilations())
        compiled = bridge.compilations()
    silent = lambda p=params["a"]: p.sum()  # noqa: E731
    params["a"].grad = None
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        optimizer.step(silent)
    kept = [weakref.ref(silent), weakref.ref(params["a"])]
    del silent, closure, params, optimizer
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_factory_makes_one_transformation_per_group():
    def factory(lr=0.1):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(lr))

    params = drawn({"a": (2,), "b": (2,)})
    groups = [{"params": [(name, p)]} for name, p in params.items()]
    go(torch_api.OptaxOptimizer(groups, factory, lr=0.1), params)
    assert params["a"][0].item() == pytest.approx(1 - 0.1 / 2**0.5)
    params = drawn({"a": (2,), "b": (2,)})
    groups = [{"params": [(name, p)]} for name, p in params.items()]
    go(torch_api.OptaxOptimizer(groups, factory()), params)
    assert params["a"][0].item() == pytest.approx(1 - 0.1 / 4**0.5)


def test_error_in_the_update_is_raised_at_construction():
    def update(g, state, params=None):
        raise RuntimeError("this update is not written yet")

    params = drawn({"a": (2,)})
    address = params["a"].data_ptr()
    with pytest.raises(RuntimeError, match="not written yet"):
        torch_api.OptaxOptimizer(params.items(), simple(update))
    assert params["a"].data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_empty_state_has_the_dtype_of_its_parameter(dtype):
    p = torch.nn.Parameter(torch.ones(0, 3, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = torch_api.MaskedAdam([p])
    optimizer.step()
    assert (optimizer.state[p]["exp_avg"].dtype, optimizer.state[p]["exp_avg"].shape) == (dtype, p.shape)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9, "master_weights": True}], ids=["plain", "kept beside"])
def test_model_may_change_its_dtype_between_steps(options):
    model = torch.nn.Linear(4, 4)
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=0.1, **options)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for n, p in model.named_parameters():
            assert p.dtype == dtype
            assert torch.allclose(p, (before[n] * (1 - 0.1 * 1e-2) - 0.1), atol=0.01)
    assert all(optimizer.state[p]["step"] == 5 for p in model.parameters())


@pytest.mark.parametrize("at", ["gradient", "parameter"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_element_spreads_in_adafactor_as_in_torch(at, bad):
    both = [torch.nn.Parameter(torch.linspace(1, 2, 12).view(3, 4)) for _ in range(2)]
    optimizers = torch.optim.Adafactor([both[0]], lr=0.1), torch_api.MaskedAdafactor([both[1]], lr=0.1)
    for p, optimizer in zip(both, optimizers, strict=True):
        p.grad = torch.linspace(-1, 1, 12).view(3, 4)
        with torch.no_grad():
            (p if at == "parameter" else p.grad)[1, 2] = bad
        optimizer.step()
    assert torch.allclose(both[0], both[1], equal_nan=True)


def refuses_seven():
    """Return a transformation whose `init` raises for a leaf of seven elements."""

    def init(params):
        if any(x.size == 7 for x in jax.tree.leaves(params)):
            raise ValueError("init refuses seven")
        return optax.EmptyState()

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def unchanged_by(optimizer, call, params):
    """Check that `call` raises and that groups, decisions and later steps of the optimizer are unaffected."""
    before = [{**group} for group in optimizer.param_groups], [(leaf.name, leaf.decision) for leaf in optimizer._records]
    with pytest.raises(ValueError, match=r"refuses seven|several elements have one address"):
        call()
    assert ([{**group} for group in optimizer.param_groups], [(leaf.name, leaf.decision) for leaf in optimizer._records]) == before
    values = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not any(map(torch.equal, values, params))


def test_refused_group_leaves_the_optimizer_unchanged():
    p = torch.nn.Parameter(torch.ones(3))
    expanded, seven = torch.nn.Parameter(torch.ones(1).expand(4)), torch.nn.Parameter(torch.ones(7))
    adam = torch_api.MaskedAdamW([("a", p)])
    unchanged_by(adam, lambda: adam.add_param_group({"params": [("b", expanded)]}), [p])
    ready = torch_api.OptaxOptimizer([("a", p)], refuses_seven())
    unchanged_by(ready, lambda: ready.add_param_group({"params": [("b", seven)]}), [p])


def test_group_with_two_labels_is_added_whole_or_not_at_all():
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    both = torch_api.PartitionedOptimizer(
        [("x.a", p), ("y.a", q)], {"x": optax.sgd(0.1), "y": refuses_seven()}, lambda name, _: name.partition(".")[0]
    )
    new = [("x.b", torch.nn.Parameter(torch.ones(4))), ("y.b", torch.nn.Parameter(torch.ones(7)))]
    unchanged_by(both, lambda: both.add_param_group({"params": new}), [p, q])


def test_parameter_that_cannot_be_thawed_stays_frozen():
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(7))
    optimizer = torch_api.OptaxOptimizer([("a", p), ("b", q)], refuses_seven(), mask="a")
    unchanged_by(optimizer, lambda: optimizer.set_trainable("b", True), [p])
    assert not optimizer.state.get(q)
