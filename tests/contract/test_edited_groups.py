"""Optimizers follow hand edits of `param_groups`, as torch.optim does, in `state_dict`, `load_state_dict`, copies and pickles."""

import copy
import pickle

import optax
import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized


def make(cls, **options):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)])
    return model, cls(model[2].parameters(), lr=0.1, **options)


def step(model, opt):
    opt.zero_grad()
    model[2](model[1](model[0](torch.ones(2, 3)))).square().sum().backward()
    opt.step()


def new_list(model, opt):
    first = opt.param_groups[0]
    opt.param_groups = [first, {**first, "params": list(model[1].parameters()), "lr": 0.01}]


def append_group(model, opt):
    opt.param_groups.append({**opt.param_groups[0], "params": list(model[1].parameters())})


def append_parameters(model, opt):
    opt.param_groups[0]["params"] += list(model[1].parameters())


def replace_parameter(model, opt):
    opt.state.pop(model[2].bias, None)
    model[2].bias = torch.nn.Parameter(torch.zeros(2))
    opt.param_groups[0]["params"] = [model[2].weight, model[2].bias]


def remove_parameter(model, opt):
    opt.state.pop(opt.param_groups[0]["params"].pop(), None)


def load(model, opt, edit):
    """Load the checkpoint of an optimizer that had the same edit and was stepped."""
    other, saved = make(type(opt))
    edit(other, saved)
    step(other, saved)
    opt.load_state_dict(copy.deepcopy(saved.state_dict()))


def save(model, opt, edit):
    assert [len(group["params"]) for group in opt.state_dict()["param_groups"]] == [len(group["params"]) for group in opt.param_groups]


EDITS = [new_list, append_group, append_parameters, replace_parameter, remove_parameter]
THEN = {
    "load": load,
    "save": save,
    "deepcopy": lambda model, opt, edit: copy.deepcopy((model, opt)),
    "pickle": lambda model, opt, edit: pickle.loads(pickle.dumps((model, opt))),
    "report": lambda model, opt, edit: str(opt) and None,
}


def trained(cls, edit, then, options=None):
    model, opt = make(cls, **(options or {}))
    step(model, opt)
    edit(model, opt)
    model, opt = then(model, opt, edit) or (model, opt)
    step(model, opt)
    step(model, opt)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("edit", EDITS)
def test_calls_after_an_edit_give_the_numbers_of_torch(edit, then):
    torch.testing.assert_close(trained(torch_api.MaskedAdamW, edit, THEN[then]), trained(torch.optim.AdamW, edit, THEN[then]))


@pytest.mark.parametrize("then", ["load", "deepcopy"])
@pytest.mark.parametrize("edit", [new_list, replace_parameter])
def test_optax_transformation_continues_as_in_torch_after_an_edit(edit, then):
    class Ours(torch_api.OptaxOptimizer):
        def __init__(self, params, lr):
            super().__init__(params, optax.sgd, lr=lr, momentum=0.9)

    class Theirs(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr, momentum=0.9)

    def do(model, opt, edit):  # local classes cannot be pickled
        return THEN[then](model, opt, edit) if then == "load" else None

    torch.testing.assert_close(trained(Ours, edit, do), trained(Theirs, edit, do))


def test_set_trainable_does_not_apply_to_parameters_added_later():
    model, opt = make(torch_api.MaskedSGD)
    opt.set_trainable([model[2].bias], False)
    new_list(model, opt)
    for other_model, other in (THEN["deepcopy"](model, opt, None), (model, opt)):
        before = [p.clone() for p in other_model.parameters()]
        step(other_model, other)
        moved = [not torch.equal(p, q) for p, q in zip(other_model.parameters(), before, strict=True)]
        assert moved == [False, False, True, True, True, False]
    saved = opt.state_dict()
    assert [group["trainable_params"] for group in saved["param_groups"]] == [[True, False], [True, True]]
    opt.load_state_dict(saved)
    assert [group["trainable_params"] for group in opt.param_groups] == [[True, False], [True, True]]


def test_names_outdated_by_an_edit_are_not_saved():
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)])
    opts = [cls(list(model[2].named_parameters()), lr=0.1) for cls in (torch_api.MaskedAdamW, torch.optim.AdamW)]
    for opt in opts:
        append_parameters(model, opt)
    step(model, opts[0])
    step(model, opts[1])
    saved = opts[0].state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [4]
    opts[0].load_state_dict(saved)
    opts[1].load_state_dict(saved)
    step(model, opts[0])
    assert float(opts[0].state[model[1].bias]["step"]) == 2.0


def test_checkpoint_from_before_an_edit_is_refused():
    model, opt = make(torch_api.MaskedAdamW)
    step(model, opt)
    saved = copy.deepcopy(opt.state_dict())
    append_parameters(model, opt)
    with pytest.raises(ValueError, match="expected 4"):
        opt.load_state_dict(saved)
    assert len(opt.param_groups[0]["params"]) == 4
    assert float(opt.state[model[2].bias]["step"]) == 1.0
    step(model, opt)
    assert [float(opt.state[p]["step"]) for p in opt.param_groups[0]["params"]] == [2.0, 2.0, 1.0, 1.0]


def test_partitioned_optimizer_continues_after_an_edit():
    model, _ = make(torch.optim.SGD)
    twin = copy.deepcopy(model)
    opt = torch_api.PartitionedOptimizer([{"params": list(model[2].parameters())}], {"a": (optax.sgd, {"lr": 0.1})}, lambda name, p: "a")
    theirs = torch.optim.SGD(twin[2].parameters(), lr=0.1)
    for edited, optimizer in ((model, opt), (twin, theirs)):
        new_list(edited, optimizer)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    model, opt = copy.deepcopy((model, opt))
    for edited, optimizer in ((model, opt), (twin, theirs)):
        step(edited, optimizer)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
