"""Transformations that close over a tree of all parameters: if a parameter is inactive, an error names it and nothing changes."""

import jax
import numpy as np
import optax
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]


def model_and_anchor():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    return model, {key: {name: p.detach().numpy() + 1 for name, p in part.named_parameters()} for key, part in model.items()}


def pulled(anchor):
    """Return a transformation that adds a pull towards the anchor to the gradient."""
    return optax.chain(optax.stateless(lambda g, p: jax.tree.map(lambda g, p, a: g + 0.1 * (p - a), g, p, anchor)), optax.sgd(0.1))


def from_init(anchor):
    """Return the same transformation with the distance from the anchor in its state, so that `init` fails."""

    def update(updates, away, params):
        return jax.tree.map(lambda g, d: -0.1 * (g + 0.1 * d), updates, away), away

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda p, a: p - a, params, anchor), update)


def tolerant(anchor):
    def update(g, p):
        return jax.tree.map(lambda g, p, a: None if g is None else g + 0.1 * (p - a), g, p, anchor, is_leaf=lambda x: x is None)

    return optax.chain(optax.stateless(update), optax.sgd(0.1))


def give(model, live):
    for name, p in model.named_parameters():
        p.grad = torch.ones_like(p) if name.startswith(live) else None


def values(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def assert_pulled(model, before, live):
    for name, p in model.named_parameters():
        expected = before[name] - (0.1 * (1 - 0.1) if name.startswith(live) else 0)  # the anchor is 1 away
        np.testing.assert_allclose(p.detach().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("make", [pulled, from_init])
@pytest.mark.parametrize("why", ["mask", "requires_grad", "gradient"])
def test_error_names_the_inactive_parameter_and_the_reason(make, why):
    model, anchor = model_and_anchor()
    model["body"].requires_grad_(why != "requires_grad")
    give(model, ("head",) if why == "gradient" else ("body", "head"))
    before = values(model)
    text = {"mask": "frozen: not mask", "requires_grad": "frozen: requires_grad=False", "gradient": "without a gradient"}[why]
    optimizer_of = lambda: torch_api.OptaxOptimizer(model.named_parameters(), make(anchor), mask="head.*" if why == "mask" else None)  # noqa: E731
    with pytest.raises(ValueError, match=rf"'body.weight' \({text}.*Nothing was updated"):
        optimizer_of().step()
    np.testing.assert_equal(values(model), before)


def test_step_with_all_gradients_succeeds_after_the_error():
    model, anchor = model_and_anchor()
    optimizer = torch_api.OptaxOptimizer(model.named_parameters(), pulled(anchor))
    give(model, "head")
    with pytest.raises(ValueError, match=r"body\.weight"):
        optimizer.step()
    before = values(model)
    give(model, ("body", "head"))
    optimizer.step()
    assert_pulled(model, before, ("body", "head"))


def test_transformation_that_accepts_none_leaves_is_not_refused():
    model, anchor = model_and_anchor()
    optimizer, before = torch_api.OptaxOptimizer(model.named_parameters(), tolerant(anchor)), values(model)
    give(model, "head")
    optimizer.step()
    assert_pulled(model, before, ("head",))


def test_train_step_raises_the_same_error():
    model, anchor = model_and_anchor()
    optimizer = torch_api.OptaxOptimizer(model.named_parameters(), pulled(anchor), mask="head.*")
    step = torch_api.JaxTrainStep(model, lambda model, x: model["head"](model["body"](x)).sum(), optimizer)
    before = values(model)
    with pytest.raises(ValueError, match=r"'body.weight' \(frozen"):
        step(torch.ones(1, 2))
    np.testing.assert_equal(values(model), before)


def test_parameters_of_another_label_are_named_in_the_error():
    model, anchor = model_and_anchor()
    rules, labels = {"pulled": pulled(anchor), "plain": optax.sgd(0.1)}, {"head": "pulled", "body": "plain"}
    give(model, ("body", "head"))
    with pytest.raises(ValueError, match=r"'body.weight' \(of another transformation\)"):
        torch_api.PartitionedOptimizer(model.named_parameters(), rules, labels=labels).step()


def test_unrelated_error_of_the_transformation_is_not_replaced():
    def update(updates, params):
        raise LookupError("no such thing")

    model, _ = model_and_anchor()
    give(model, ("body", "head"))
    with pytest.raises(LookupError, match="no such thing"):
        torch_api.OptaxOptimizer(model.named_parameters(), optax.stateless(update), mask="head.*").step()
