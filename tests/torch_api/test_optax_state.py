"""The state of a torch optimizer is converted to optax and back: ten steps in each framework equal twenty steps in one."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from oracles import jitted
from sampling import sampled

import bridge
import torch_api
from bridge import rules
from torch_api import (
    MaskedAdam,
    MaskedAdamW,
    MaskedSGD,
    MultiOptimizer,
    OptaxOptimizer,
    PartitionedOptimizer,
    load_optax_state,
    to_optax_state,
)

pytestmark = [pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]


class Net(torch.nn.Module):
    """A module with parameters of zero, one, two and four dimensions; one is transposed in memory, one is channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(40, 30)
        self.body.weight = torch.nn.Parameter(torch.randn(40, 30).t())
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))


def gradient(step, p):
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + p.numel()), dtype=torch.float32).to(p.dtype)


def in_torch(optimizer, steps):
    for step in steps:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient(step, p)
        optimizer.step()


def in_optax(tx, tree, state, steps):
    """Train in pure JAX from a tree of parameters and a state; return both after the steps."""

    @jitted
    def update(grads, state, tree):
        updates, state = tx.update(grads, state, tree)
        return optax.apply_updates(tree, updates), state

    for step in steps:
        grads = jax.tree.map(lambda x, step=step: jnp.asarray(gradient(step, torch.empty(x.shape)).numpy()).astype(x.dtype), tree)
        tree, state = update(grads, state, tree)
    return tree, state


def tree_of(net):
    return bridge.to_jax(net, copy=True)


def moved(net, start):
    """Return the movement of each parameter by name."""
    flat = bridge._names.unnest(tree_of(net) if isinstance(net, torch.nn.Module) else net)
    begun = bridge._names.unnest(start)
    return {name: np.asarray(x, np.float64) - np.asarray(begun[name], np.float64) for name, x in flat.items()}


def assert_close(found, expected, tolerance):
    """Compare movements relative to the largest movement; the parameters are below 4, so their last digits also matter."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=tolerance * np.abs(x).max() + 1e-6, err_msg=name)


def alike(state, begun):
    """Return whether two states have the same structure, shapes and dtypes."""
    assert jax.tree.structure(state) == jax.tree.structure(begun)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(begun), strict=True):
        assert (jnp.shape(x), jnp.result_type(x)) == (jnp.shape(y), jnp.result_type(y))
    return True


# torch's class, its arguments, and optax's transformation with equal hyperparameters.
SAME = {
    "Adam": ({"lr": 1e-2}, optax.adam(1e-2)),
    "AdamW": ({"lr": 1e-2, "weight_decay": 0.1}, optax.adamw(1e-2, weight_decay=0.1)),
    "SGD": ({"lr": 1e-2, "momentum": 0.9}, optax.sgd(1e-2, momentum=0.9)),
    "SGD, Nesterov": ({"lr": 1e-2, "momentum": 0.9, "nesterov": True}, optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "SGD, no momentum": ({"lr": 1e-2}, optax.sgd(1e-2)),
    "RMSprop": ({"lr": 1e-3}, optax.rmsprop(1e-3, decay=0.99, eps_in_sqrt=False)),
    "RMSprop, centered": (
        {"lr": 1e-3, "centered": True, "eps": 1e-4},
        optax.rmsprop(1e-3, decay=0.99, eps=1e-4, centered=True, eps_in_sqrt=False),
    ),
    "Adagrad": ({"lr": 1e-2}, optax.adagrad(1e-2, initial_accumulator_value=0.0, eps=1e-12)),
    "Adadelta": ({"lr": 1.0}, optax.adadelta(1.0, rho=0.9, eps=1e-6)),
    "Adamax": ({"lr": 1e-2}, optax.adamax(1e-2)),
    "RAdam": ({"lr": 1e-2}, optax.radam(1e-2)),
}  # fmt: skip


# RAdam adds eps at another point than optax does.
LOOSE = {"RAdam": 1e-3}
HEAVY = [pytest.param(name, marks=pytest.mark.nightly) if name not in ("Adam", "SGD") else name for name in SAME]


@pytest.mark.parametrize("package", [torch.optim, torch_api], ids=["torch.optim", "torch_api"])
@pytest.mark.parametrize("name", HEAVY)
def test_steps_of_torch_and_of_optax_combine(name, package):
    options, tx = SAME[name]
    build = getattr(package, ("Masked" if package is torch_api else "") + name.split(",")[0])
    net, reference = Net(), Net()
    start = tree_of(net)
    optimizer = build(net.named_parameters(), **options)
    whole = getattr(torch.optim, name.split(",")[0])(reference.named_parameters(), **options)
    in_torch(optimizer, range(10))
    in_torch(whole, range(20))

    handed = to_optax_state(optimizer, tx)
    assert alike(handed, tx.init(tree_of(net)))
    tree, state = in_optax(tx, tree_of(net), handed, range(10, 20))
    assert_close(moved(tree, start), moved(reference, start), LOOSE.get(name, 2e-5))

    bridge.load_module_tree(net, tree)
    load_optax_state(optimizer, state, count=20)
    in_torch(optimizer, range(20, 30))
    in_torch(whole, range(20, 30))
    assert_close(moved(net, start), moved(reference, start), LOOSE.get(name, 3e-5))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: (s[0]._replace(count=s[0].count - 10), *s[1:]),
        lambda s: (s[0]._replace(mu=s[0].nu, nu=s[0].mu), *s[1:]),
        lambda s: (s[0]._replace(mu=jax.tree.map(jnp.zeros_like, s[0].mu)), *s[1:]),
    ],
    ids=["count", "moments exchanged", "no momentum"],
)
def test_comparison_detects_a_wrong_state(change):
    net, reference = Net(), Net()
    start, tx = tree_of(net), optax.adam(1e-2)
    optimizer = MaskedAdam(net.named_parameters(), lr=1e-2)
    in_torch(optimizer, range(10))
    in_torch(torch.optim.Adam(reference.parameters(), lr=1e-2), range(20))
    tree, _ = in_optax(tx, tree_of(net), change(to_optax_state(optimizer, tx)), range(10, 20))
    with pytest.raises(AssertionError):
        assert_close(moved(tree, start), moved(reference, start), 1e-3)


def injected(learning_rate=1e-2):
    return optax.inject_hyperparams(optax.adam)(learning_rate=learning_rate)


READY = {
    "adam": optax.adam(1e-2),
    "adamw with a schedule": optax.adamw(optax.cosine_decay_schedule(1e-2, 100)),
    "clipped lion": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
    "two traces": optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-1e-3)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 3),
    "noise": optax.chain(optax.add_noise(1e-3, 0.5, 7), optax.sgd(1e-2)),
    "a global norm before adam": optax.chain(optax.normalize_by_update_norm(), optax.scale_by_adam(), optax.scale(-1e-2)),
    "inject_hyperparams": injected(),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "no state": optax.sgd(1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(READY))
def test_transformation_continues_in_pure_optax_and_back(name):
    tx, net, reference = READY[name], Net(), Net()
    start = tree_of(net)
    optimizer, whole = OptaxOptimizer(net.named_parameters(), tx), OptaxOptimizer(reference.named_parameters(), tx)
    in_torch(optimizer, range(10))
    in_torch(whole, range(20))
    handed = to_optax_state(optimizer)
    assert alike(handed, tx.init(tree_of(net)))
    for x, y in zip(jax.tree.leaves(handed), jax.tree.leaves(to_optax_state(optimizer, tx)), strict=True):
        np.testing.assert_array_equal(*(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (x, y)))
    tree, state = in_optax(tx, tree_of(net), handed, range(10, 20))
    assert_close(moved(tree, start), moved(reference, start), 1e-4)
    bridge.load_module_tree(net, tree)
    load_optax_state(optimizer, state)
    in_torch(optimizer, range(20, 30))
    in_torch(whole, range(20, 30))
    assert_close(moved(net, start), moved(reference, start), 1e-4)


def test_factory_with_hyperparams_in_the_groups_converts():
    net = Net()
    optimizer = OptaxOptimizer(net.named_parameters(), optax.adamw, lr=1e-2)
    in_torch(optimizer, range(3))
    assert alike(to_optax_state(optimizer), optax.adamw(1e-2).init(tree_of(net)))


def test_state_of_our_own_rules_converts_without_a_tx():
    for build in (lambda n: MaskedAdam(n, lr=1e-2), lambda n: torch.optim.Adam(n, lr=1e-2)):
        net, reference = Net(), Net()
        start, tx = tree_of(net), rules.adam(lr=1e-2)
        optimizer = build(net.named_parameters())
        in_torch(optimizer, range(10))
        in_torch(torch.optim.Adam(reference.parameters(), lr=1e-2), range(20))
        state = to_optax_state(optimizer)
        assert alike(state, tx.init(tree_of(net)))
        assert int(state.step["body"]["weight"]) == 10
        tree, state = in_optax(tx, tree_of(net), state, range(10, 20))
        assert_close(moved(tree, start), moved(reference, start), 2e-5)
        load_optax_state(optimizer, state)
        assert {int(fields["step"]) for fields in optimizer.state.values()} == {20}


@pytest.mark.slow
def test_every_class_converts_its_state_and_loads_it_back_exactly():
    for name in sorted(n for n in torch_api.__all__ if n.startswith("Masked")):
        net = Net()
        params = [("body.weight", net.body.weight)] if name == "MaskedMuon" else net.named_parameters()
        optimizer = getattr(torch_api, name)(params, **({} if name == "MaskedAdafactor" else {"lr": 1e-3}))
        in_torch(optimizer, range(3))
        before = copy.deepcopy(optimizer.state_dict()["state"])
        state = jax.tree.map(jnp.copy, to_optax_state(optimizer))
        in_torch(optimizer, range(3, 5))
        load_optax_state(optimizer, state)
        torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0, msg=name)


# ------------------------------------------------------------------ what is trained, and by what


def labelled(spec):
    """Return labels for every leaf of the net, not a prefix tree: optax's MaskedNode structure follows the labels."""
    return lambda tree: bridge.resolve_labels(spec, tree)


def test_frozen_parameters_are_masked_nodes():
    net = Net()
    optimizer = OptaxOptimizer(net.named_parameters(), optax.adam(1e-2), mask="body.*")
    in_torch(optimizer, range(4))
    state = to_optax_state(optimizer)
    tx = optax.partition({"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labelled({"body": "trained", "": "frozen"}))
    assert alike(state, tx.init(tree_of(net)))
    assert isinstance(state.inner_states["trained"].inner_state[0].mu["scale"], optax.MaskedNode)
    mask = {"body": True, "conv": False, "scale": False}
    for other in (
        bridge.select(optax.adam(1e-2), "body.*"),
        optax.masked(optax.adam(1e-2), mask),
        optax.transforms.selective_transform(optax.adam(1e-2), freeze_mask=jax.tree.map(lambda x: not x, mask)),
    ):
        handed = to_optax_state(optimizer, other)
        assert alike(handed, other.init(tree_of(net)))
        load_optax_state(optimizer, handed)
    frozen = net.scale.detach().clone()
    tree, state = in_optax(tx, tree_of(net), state, range(4, 8))
    load_optax_state(optimizer, state)
    bridge.load_module_tree(net, tree)
    in_torch(optimizer, [8])
    assert int(optimizer.state[net.body.weight]["count"]) == 9
    assert torch.equal(net.scale, frozen)
    assert net.scale not in optimizer.state


def test_parameters_that_require_no_grad_are_masked_nodes():
    net = Net()
    net.body.requires_grad_(False)
    for build in (MaskedAdam, torch.optim.Adam):
        optimizer = build(net.named_parameters())
        for p in (net.conv.weight, net.scale):
            p.grad = torch.ones_like(p)
        optimizer.step()
        state = to_optax_state(optimizer, bridge.select(optax.adam(1e-3), lambda name, _: not name.startswith("body")))
        assert isinstance(state.inner_state.inner_states["trained"].inner_state[0].mu["body"]["bias"], optax.MaskedNode)
        assert sorted(to_optax_state(optimizer).inner_states) == ["frozen", "trained"]


def test_element_mask_keeps_the_whole_array():
    net, rows = Net(), (torch.arange(30) < 3)[:, None].expand(30, 40).contiguous()
    optimizer = OptaxOptimizer(net.named_parameters(), optax.adam(1e-2), mask={"body.weight": rows})
    in_torch(optimizer, range(2))
    tx = bridge.select(optax.adam(1e-2), {"body.weight": rows.numpy()})
    state = to_optax_state(optimizer, tx)
    assert alike(state, tx.init(tree_of(net)))
    assert state.inner_state.inner_states["trained"].inner_state[0].mu["body"]["weight"].shape == (30, 40)


def test_partitioned_state_has_the_structure_of_optax():
    net, reference = Net(), Net()
    start = tree_of(net)
    parts = {"a": optax.adam(1e-2), "b": optax.sgd(optax.linear_schedule(1e-2, 0.0, 100), momentum=0.9), "c": optax.sgd(1e-2)}
    labels = {"body": "a", "conv": "b", "scale": "c"}
    optimizer, whole = (PartitionedOptimizer(n.named_parameters(), parts, labels) for n in (net, reference))
    in_torch(optimizer, range(10))
    in_torch(whole, range(20))
    tx = optax.partition(parts, labelled(labels))
    state = to_optax_state(optimizer)
    assert alike(state, tx.init(tree_of(net)))
    assert alike(to_optax_state(optimizer, tx), state)
    tree, state = in_optax(tx, tree_of(net), state, range(10, 20))
    assert_close(moved(tree, start), moved(reference, start), 2e-5)
    load_optax_state(optimizer, state)
    assert int(optimizer.state[net.conv.weight]["count"]) == 20


def test_step_count_of_a_label_is_not_taken_from_another():
    net = Net()
    schedule = optax.linear_schedule(1e-2, 0.0, 100)
    parts = {"a": optax.adam(1e-2), "b": optax.sgd(schedule)}  # the state of b is only a count
    optimizer = PartitionedOptimizer(net.named_parameters(), parts, {"body": "a", "conv": "a", "scale": "b"})
    in_torch(optimizer, range(3))
    for name, p in net.named_parameters():
        p.grad = None if name == "scale" else torch.ones_like(p)
    optimizer.step()
    with pytest.raises(ValueError, match=r"is one for .* of which the optimizer has 3 and 4"):
        to_optax_state(optimizer)


def test_labels_of_flax_pairs_are_strings():
    net = Net()
    optimizer = MultiOptimizer(net.named_parameters(), ("body.*", bridge.Momentum(lr=0.1)), ("conv.*", bridge.Adam(lr=0.1)))
    in_torch(optimizer, range(2))
    state = to_optax_state(optimizer)
    assert sorted(state.inner_states) == ["0", "1", "frozen"]
    before = copy.deepcopy(optimizer.state_dict()["state"])
    load_optax_state(optimizer, jax.tree.map(jnp.copy, state))
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


def test_groups_with_own_hyperparams_become_partitions():
    net = Net()
    given = [
        {"params": list(net.body.named_parameters("body")), "lr": 1e-2},
        {"params": list(net.conv.named_parameters("conv")), "lr": 1e-3},
    ]
    for build in (MaskedAdamW, torch.optim.AdamW, lambda groups: OptaxOptimizer(groups, optax.adamw, lr=0.1)):
        optimizer = build(copy.copy([dict(group) for group in given]))
        in_torch(optimizer, range(2))
        assert sorted(to_optax_state(optimizer).inner_states) == ["group0", "group1"]
        assert int(to_optax_state(optimizer, optax.adamw(1e-2))[0].count) == 2


def test_label_in_two_groups_becomes_two_partitions():
    net = Net()
    groups = [{"params": list(net.body.named_parameters("body"))}, {"params": list(net.conv.named_parameters("conv"))}]
    optimizer = PartitionedOptimizer(groups, {"a": (optax.adam, {"learning_rate": 0.1})}, {"": "a"})
    in_torch(optimizer, range(2))
    assert sorted(to_optax_state(optimizer).inner_states) == ["a#0", "a#1"]


def test_state_of_a_frozen_parameter_is_kept():
    net = Net()
    optimizer = MaskedAdam(net.named_parameters())
    in_torch(optimizer, range(2))
    optimizer.set_trainable("body.*", False)
    kept = optimizer.state[net.body.weight]["exp_avg"].clone()
    state = to_optax_state(optimizer)
    load_optax_state(optimizer, jax.tree.map(lambda x: x + 1, state))
    assert torch.equal(optimizer.state[net.body.weight]["exp_avg"], kept)
    assert int(optimizer.state[net.conv.weight]["step"]) == 3


# ------------------------------------------------------------------ names and the time before the first step


def test_names_may_come_from_the_module():
    for build in (torch.optim.Adam, MaskedAdam):
        net = Net()
        optimizer = build(net.parameters())
        in_torch(optimizer, range(2))
        assert sorted(to_optax_state(optimizer, optax.adam(1e-3))[0].mu) == [f"param{i}" for i in range(4)]
        state = to_optax_state(optimizer, optax.adam(1e-3), module=net)
        assert alike(state, optax.adam(1e-3).init(tree_of(net)))
        load_optax_state(optimizer, jax.tree.map(lambda x: x + 1, state), module=net)
        assert int(optimizer.state[net.scale]["step"]) == 3


def test_state_before_the_first_step_is_that_of_init():
    for build in (torch.optim.Adam, MaskedAdam):
        net = Net()
        optimizer = build(net.named_parameters())
        state, begun = to_optax_state(optimizer, optax.adam(1e-3)), optax.adam(1e-3).init(tree_of(net))
        assert alike(state, begun)
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(begun), strict=True))


@pytest.mark.parametrize("writeback", ["inplace", "copy"])
def test_optimizer_without_state_loads_a_state_and_continues(writeback):
    net, reference = Net(), Net()
    start, tx = tree_of(net), optax.adam(1e-2)
    tree, state = in_optax(tx, tree_of(net), tx.init(tree_of(net)), range(10))
    bridge.load_module_tree(net, tree)
    in_torch(torch.optim.Adam(reference.parameters(), lr=1e-2), range(20))
    optimizer = MaskedAdam(net.named_parameters(), lr=1e-2, writeback=writeback)
    load_optax_state(optimizer, state)
    in_torch(optimizer, range(10, 20))
    assert_close(moved(net, start), moved(reference, start), 2e-5)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}, {"foreach": True}])
def test_torch_optimizer_without_state_loads_a_state(options):
    net, other = Net(), Net()
    optimizer, fresh = (torch.optim.Adam(n.named_parameters(), lr=1e-2, **options) for n in (net, other))
    in_torch(optimizer, range(3))
    load_optax_state(fresh, to_optax_state(optimizer))
    torch.testing.assert_close(fresh.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    bridge.load_module_tree(other, tree_of(net))
    in_torch(optimizer, range(3, 6))
    in_torch(fresh, range(3, 6))
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)


def test_unknown_optimizer_class_converts_by_field_names():
    class Plain(torch.optim.Optimizer):
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"exp_avg": torch.ones_like(p), "step": torch.tensor(5.0)}

    net = Net()
    optimizer = Plain(net.named_parameters(), {})
    optimizer.step()
    state = to_optax_state(optimizer, optax.scale_by_lion())
    assert int(state.count) == 5
    load_optax_state(optimizer, jax.tree.map(lambda x: x + 1, state))
    assert float(optimizer.state[net.scale]["exp_avg"]) == 2


# ------------------------------------------------------------------ memory, types


@pytest.mark.parametrize("build", [torch.optim.Adam, MaskedAdam], ids=["torch.optim", "torch_api"])
def test_arrays_alias_the_state(build):
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64))
    optimizer = build(net.named_parameters(), lr=1e-2)
    in_torch(optimizer, range(2))
    state = to_optax_state(optimizer, optax.adam(1e-2))
    for name, p in net.named_parameters():
        layer, last = name.split(".")
        for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            array, tensor = getattr(state[0], ours)[layer][last], optimizer.state[p][theirs]
            assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    copies = to_optax_state(optimizer, optax.adam(1e-2), copy=True)
    known = {x.data_ptr() for fields in optimizer.state.values() for x in fields.values()}
    assert not known & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(copies)}
    before = np.array(copies[0].mu["0"]["weight"])
    in_torch(optimizer, [2])
    np.testing.assert_array_equal(np.asarray(copies[0].mu["0"]["weight"]), before)
    assert not np.array_equal(np.asarray(state[0].mu["0"]["weight"]), before), "the array does not alias the state"


@pytest.mark.parametrize("build", [torch.optim.Adam, MaskedAdam], ids=["torch.optim", "torch_api"])
def test_loading_writes_into_existing_tensors(build):
    net = Net()
    optimizer = build(net.named_parameters(), lr=1e-2)
    in_torch(optimizer, range(2))
    tensors = {(p, k): (x, x.data_ptr()) for p, fields in optimizer.state.items() for k, x in fields.items()}
    load_optax_state(optimizer, jax.tree.map(lambda x: x + 1, to_optax_state(optimizer)))
    assert {(p, k): (x, x.data_ptr()) for p, fields in optimizer.state.items() for k, x in fields.items()} == tensors
    compiled = optimizer.cache_info().compilations if build is MaskedAdam else 0
    in_torch(optimizer, [2])
    assert build is torch.optim.Adam or optimizer.cache_info().compilations == compiled


def test_half_parameters_may_have_float32_state():
    net = Net().to(torch.bfloat16)
    for options, dtype in (({}, jnp.bfloat16), ({"state_dtype": torch.float32}, jnp.float32), ({"master_weights": True}, jnp.bfloat16)):
        optimizer = MaskedAdam(net.named_parameters(), **options)
        in_torch(optimizer, range(2))
        state = to_optax_state(optimizer, optax.adam(1e-3))
        assert {x.dtype for x in jax.tree.leaves(state[0].mu)} == {jnp.dtype(dtype)}
        assert {x.dtype for x in jax.tree.leaves(to_optax_state(optimizer, optax.adam(1e-3, mu_dtype="float32"))[0].mu)} == {
            jnp.dtype("float32")
        }
        kept = {id(p): {k: v.clone() for k, v in fields.items()} for p, fields in optimizer.state.items()}
        load_optax_state(optimizer, state)
        torch.testing.assert_close({id(p): dict(f) for p, f in optimizer.state.items()}, kept, rtol=0, atol=0)


def test_float64_state_is_kept_with_x64_disabled():
    net = Net().double()
    optimizer = MaskedAdam(net.named_parameters())
    in_torch(optimizer, range(2))
    for tx in (optax.adam(1e-3), None):
        state = to_optax_state(optimizer, tx)
        moments = state[0].mu if tx else state.exp_avg
        assert {str(x.dtype) for x in jax.tree.leaves(moments)} == {"float64"}
        load_optax_state(optimizer, state)
    assert not jax.config.jax_enable_x64


def test_averages_and_master_weights_are_not_converted():
    net = Net().to(torch.bfloat16)
    optimizer = MaskedAdam(net.named_parameters(), master_weights=True, ema_decay=0.9)
    in_torch(optimizer, range(2))
    average = optimizer.state[net.scale]["ema_param"].clone()
    load_optax_state(optimizer, jax.tree.map(lambda x: x * 0, to_optax_state(optimizer)))
    assert torch.equal(optimizer.state[net.scale]["ema_param"], average)
    assert "master_param" in optimizer.state[net.scale]
    assert int(optimizer.state[net.scale]["step"]) == 0


def test_dampened_momentum_continues_in_optax():
    net, reference = Net(), Net()
    options = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}
    optimizer, whole = MaskedSGD(net.named_parameters(), **options), torch.optim.SGD(reference.parameters(), **options)
    in_torch(optimizer, range(5))
    in_torch(whole, range(10))
    state = to_optax_state(optimizer)
    assert float(state.seen["scale"]) == 1.0
    fresh = MaskedSGD(net.named_parameters(), **options)
    load_optax_state(fresh, state)
    in_torch(fresh, range(5, 10))
    torch.testing.assert_close(net.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)


def test_missing_step_count_must_be_given():
    net = Net()
    optimizer = torch.optim.SGD(net.named_parameters(), lr=1e-2, momentum=0.9)
    in_torch(optimizer, range(3))
    tx = optax.sgd(optax.linear_schedule(1e-2, 0.0, 10), momentum=0.9)
    assert int(to_optax_state(optimizer, tx, count=3)[1].count) == 3
    with pytest.raises(ValueError, match=r"nothing for '1.count': .* Give count"):
        to_optax_state(optimizer, tx)


@pytest.mark.parametrize("make", [torch.optim.SGD, MaskedSGD])
def test_optimizer_without_state_needs_the_count(make):
    net = Net()
    optimizer = make(net.named_parameters(), lr=1e-2)
    in_torch(optimizer, range(3))
    tx = optax.sgd(optax.linear_schedule(1e-2, 0.0, 10))
    assert int(to_optax_state(optimizer, tx, count=3)[1].count) == 3
    with pytest.raises(ValueError, match=r"nothing for '1.count': .* Give count"):
        to_optax_state(optimizer, tx)
    assert not jax.tree.leaves(to_optax_state(optimizer, optax.sgd(1e-2)))


def test_tied_parameters_share_a_state():
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    net["b"].weight = net["a"].weight
    optimizer = MaskedAdam(net.named_parameters())
    in_torch(optimizer, range(2))
    assert alike(to_optax_state(optimizer, optax.adam(1e-3)), optax.adam(1e-3).init(tree_of(net)))


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_sharded_state_raises():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        p = torch.nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()]))
        with pytest.raises(ValueError, match="Gather it first"):
            to_optax_state(torch.optim.Adam([p]), optax.adam(1e-3))
    finally:
        destroy_process_group()
