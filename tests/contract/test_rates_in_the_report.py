"""`report()` shows the learning rate and weight decay that a ready transformation has inside it, or that only the transformation knows."""

import jax
import numpy as np
import optax
import pytest
import torch

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized
INSIDE = "inside the transformation"


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax.adam fails under strict promotion
        yield


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))


def shown(optimizer, of=0):
    row = optimizer.report().rows[of]
    return row["lr"], row["decay"]


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def from_schedule():
    return optax.adamw(optax.linear_schedule(0.5, 0.25, 2), weight_decay=0.1)


KNOWN = {
    "adamw": (lambda: optax.adamw(1e-3, weight_decay=0.1), 1e-3, 0.1),
    "without decay": (lambda: optax.adam(1e-3), 1e-3, 0.0),
    "a decay of matrices": (lambda: optax.adamw(1e-3, weight_decay=0.1, mask=matrices), 1e-3, 0.1),
    "momentum": (lambda: optax.sgd(0.1, momentum=0.9, nesterov=True), 0.1, 0.0),
    "clipped, with an L2 penalty": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(1e-4), optax.sgd(0.1)),
        0.1,
        1e-4,
    ),
    "an L2 penalty before momentum": (lambda: optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9)), 0.1, 1e-4),
    "lion": (lambda: optax.lion(3e-4, weight_decay=0.01), 3e-4, 0.01),
    "two scales": (lambda: optax.chain(optax.scale_by_adam(), optax.scale(0.5), optax.scale(-0.01)), 0.005, 0.0),
    "injected": (lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3, weight_decay=0.1), 1e-3, 0.1),
    "a schedule before its first step": (from_schedule, 0.5, 0.1),
    "adam of 1": (lambda: optax.adam(1.0), 1.0, 0.0),
    "adamw of 1": (lambda: optax.adamw(1.0, weight_decay=0.1), 1.0, 0.1),
    "adam alone": (lambda: optax.scale_by_adam(), 1.0, 0.0),
}
UNKNOWN = {
    "adafactor": (lambda: optax.adafactor(1e-3), INSIDE, INSIDE),
    "lamb": (lambda: optax.lamb(1e-3, weight_decay=0.1), 1e-3, INSIDE),
    "what follows the rate": (lambda: optax.chain(optax.adam(1e-3), optax.add_decayed_weights(-1e-4)), INSIDE, INSIDE),
    "a rate before a momentum": (lambda: optax.chain(optax.sgd(1e-3), optax.trace(0.9), optax.scale(-1.0)), INSIDE, 0.0),
    "a rate that follows from the state": (lambda: optax.chain(optax.adamw(1e-3), optax.contrib.reduce_on_plateau()), INSIDE, INSIDE),
    "an equation of torch": (lambda: bridge.rules.adam(1e-3), INSIDE, 0.0),
    "accumulated": (lambda: optax.MultiSteps(optax.adamw(1e-3), 2), INSIDE, INSIDE),
}


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_report_shows_the_rates_inside(name):
    make, lr, decay = (KNOWN | UNKNOWN)[name]
    optimizer = torch_api.OptaxOptimizer(model().named_parameters(), make())
    assert shown(optimizer) == (lr, decay)
    optimizer.param_groups[0]["lr"] = 0.5
    assert shown(optimizer) == (f"0.5 x {INSIDE}" if lr == INSIDE else 0.5 * lr, decay)
    assert f"{lr * 0.5:g}" in str(optimizer) if lr != INSIDE else f"0.5 x {INSIDE}" in str(optimizer)
    assert ("The table has the product." in str(optimizer)) is (lr != INSIDE)
    optimizer.param_groups[0]["lr"] = 0.0
    assert shown(optimizer) == (0.0, decay)


@pytest.mark.parametrize("name", [name for name, (_, lr, _) in KNOWN.items() if lr != 1.0])
def test_shown_rates_are_those_of_optax(name):
    """With a gradient of 0 at the first step only the decay moves a parameter; another rate must move it otherwise."""
    make, lr, decay = KNOWN[name]
    params = {"w": np.full((2, 2), 3.0, np.float32)}
    tx = make()
    updates, _ = tx.update({"w": np.zeros((2, 2), np.float32)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -lr * decay * 3.0, rtol=1e-5)


@pytest.mark.quick
def test_each_parameter_has_the_rates_of_its_own():
    labels = {"0": {"weight": "a", "bias": "b"}, "1": "a"}
    tx = optax.partition({"a": optax.adamw(1e-3, weight_decay=0.1, mask=matrices), "b": optax.sgd(0.5)}, labels)
    groups = [
        {"params": list(part.named_parameters(str(i))), "lr": lr} for i, (part, lr) in enumerate(zip(model(), (1.0, 0.5), strict=True))
    ]
    optimizer = torch_api.OptaxOptimizer(groups, tx, lr_scale={"1.weight": 0.5})
    assert [shown(optimizer, i) for i in range(4)] == [(1e-3, 0.1), (0.5, 0.0), (0.5 * 0.5 * 1e-3, 0.1), (0.5e-3, 0.0)]
    optimizer.set_trainable("0.*", False)
    assert [shown(optimizer, i)[0] for i in range(3)] == [None, None, 0.25e-3]


def test_partitioned_and_factories():
    transforms = {"a": optax.adamw(1e-3, weight_decay=0.1), "b": (optax.adamw, {"lr": 0.5, "weight_decay": 0.2})}
    optimizer = torch_api.PartitionedOptimizer(model().named_parameters(), transforms, {"0": "a", "1": "b"})
    assert [shown(optimizer, i) for i in (0, 2)] == [(1e-3, 0.1), (0.5, 0.2)]
    schedule = optax.linear_schedule(0.5, 0.25, 2)
    optimizer = torch_api.OptaxOptimizer(model().named_parameters(), optax.adamw, lr=schedule, weight_decay=0.2)
    assert shown(optimizer) == (0.5, 0.2)


@pytest.mark.quick
def test_schedule_and_injected_rate_are_shown_as_they_are_now():
    def stepped(tx):
        net = model()
        optimizer = torch_api.OptaxOptimizer(net.named_parameters(), tx)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer, net

    optimizer, net = stepped(from_schedule())
    assert shown(optimizer) == (0.375, 0.1)
    net[0].weight.grad = None
    optimizer.step()  # the steps of the parameters differ now
    assert shown(optimizer) == (INSIDE, INSIDE)
    optimizer, net = stepped(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    optimizer.state[net[0].weight]["learning_rate"].fill_(0.25)
    assert shown(optimizer) == (0.25, 0.0)


def test_report_of_many_parameters_traces_few():
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(60)))
    optimizer = torch_api.OptaxOptimizer(net.named_parameters(), optax.adamw(1e-3, weight_decay=0.1))
    assert {shown_row for row in optimizer.report().rows for shown_row in [(row["lr"], row["decay"])]} == {(1e-3, 0.1)}
    assert "0.001" in str(optimizer)
