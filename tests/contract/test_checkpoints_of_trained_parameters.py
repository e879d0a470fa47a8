"""A torch checkpoint of the trained parameters alone loads into an optimizer that also has the frozen parameters."""

import copy

import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized


def two_layers():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"body": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 2)})


def step(model, optimizer):
    optimizer.zero_grad()
    model["head"](model["body"](torch.ones(1, 3))).square().sum().backward()
    optimizer.step()


def saved_by_torch(model, with_names, lr=0.05):
    """Train the head for two steps with torch's AdamW; return that optimizer and its model."""
    twin = copy.deepcopy(model)
    params = twin["head"].named_parameters(prefix="head") if with_names else twin["head"].parameters()
    optimizer = torch.optim.AdamW(params, lr=lr)
    for _ in range(2):
        step(twin, optimizer)
    model.load_state_dict(twin.state_dict())
    return optimizer, twin


def by_requires_grad(model):
    model["body"].requires_grad_(False)
    return model.named_parameters(), {}


def by_mask(model):
    return model.named_parameters(), {"mask": "head.*"}


def by_flag(model):
    body, head = model["body"].named_parameters(prefix="body"), model["head"].named_parameters(prefix="head")
    return [{"params": list(body), "trainable": False, "lr": 0.7}, {"params": list(head)}], {}


def by_flag_last(model):
    groups, options = by_flag(model)
    return groups[::-1], options


def without_names(model):
    model["body"].requires_grad_(False)
    return model.parameters(), {}


def under_a_wrapper(model):
    return [(f"_orig_mod.{name}", p) for name, p in model.named_parameters()], {"mask": "head.*"}


WAYS = [by_requires_grad, by_mask, by_flag, by_flag_last, without_names, under_a_wrapper]


@pytest.mark.parametrize("with_names", [True, False], ids=["names", "positions"])
@pytest.mark.parametrize("way", WAYS)
def test_checkpoint_of_the_head_loads_and_training_continues_as_in_torch(way, with_names):
    model = two_layers()
    reference, twin = saved_by_torch(model, with_names)
    body = [p.detach().clone() for p in model["body"].parameters()]
    params, options = way(model)
    optimizer = torch_api.MaskedAdamW(params, lr=0.5, **options)
    for saved in (reference, optimizer):  # the second checkpoint is its own and holds all parameters
        optimizer.load_state_dict(saved.state_dict())
        step(model, optimizer)
        step(twin, reference)
    torch.testing.assert_close(list(model["head"].parameters()), list(twin["head"].parameters()), rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, body, model["body"].parameters()))
    assert not any(p in optimizer.state and optimizer.state[p] for p in model["body"].parameters())
    lrs = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {lrs[id(p)] for p in model["head"].parameters()} == {0.05}
    if "flag" in way.__name__:
        assert {lrs[id(p)] for p in model["body"].parameters()} == {0.7}, "the checkpoint has no group with this lr"


def test_checkpoint_without_a_trained_parameter_is_refused():
    model = two_layers()
    reference, _ = saved_by_torch(model, True)
    for params, options, text in (
        (model.named_parameters(), {}, "no parameter 'body.weight'"),
        (model.named_parameters(), {"mask": ["head.*", "body.bias"]}, "no parameter 'body.weight'"),
        (model.parameters(), {}, "2 parameters, expected 4"),
        (by_flag(model)[0][1:] + [{"params": [("body.bias", model["body"].bias)]}], {}, "different number of parameter groups"),
    ):
        optimizer = torch_api.MaskedAdamW(params, lr=0.5, **options)
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(reference.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert not optimizer.state_dict()["state"] or "mask" in options


def test_parameters_missing_in_the_checkpoint_can_be_thawed_later():
    model = two_layers()
    reference, _ = saved_by_torch(model, True)
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=0.5, mask="head.*")
    optimizer.set_trainable("head.bias", True)  # the groups now list which of their parameters are trained
    optimizer.load_state_dict(reference.state_dict())
    optimizer.set_trainable("body.*", True)
    before = model["body"].weight.detach().clone()
    step(model, optimizer)
    assert not torch.equal(before, model["body"].weight)
    assert float(optimizer.state[model["body"].weight]["step"]) == 1.0
    assert float(optimizer.state[model["head"].weight]["step"]) == 3.0
