"""A learning rate given both to a ready transformation and to the optimizer: one warning states the product, or a line in the report."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from sampling import sampled

import bridge
import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax.adam fails under strict promotion
        yield


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))


def result_and_warnings(build):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = build()
    return optimizer, [str(warning.message) for warning in seen]


def scaled_by_an_array():
    rate = jnp.float32(-0.01)
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u: rate * u, updates))


def divided():
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u: -u / 100, updates))


def jitted():
    inner = optax.sgd(0.01)
    return optax.GradientTransformation(inner.init, jax.jit(inner.update))


FACTORS = {
    "adam": (lambda: optax.adam(1e-3), 1e-3),
    "adamw": (lambda: optax.adamw(2e-4, weight_decay=0.1), 2e-4),
    "sgd with momentum": (lambda: optax.sgd(0.1, momentum=0.9, nesterov=True), 0.1),
    "lion": (lambda: optax.lion(3e-4), 3e-4),
    "lamb": (lambda: optax.lamb(1e-3), 1e-3),
    "clipped": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 1e-3),
    "two scales": (lambda: optax.chain(optax.scale_by_adam(), optax.scale(0.1), optax.scale(0.05), optax.scale(-1)), 0.005),
    "an array": (scaled_by_an_array, 0.01),
    "divided": (divided, 0.01),
    "jitted": (jitted, 0.01),
    "labels inside": (lambda: optax.partition({"a": optax.adam(1e-3), "b": optax.sgd(1.0)}, {"0": "b", "1": "a"}), 1e-3),
    "masked inside": (lambda: optax.masked(optax.sgd(0.01), {"0": True, "1": False}), 0.01),
    "with an argument": (lambda: optax.with_extra_args_support(optax.sgd(0.2)), 0.2),
    "bfloat16": (lambda: optax.sgd(0.125), 0.125),
}


@pytest.mark.parametrize("name", sampled(FACTORS))
def test_warning_states_the_product_once(name):
    make, factor = FACTORS[name]
    net = model().to(torch.bfloat16 if name == "bfloat16" else torch.float32)
    optimizer, (text,) = result_and_warnings(lambda: torch_api.OptaxOptimizer(net.named_parameters(), make(), lr=0.5))
    assert f"lr is 0.5, and the transformation multiplies its update by {factor:g} already" in text
    assert f"a learning rate of {0.5 * factor:g}" in text
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    assert result_and_warnings(optimizer.step)[1] == []


SILENT = {
    "made with 1.0": (lambda: optax.adam(1.0), {"lr": 0.01}),
    "made with -1": (lambda: optax.chain(optax.scale_by_adam(), optax.scale(-1)), {"lr": 0.01}),
    "without lr": (lambda: optax.adam(1e-3), {}),
    "lr of one": (lambda: optax.adam(1e-3), {"lr": 1.0}),
    "a schedule": (lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 10)), {"lr": 0.5}),
    "in the state": (lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3), {"lr": 0.5}),
    "no scale at all": (lambda: optax.scale_by_sign(), {"lr": 0.5}),
    "a parameter's own scale": (lambda: optax.chain(optax.sgd(0.1), optax.scale_by_param_block_norm()), {"lr": 0.5}),
    "an average of gradients": (lambda: optax.ema(0.9), {"lr": 0.5}),
}


@pytest.mark.parametrize("name", SILENT)
def test_lr_multiplier_gives_no_warning_and_is_in_the_report(name):
    make, given = SILENT[name]
    optimizer, seen = result_and_warnings(lambda: torch_api.OptaxOptimizer(model().named_parameters(), make(), **given))
    assert seen == []
    assert "The lr of the groups multiplies what the transformation gives" in str(optimizer.report())
    assert "lr of the groups multiplies what the transformation gives" in optimizer.report()._repr_html_()


def test_single_learning_rate_gives_no_warning():
    for build in (
        lambda: torch_api.OptaxOptimizer(model().named_parameters(), optax.adam, lr=1e-3),
        lambda: torch_api.MaskedAdamW(model().named_parameters(), lr=1e-3),
        lambda: torch_api.OptaxOptimizer(model().named_parameters(), bridge.Momentum(lr=0.1)),
    ):
        optimizer, seen = result_and_warnings(build)
        assert seen == []
        assert "multiplies" not in str(optimizer.report())


def test_groups_labels_and_factories_with_two_learning_rates_warn():
    net = model()
    first, second = ([(f"{i}.{name}", p) for name, p in layer.named_parameters()] for i, layer in enumerate(net))
    groups = [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01}]
    assert "a learning rate of 0.0001" in result_and_warnings(lambda: torch_api.OptaxOptimizer(groups, optax.adam(1e-3)))[1][0]
    multipliers = [{"params": first}, {"params": second, "lr": 0.1}]  # intended multipliers: the default lr is 1
    assert result_and_warnings(lambda: torch_api.OptaxOptimizer(multipliers, optax.adam(1e-3)))[1] == []
    labels = lambda: torch_api.PartitionedOptimizer(  # noqa: E731
        model().named_parameters(), {"a": (optax.adam, {"lr": 0.1}), "b": (optax.adam(1e-3), {"lr": 0.5})}, {"0": "a", "1": "b"}
    )
    optimizer, (text,) = result_and_warnings(labels)
    assert "a learning rate of 0.0005" in text
    assert "The lr of group 1 multiplies what the transformation gives" in str(optimizer)
    factory = lambda decay: optax.adamw(1e-3, weight_decay=decay)  # noqa: E731
    _, (text,) = result_and_warnings(lambda: torch_api.OptaxOptimizer(model().named_parameters(), factory, decay=0.1, lr=0.5))
    assert "a learning rate of 0.0005" in text


def test_scheduler_may_write_any_lr():
    net = model()
    optimizer, _ = result_and_warnings(lambda: torch_api.OptaxOptimizer(net.named_parameters(), optax.sgd(0.1)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        assert result_and_warnings(optimizer.step)[1] == []
        schedule.step()


def test_warning_raised_as_an_error_changes_nothing():
    net = model()
    before = [p.data_ptr() for p in net.parameters()]
    with pytest.raises(UserWarning, match="a learning rate of 1e-06"):
        torch_api.OptaxOptimizer(net.named_parameters(), optax.adam(1e-3), lr=1e-3)
    assert [p.data_ptr() for p in net.parameters()] == before


def test_implicit_lr_of_a_ready_transformation_is_not_in_the_warning():
    layers = [([(f"{i}.{name}", p) for name, p in layer.named_parameters()]) for i, layer in enumerate(model())]
    scaled = [{"params": part, "lr_scale": 0.5} for part in layers]
    own = [{"params": part, "lr": 1.0, "lr_scale": 0.5} for part in layers]
    with_scale = [{"params": part, "lr": 0.1, "lr_scale": 0.5} for part in layers]
    for groups in (scaled, own):
        assert result_and_warnings(lambda groups=groups: torch_api.OptaxOptimizer(groups, optax.adam(1e-3)))[1] == []
    (text,) = result_and_warnings(lambda: torch_api.OptaxOptimizer(with_scale, optax.adam(1e-3)))[1]
    assert "a learning rate of 0.0001" in text
    assert "default" not in text
