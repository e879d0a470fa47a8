"""Masks on the optax side: masks with optax's meaning and with ours, partitions, and re-exported names of optax."""

import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import NumpyAdam, NumpySGD

import bridge
import torch_api
from bridge._process import x64
from bridge._transforms import masking
from bridge._transforms.masking import MaskedNode, freeze, masked, partition, select

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

STEPS = 25
SHAPES = {"body": {"weight": (4, 3), "bias": (3,)}, "head": {"weight": (3, 2), "bias": (2,)}}
NAMES = ["body.bias", "body.weight", "head.bias", "head.weight"]  # in jax's order
HEAD = {"body": {"weight": False, "bias": False}, "head": {"weight": True, "bias": True}}


@pytest.fixture(autouse=True)
def _as_optax_users_run():
    with x64(), jax.numpy_dtype_promotion("standard"):  # optax's own rules promote int32 counts
        yield


def flat(tree):
    return {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def draw(seed=0, steps=STEPS):
    rng = np.random.default_rng(seed)
    make = lambda: jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape)), SHAPES, is_leaf=lambda x: isinstance(x, tuple))  # noqa: E731
    return make(), [make() for _ in range(steps)]


def run(tx, params, grads, state=None, jit=True, **extra):
    """Return end point and state; `extra` holds extra args with one entry per step."""
    state = tx.init(params) if state is None else state

    def step(params, state, g, **extra):
        updates, state = tx.update(g, state, params, **extra)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for i, g in enumerate(grads):
        params, state = step(params, state, g, **{key: values[i] for key, values in extra.items()})
    return params, state


def oracle(start, grads, rules):
    """Return the end point by name; `rules` maps names to reference rules, and other leaves do not move."""
    p = flat(start)
    for g in map(flat, grads):
        p |= {name: rule.step(p[name], g[name]) for name, rule in rules.items()}
    return p


def off(ours, theirs, start):
    """Return the largest difference of two end points over the largest movement of a leaf."""
    ours, start = flat(ours), flat(start)
    moved = max(np.linalg.norm(theirs[name] - start[name]) for name in start)
    assert moved > 0, "the reference did not move: this comparison could not fail"
    return max(np.linalg.norm(ours[name] - theirs[name]) for name in start) / moved


def adams(names):
    return {name: NumpyAdam(0.01, (0.9, 0.99)) for name in names}


def adam():
    return optax.adam(0.01, 0.9, 0.99)


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@jax.tree_util.register_pytree_with_keys_class
class Net:
    """A callable pytree, like an Equinox module."""

    def __init__(self, w, b):
        self.w, self.b = w, b

    def __call__(self, x):
        return x @ self.w + self.b

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey("w"), self.w), (jax.tree_util.DictKey("b"), self.b)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


# masked: True and False have optax's meaning


MASKS = {
    "tree": HEAD,
    "prefix": {"body": False, "head": True},
    "function to a tree": lambda p: jax.tree.map(lambda _, m: m, p, HEAD),
    "function to a prefix": lambda _: {"body": False, "head": True},
    "bool arrays": jax.tree.map(np.asarray, HEAD),
}


@pytest.mark.quick
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masked_transforms_true_and_passes_raw_gradients_of_false(mask):
    start, grads = draw()
    head = {"head.weight": NumpyAdam(0.01, (0.9, 0.99)), "head.bias": NumpyAdam(0.01, (0.9, 0.99))}
    raw = {"body.weight": NumpySGD(-1.0), "body.bias": NumpySGD(-1.0)}  # p + g
    theirs = oracle(start, grads, head | raw)
    ours, state = run(masked(adam(), mask), start, grads)
    assert off(ours, theirs, start) < 1e-12
    assert isinstance(state, masking.MaskedState)
    inverted, _ = run(masked(adam(), jax.tree.map(lambda m: not m, HEAD)), start, grads)
    assert off(inverted, theirs, start) > 0.1


def test_docstrings_state_the_meaning_of_false():
    assert "where the mask is False, the RAW GRADIENT passes through" in masked.__doc__
    assert "Elsewhere the update is exactly zero" in select.__doc__
    assert "Set updates to zero where `frozen` is True" in freeze.__doc__


@pytest.mark.parametrize(
    "tx", [masked(adam(), HEAD), select(adam(), "head.*"), partition({"a": adam(), "z": optax.set_to_zero()}, {"head": "a", "body": "z"})]
)
def test_state_exists_only_where_the_mask_is_true(tx):
    params, _ = draw()
    count = 4
    assert size(tx.init(params)) == 2 * size(params["head"]) + count
    assert size(masked(adam(), True).init(params)) == 2 * size(params) + count  # the count of bytes can fail


@pytest.mark.quick
def test_nested_masks_act_as_their_conjunction():
    start, grads = draw()
    biases = jax.tree.map(lambda x: x.ndim == 1, start)
    ours, state = run(masked(masked(optax.chain(adam(), optax.scale(2.0)), biases), HEAD), start, grads)
    raw = {name: NumpySGD(-1.0) for name in NAMES}
    theirs = oracle(start, grads, raw | {"head.bias": NumpyAdam(0.02, (0.9, 0.99))})
    assert off(ours, theirs, start) < 1e-12
    assert size(state) == 2 * size(start["head"]["bias"]) + 4

    ours, state = run(select(select(adam(), "*.bias"), HEAD), start, grads)
    theirs = oracle(start, grads, adams(["head.bias"]))
    assert off(ours, theirs, start) < 1e-12
    assert size(state) == 2 * size(start["head"]["bias"]) + 4


def add_tags():
    """Add the extra arg `tags`, which must have the structure of the incoming updates."""
    update = lambda updates, state, params=None, *, tags, **_: (jax.tree.map(lambda u, t: u + t, updates, tags), state)  # noqa: E731
    return masking.GradientTransformationExtraArgs(optax.identity().init, update)


WITH_TAGS = {
    "masked": lambda tx, **options: masked(tx, HEAD, **options),
    "select": lambda tx, **options: select(tx, "head.*", **options),
    "partition": lambda tx, **options: partition({"a": tx, "z": optax.set_to_zero()}, {"head": "a", "body": "z"}, **options),
}


@pytest.mark.parametrize("wrap", WITH_TAGS.values(), ids=WITH_TAGS)
def test_extra_args_with_parameter_structure_are_masked_on_request(wrap):
    start, grads = draw()
    _, tags = draw(seed=1)
    sgd = optax.chain(add_tags(), optax.sgd(0.1))
    summed = jax.tree.map(jnp.add, grads, tags)
    rest = NumpySGD(-1.0 if wrap is WITH_TAGS["masked"] else 0.0)
    theirs = oracle(start, [{"head": s["head"], "body": g["body"]} for s, g in zip(summed, grads, strict=True)],
                    {name: NumpySGD(0.1) if "head" in name else rest for name in NAMES})  # fmt: skip
    ours, _ = run(wrap(sgd, mask_compatible_extra_args=True), start, grads, tags=tags)
    assert off(ours, theirs, start) < 1e-12
    with pytest.raises(ValueError, match=r"MaskedNode|Expected named tuple"):
        run(wrap(sgd), start, grads, tags=tags)


# callable pytrees


def test_callable_pytree_may_be_parameters_mask_or_labels():
    start = Net(jnp.ones((3, 2)), jnp.ones(2))
    ones = jax.tree.map(jnp.ones_like, start)
    mask, labels = Net(True, False), Net("a", "b")
    by_shape = lambda p: jax.tree.map(lambda x: x.ndim == 2, p)  # noqa: E731
    tx = optax.scale(-2.0)
    for wrapped, w, b in [
        *((masked(tx, m), -2, 1) for m in (mask, by_shape)),
        *((select(tx, m), -2, 0) for m in (mask, by_shape, "w", {"w": True})),
        *((freeze(frozen=m), 0, 1) for m in (mask, by_shape, "w")),
        *((partition({"a": tx, "b": optax.scale(3.0)}, m), -2, 3) for m in (labels, lambda _: labels, [("w", "a"), ("*", "b")])),
    ]:
        updates, _ = wrapped.update(ones, wrapped.init(start), start)
        np.testing.assert_array_equal(updates.w, np.full((3, 2), w))
        np.testing.assert_array_equal(updates.b, np.full(2, b))


class Threshold:
    """A function that is a pytree, with a number as its leaf or without leaves."""

    def __init__(self, *ndim):
        self.ndim = ndim

    def __call__(self, params):
        return jax.tree.map(lambda x: x.ndim > (self.ndim or (1,))[0], params)


jax.tree_util.register_pytree_node(Threshold, lambda t: (t.ndim, None), lambda _, ndim: Threshold(*ndim))


@pytest.mark.parametrize(
    "mask",
    [Threshold(), Threshold(1), jax.tree_util.Partial(lambda n, p: Threshold(n)(p), 1)],
    ids=["without a leaf", "with a number", "Partial"],
)
def test_callable_pytree_without_a_bool_is_called(mask):
    params, _ = draw()
    ones = jax.tree.map(jnp.ones_like, params)
    with pytest.raises(ValueError, match=r"structure error|type mismatch"):  # optax's error
        optax.masked(optax.scale(-2.0), mask).init(params)
    for tx, weight, bias in [
        (masked(optax.scale(-2.0), mask), -2.0, 1.0),
        (select(optax.scale(-2.0), mask), -2.0, 0.0),
        (freeze(frozen=mask), 0.0, 1.0),
    ]:
        updates, _ = tx.update(ones, tx.init(params), params)
        for name, u in flat(updates).items():
            np.testing.assert_array_equal(u, np.full(u.shape, weight if "weight" in name else bias))


@pytest.fixture(scope="module")
def model():
    eqx = pytest.importorskip("equinox")
    return eqx.nn.MLP(2, 1, 3, 1, key=jax.random.PRNGKey(0))  # callable, and jax.nn.relu is one of its leaves


EQUINOX_MASKS = {
    "module of bools": lambda eqx, model: jax.tree.map(lambda x: x.ndim == 2, eqx.filter(model, eqx.is_array)),
    "module of bools and functions": lambda eqx, model: jax.tree.map(lambda x: x.ndim == 2 if eqx.is_array(x) else x, model),
    "module of bools, False for functions": lambda eqx, model: jax.tree.map(lambda x: eqx.is_array(x) and x.ndim == 2, model),
    "function to a module": lambda eqx, model: lambda p: jax.tree.map(lambda x: x.ndim == 2, p),
    "tree_at": lambda eqx, model: eqx.tree_at(
        lambda m: [layer.weight for layer in m.layers], jax.tree.map(lambda _: False, model), replace_fn=lambda _: True
    ),
}


@pytest.mark.parametrize("make", EQUINOX_MASKS.values(), ids=EQUINOX_MASKS)
def test_equinox_module_may_be_parameters_and_mask(make, model):
    """An Equinox module is callable; as a mask or labels it must not be called."""
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(model, eqx.is_array)
    mask = make(eqx, model)
    assert callable(mask)
    x, y = jnp.ones((4, 2), jnp.float32), jnp.ones((4, 1), jnp.float32)

    @eqx.filter_grad
    def gradient(params):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    for tx, trained, others in [
        (masked(optax.sgd(0.1), mask), -0.1, 1.0),
        (select(optax.sgd(0.1), mask), -0.1, 0.0),
        (optax.chain(optax.sgd(0.1), freeze(frozen=mask)), 0.0, -0.1),
        (select(optax.sgd(0.1), "layers.*.weight"), -0.1, 0.0),
    ]:
        grads = gradient(params)
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        assert type(updates) is type(model)
        for g, u in zip(jax.tree.leaves(grads), jax.tree.leaves(updates), strict=True):
            assert jnp.any(g != 0)
            np.testing.assert_allclose(u, (trained if g.ndim == 2 else others) * g, rtol=1e-6)
        jax.vmap(eqx.apply_updates(model, updates))(x)  # the complete model, including its functions


def test_equinox_module_may_hold_labels_or_functions(model):
    eqx = pytest.importorskip("equinox")
    params = eqx.filter(model, eqx.is_array)
    ones = jax.tree.map(jnp.ones_like, params)
    labels = jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)
    txs = {"matrix": optax.scale(2.0), "vector": optax.scale(3.0)}
    with pytest.raises(TypeError):
        optax.partition(txs, labels).init(params)  # optax would call the module
    tx = partition(txs, labels)
    updates, _ = tx.update(ones, tx.init(params), params)
    assert [float(u.flat[0]) for u in map(np.asarray, jax.tree.leaves(updates))] == [2.0, 3.0, 2.0, 3.0]

    tx = select(adam(), jax.tree.map(eqx.is_array, model))
    updates, state = tx.update(ones, tx.init(model), model)  # relu is a leaf of these parameters, and has no gradient
    assert size(state) == 2 * size(params) + 4
    assert eqx.apply_updates(model, updates).activation is model.activation


# select and freeze: True and False have the project's meaning


SELECTORS = {
    "glob": "head.*",
    "globs": ["head.weight", "head.b*"],
    "regex": re.compile("^head"),
    "names": lambda name, param: name.startswith("head"),
    "first match": [("body.*", False), ("*", True)],
    "dict by prefix": {"head": True},
    "dotted dict": {"head.weight": True, "head.bias": True},
    **MASKS,
}


@pytest.mark.quick
@pytest.mark.parametrize("mask", SELECTORS.values(), ids=SELECTORS)
def test_select_optimizes_exactly_the_selected_leaves(mask):
    start, grads = draw()
    bad = {"weight": jnp.full((4, 3), jnp.nan), "bias": jnp.full(3, jnp.inf)}
    grads = [g | {"body": bad} for g in grads]
    tx = select(adam(), mask)
    ours, state = run(tx, start, grads)
    theirs = oracle(start, grads, adams(["head.weight", "head.bias"]))
    assert off(ours, theirs, start) < 1e-12
    np.testing.assert_array_equal(ours["body"]["weight"], start["body"]["weight"])
    updates, _ = tx.update(grads[0], tx.init(start), start)
    assert all((u == 0).all() for u in jax.tree.leaves(updates["body"]))
    assert size(state) == 2 * size(start["head"]) + 4


@pytest.mark.parametrize(
    "broken",
    [select(adam(), "body.*"), masked(adam(), HEAD), select(adam(), True), select(optax.adam(0.0101), "head.*")],
    ids=["inverted", "leaking", "all", "another rate"],
)
def test_oracle_detects_a_broken_selection(broken):
    start, grads = draw()
    theirs = oracle(start, grads, adams(["head.weight", "head.bias"]))
    assert off(run(broken, start, grads)[0], theirs, start) > 1e-3


@pytest.mark.parametrize("frozen", SELECTORS.values(), ids=SELECTORS)
def test_freeze_zeroes_exactly_the_selected_leaves(frozen):
    start, grads = draw()
    theirs = oracle(start, grads, adams(["body.weight", "body.bias"]))
    ours, _ = run(optax.chain(adam(), freeze(frozen=frozen)), start, grads)
    assert off(ours, theirs, start) < 1e-12
    np.testing.assert_array_equal(ours["head"]["weight"], start["head"]["weight"])
    assert off(run(optax.chain(adam(), freeze(frozen="body.*")), start, grads)[0], theirs, start) > 0.5
    assert jax.tree.leaves(freeze(frozen=frozen).init(start)) == []


@pytest.mark.quick
def test_freeze_zeroes_nonfinite_gradients():
    params, _ = draw()
    tx = freeze(frozen="head.*")
    updates, _ = tx.update(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params), tx.init(params))
    assert all((u == 0).all() for u in jax.tree.leaves(updates["head"]))
    assert all(jnp.isnan(u).all() for u in jax.tree.leaves(updates["body"]))


@pytest.mark.quick
def test_freeze_takes_true_false_and_refuses_none():
    params, grads = draw(steps=1)
    for frozen, factor in [(True, 0.0), (False, 1.0)]:
        updates, _ = freeze(frozen=frozen).update(grads[0], freeze(frozen=frozen).init(params))
        jax.tree.map(lambda u, g, factor=factor: np.testing.assert_array_equal(u, factor * g), updates, grads[0])
    with pytest.raises(TypeError, match=r"frozen=None says neither all nor nothing\. Use True"):
        freeze(frozen=None)
    with pytest.raises(TypeError, match="positional"):
        freeze("head.*")  # the keyword states the polarity


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_element_mask_trains_selected_elements_only(kind):
    start, grads = draw()
    rows = np.zeros((3, 2), bool)
    rows[0] = True
    mask = [("head.weight", kind(rows)), ("body.*", False), ("*", True)]
    dirty = [g | {"head": g["head"] | {"weight": jnp.where(rows, g["head"]["weight"], jnp.nan)}} for g in grads]
    decayed = optax.adamw(0.01, 0.9, 0.99, weight_decay=0.1)
    full = oracle(start, grads, {n: NumpyAdam(0.01, (0.9, 0.99), weight_decay=0.1, decoupled=True) for n in ("head.weight", "head.bias")})
    theirs = full | {"head.weight": np.where(rows, full["head.weight"], start["head"]["weight"])}
    ours, state = run(select(decayed, mask), start, dirty)
    assert off(ours, theirs, start) < 1e-12
    assert off(run(select(decayed, "head.*"), start, grads)[0], theirs, start) > 0.1
    assert size(state) == 2 * size(start["head"]) + 4 + rows.nbytes
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))  # no gradient of a frozen element entered the state
    halved = masking.tree_map_params(select(decayed, mask), lambda v: v / 2, state)
    jax.tree.map(np.testing.assert_array_equal, halved.labels, state.labels)

    ours, _ = run(optax.chain(decayed, freeze(frozen=[("head.weight", kind(~rows)), ("body.*", True)])), start, grads)
    assert off(ours, theirs, start) < 1e-12


def test_frozen_leaves_do_not_join_the_norm():
    start, grads = draw()
    grads = [g | {"body": jax.tree.map(lambda x: 1e6 * x, g["body"])} for g in grads]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    ours, _ = run(select(tx, "head.*"), start, grads)
    norms = [np.sqrt(sum((x**2).sum() for x in flat(g["head"]).values())) for g in grads]
    clipped = [jax.tree.map(lambda x, n=n: x * min(1.0, 0.5 / n), g) for g, n in zip(grads, norms, strict=True)]
    theirs = oracle(start, clipped, {"head.weight": NumpySGD(0.1), "head.bias": NumpySGD(0.1)})
    assert off(ours, theirs, start) < 1e-12
    leaking, _ = run(optax.chain(tx, freeze(frozen="body.*")), start, grads)
    assert off(leaking, theirs, start) > 0.9


def test_frozen_leaf_needs_no_gradient():
    params, grads = draw(steps=1)
    tx = select(adam(), "head.*")
    none = {"body": {"weight": None, "bias": None}, "head": grads[0]["head"]}
    updates, _ = tx.update(none, tx.init(params), params)
    assert updates["body"] == none["body"]
    np.testing.assert_allclose(updates["head"]["bias"], -0.01 * np.sign(grads[0]["head"]["bias"]), rtol=1e-5)


# when a selector is evaluated


def test_selector_is_evaluated_once_and_stored_in_the_state():
    params, grads = draw()
    calls = []

    def large(name, param):
        calls.append(name)
        return bool(jnp.max(jnp.abs(param)) > 1.0)

    tx = select(optax.sgd(0.1), large)
    one, two = tx.init(params), tx.init(jax.tree.map(lambda x: 100 * x, params))
    assert calls == [*NAMES, *NAMES]
    small = jax.tree.map(lambda x: x / 1e6, params)
    third = tx.init(small)
    for state, trained in [(two, NAMES), (third, []), (one, [n for n, p in flat(params).items() if abs(p).max() > 1])]:
        ours, _ = run(tx, small, grads, state)
        assert [name for name, p in flat(ours).items() if (p != flat(small)[name]).any()] == trained
    assert 0 < len(trained) < 4
    assert len(calls) == 12


def test_pickled_state_keeps_its_mask_and_compiles_nothing():
    params, grads = draw()
    tx, traces = select(adam(), "head.*"), []

    @jax.jit
    def update(g, state):
        traces.append(1)
        return tx.update(g, state)

    state = tx.init(params)
    for g in grads:
        updates, state = update(g, pickle.loads(pickle.dumps(state)))
    expected = run(tx, params, grads)[1]
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert len(traces) == 1
    update(grads[0], select(adam(), "head.*").init(params))
    assert len(traces) == 1
    assert not (updates["body"]["weight"]).any()


def test_init_works_with_tracers_and_abstract_arrays():
    params, _ = draw()
    tx = select(adam(), lambda name, param: name.startswith("head") and param.ndim == 2)
    expected = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(jax.jit(tx.init)(params)) == jax.tree.structure(abstract) == jax.tree.structure(expected)
    assert jax.tree.structure(tx.init(jax.eval_shape(lambda: params))) == jax.tree.structure(expected)
    assert size(expected) == 2 * size(params["head"]["weight"]) + 4


def test_errors_name_the_pattern_and_the_leaf():
    params, grads = draw(steps=1)
    for tx in (select(adam(), "haed.*"), freeze(frozen="haed.*")):
        with pytest.raises(ValueError, match=r"'haed\.\*' matches none of 4 parameters\. Did you mean 'head\."):
            tx.init(params)
    with pytest.raises(TypeError, match=r"'body.bias' got 3 \(int\)"):
        select(adam(), lambda name, param: 3).init(params)
    with pytest.raises(TypeError, match=r"'head.bias' is traced .*A mask is decided on the host, outside jit"):
        jax.jit(lambda m: select(adam(), {"body": False, "head": {"weight": True, "bias": m}}).init(params))(True)
    tx = select(adam(), True)
    state = tx.init({"body": params["body"]})
    with pytest.raises(ValueError, match=r"init did not see the leaf \['head'\]\['bias'\]\. Call init with the parameters as they are now"):
        tx.update(grads[0], state, params)


# partition


LABELS = {
    "prefix tree": {"body": "slow", "head": "fast"},
    "dict by prefix": {"body.weight": "slow", "body.bias": "slow", "head": "fast"},
    "function to a tree": lambda p: {"body": "slow", "head": "fast"},
    "names": lambda name, param: "fast" if name.startswith("head") else "slow",
    "first match": [("head.*", "fast"), ("*", "slow")],
}


@pytest.mark.quick
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_partition_takes_labels_from_any_selector(labels):
    start, grads = draw()
    tx = partition({"slow": adam(), "fast": optax.sgd(0.1, 0.9)}, labels)
    theirs = oracle(start, grads, adams(["body.weight", "body.bias"]) | {f"head.{n}": NumpySGD(0.1, 0.9) for n in ("weight", "bias")})
    ours, state = run(tx, start, grads)
    assert off(ours, theirs, start) < 1e-12
    assert isinstance(state.inner_state, masking.PartitionState)
    swapped, _ = run(partition({"fast": adam(), "slow": optax.sgd(0.1, 0.9)}, labels), start, grads)
    assert off(swapped, theirs, start) > 0.1
    theirs = optax.partition(
        {"slow": adam(), "fast": optax.sgd(0.1, 0.9)}, {n: dict.fromkeys(start[n], label) for n, label in LABELS["prefix tree"].items()}
    ).init(start)
    assert jax.tree.structure(tx.init(start).inner_state) == jax.tree.structure(theirs)


def test_label_trees_of_optax_are_not_read_as_patterns():
    params = (jnp.ones(2), {"w": jnp.ones(3)})
    txs = {"a": optax.scale(2.0), "b": optax.scale(3.0)}
    for labels, expected in [(("a", "b"), [2.0, 3.0]), (lambda _: ("b", "a"), [3.0, 2.0]), (("a", {"w": "b"}), [2.0, 3.0])]:
        tx = partition(txs, labels)
        assert [float(u[0]) for u in jax.tree.leaves(tx.update(params, tx.init(params))[0])] == expected
    tx = partition({"a": txs["a"]}, "a")  # one label for all
    assert [float(u[0]) for u in jax.tree.leaves(tx.update(params, tx.init(params))[0])] == [2.0, 2.0]
    tx = partition({True: txs["a"], False: txs["b"]}, (True, False))
    assert [float(u[0]) for u in jax.tree.leaves(tx.update(params, tx.init(params))[0])] == [2.0, 3.0]


def test_labels_without_a_transformation_raise():
    params, _ = draw()
    txs = {"slow": adam(), "fast": optax.sgd(0.1)}
    with pytest.raises(ValueError, match=r"no transformation for the label 'fats' of 'head.bias' \(2 of 4 leaves .*Did you mean 'fast'\?"):
        partition(txs, [("head.*", "fats"), ("*", "slow")]).init(params)
    with pytest.raises(ValueError, match=r"no transformation for the label 3 of 'head.bias'.*Known names: fast, slow"):
        partition(txs, {"body": "slow", "head": 3}).init(params)  # optax: '<' not supported between int and str
    with pytest.raises(ValueError, match=r"no leaf has the label 'fsat', so its transformation would do nothing.*Did you mean 'fast'\?"):
        partition(txs | {"fsat": adam()}, {"body": "slow", "head": "fast"}).init(params)
    with pytest.raises(ValueError, match=r"no rule gives 'body.bias' a label"):
        partition(txs, [("head.*", "fast")]).init(params)
    for keys in (("slow", 1), (("a", 1), ("a", 2))):
        with pytest.raises(TypeError, match=r"labels \[.*\] cannot be leaves of a pytree and keys that jax sorts\. Use strings"):
            partition(dict.fromkeys(keys, adam()), "slow")


# tree_map_params


MAPPED = {
    "masked": masked(adam(), HEAD),
    "select": select(adam(), "head.*"),
    "partition": partition({"a": adam(), "z": optax.set_to_zero()}, {"head": "a", "body": "z"}),
    "nested and chained": optax.chain(optax.clip(1e9), masked(select(adam(), "*"), HEAD), freeze(frozen="body.*")),
}


@pytest.mark.parametrize("tx", MAPPED.values(), ids=MAPPED)
def test_tree_map_params_reaches_the_state_of_the_selected_leaves(tx):
    params, grads = draw()
    state = tx.init(params)
    specs = jax.tree_util.tree_map_with_path(lambda path, _: ".".join(key.key for key in path), params)
    hidden = lambda x: isinstance(x, MaskedNode)  # noqa: E731
    named = masking.tree_map_params(
        tx, lambda v, spec: v if hidden(v) else spec, state, specs, transform_non_params=lambda _: None, is_leaf=hidden
    )
    assert sorted(jax.tree.leaves(named)) == sorted(["head.bias", "head.weight"] * 2)  # mu and nu
    doubled = masking.tree_map_params(tx, lambda v: v + 1.0, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)
    assert sum(float(x.sum()) for x in jax.tree.leaves(doubled)) == 2 * sum(x.size for x in jax.tree.leaves(params["head"]))
    same = masking.tree_map_params(tx, lambda v: v, state)
    ours, expected = run(tx, params, grads, same)[0], run(tx, params, grads)[0]
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    assert (flat(ours)["head.weight"] != flat(params)["head.weight"]).all()


def test_empty_parameters_have_no_labels():
    for params in ({}, {"a": None, "b": {}}):
        for tx in (select(adam(), "head.*"), freeze(frozen="head.*"), partition({"a": adam()}, "a")):
            updates, state = jax.jit(tx.update)(params, tx.init(params), params)
            assert updates == params
            assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


# optax's base


def test_reexported_names_are_those_of_optax():
    for name in set(masking.__all__) - {"ResolvedState", "SlowState", "freeze", "lookahead", "masked", "partition", "select"}:
        assert getattr(masking, name) is getattr(optax.schedules if name == "StatefulSchedule" else optax, name), name
    for tx in (masked(adam(), HEAD), select(adam(), HEAD), freeze(frozen=HEAD), partition({"a": adam()}, "a")):
        assert isinstance(tx, masking.GradientTransformationExtraArgs)
        assert masking.with_extra_args_support(tx) is tx


def bytes_accessed(tx, params):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    return compiled.cost_analysis()["bytes accessed"], compiled.memory_analysis().argument_size_in_bytes


ZERO = {
    "partition": partition({"a": adam(), "z": masking.set_to_zero()}, {"small": "a", "big": "z"}),
    "select": select(adam(), "small"),
}


@pytest.mark.parametrize("tx", ZERO.values(), ids=ZERO)
def test_set_to_zero_costs_no_bytes(tx):
    small, big = jnp.ones((64, 64)), jnp.ones((256, 256))
    alone, arguments = bytes_accessed(adam(), {"small": small})
    both, more_arguments = bytes_accessed(tx, {"small": small, "big": big})
    assert both - alone <= 16  # the address of one more result, but no byte of the leaf
    assert more_arguments - arguments == big.nbytes  # the leaf is donated and returned; its gradient is not an argument
    scaled, _ = bytes_accessed(optax.chain(adam(), masked(optax.scale(0.0), {"small": False, "big": True})), {"small": small, "big": big})
    assert scaled - alone > 3 * big.nbytes  # zeros that XLA does not know


def test_stateless_transformations_have_no_state_and_compose_with_masks():
    start, grads = draw()
    by_tree = masking.stateless(lambda updates, params: jax.tree.map(lambda u, p: -0.1 * (u + 0.2 * p), updates, params))
    by_leaf = masking.stateless_with_tree_map(lambda u, p: -0.1 * (u + 0.2 * p))
    theirs = oracle(start, grads, {name: NumpySGD(0.1, weight_decay=0.2) for name in ("head.weight", "head.bias")})
    for tx in (by_tree, by_leaf, optax.chain(masking.identity(), by_leaf)):
        ours, state = run(select(tx, "head.*"), start, grads)
        assert off(ours, theirs, start) < 1e-12
        assert jax.tree.leaves(state) == []
    assert off(run(select(masking.stateless_with_tree_map(lambda u, p: -0.1 * u), "head.*"), start, grads)[0], theirs, start) > 0.01


@pytest.mark.parametrize("wrap", [lambda tx: masked(tx, HEAD), lambda tx: select(tx, "head.*"), lambda tx: partition({"a": tx}, "a")])
def test_missing_params_raise_the_error_of_optax(wrap):
    params, grads = draw(steps=1)
    tx = wrap(optax.add_decayed_weights(0.1))
    with pytest.raises(ValueError, match="requires the current value of parameters, but you are not passing `params`"):
        tx.update(grads[0], tx.init(params))


class HalveOnPlateau:
    """A stateful schedule that halves the rate whenever the extra arg `value` is not below its minimum so far."""

    def init(self):
        return {"rate": jnp.asarray(0.1), "best": jnp.asarray(jnp.inf)}

    def update(self, state, *, value, **_):
        return {"rate": self(state, value=value), "best": jnp.minimum(state["best"], value)}

    def __call__(self, state, *, value=-jnp.inf, **_):
        return jnp.where(value < state["best"], state["rate"], state["rate"] / 2)


@pytest.mark.parametrize("inject", [optax.inject_hyperparams, optax.inject_stateful_hyperparams], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrap", [lambda tx: select(tx, "head.*"), lambda tx: optax.chain(tx, freeze(frozen="body.*"))])
def test_stateful_schedule_gets_extra_args_through_masks(inject, wrap):
    assert isinstance(HalveOnPlateau(), masking.StatefulSchedule)
    start, grads = draw()
    values = np.cos(np.arange(STEPS)) - 0.1 * np.arange(STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inject_stateful_hyperparams is deprecated
        tx = wrap(inject(optax.sgd)(learning_rate=HalveOnPlateau()))
    ours, _ = run(tx, start, grads, value=jnp.asarray(values))

    theirs, rate, best = flat(start), 0.1, np.inf
    for g, value in zip(map(flat, grads), values, strict=True):
        rate, best = rate if value < best else rate / 2, min(best, value)
        theirs |= {name: theirs[name] - rate * g[name] for name in ("head.weight", "head.bias")}
    assert 0 < rate < 0.05
    assert off(ours, theirs, start) < 1e-12
    constant, _ = run(tx, start, grads, value=-jnp.arange(float(STEPS)))
    assert off(constant, theirs, start) > 0.1


@pytest.mark.parametrize(
    ("tx", "frozen"),
    [
        (lambda: bridge.select(optax.adam(0.1), "head.*"), True),
        (lambda: bridge.select(optax.adam(0.1), {"encoder": False, "head": True}), True),
        (lambda: optax.chain(optax.adam(0.1), bridge.freeze(frozen="encoder.*")), True),
        (lambda: bridge.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, [("*.weight", "a"), ("*.bias", "b")]), False),
    ],
)
def test_patterns_apply_to_torch_parameters_with_missing_gradients(tx, frozen):
    with jax.numpy_dtype_promotion("standard"):
        model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(4, 3), "head": torch.nn.Linear(3, 2)})
        optimizer = torch_api.OptaxOptimizer(model.named_parameters(), tx())
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for silent in (None, "head", "encoder"):
            for name, p in model.named_parameters():
                p.grad = None if silent is not None and name.startswith(silent) else torch.ones_like(p)
            optimizer.step()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == (frozen and name.startswith("encoder"))
