"""Every bad input raises a clear error; parameters, state and groups are unchanged."""

import copy

import pytest
import torch
from oracles import random_grads, random_params, set_grads
from sampling import sampled_tuples

import torch_api
from bridge import rules
from torch_api._rules import optimizer_spec

pytestmark = pytest.mark.quick


def model():
    return torch.nn.ModuleDict({"body": torch.nn.Linear(4, 3), "head": torch.nn.Linear(3, 2)})


def build(cls=torch_api.MaskedAdamW, **options):
    return lambda: cls(model().named_parameters(), **options)


def tensors(*ps, **options):
    return lambda: torch_api.MaskedAdamW(list(ps), **options)


P = torch.nn.Parameter(torch.zeros(3))

CONSTRUCTION = {
    "no parameters": (tensors(), ValueError, "empty parameter list.*generator.*used up"),
    "a bare tensor": (lambda: torch_api.MaskedAdam(torch.zeros(3)), TypeError, "iterable of Tensors"),
    "not a tensor": (lambda: torch_api.MaskedAdam([3]), TypeError, "can only optimize Tensors"),
    "a tensor of a graph": (lambda: torch_api.MaskedAdam([torch.ones(2, requires_grad=True) * 2]), ValueError, "non-leaf Tensor"),
    "a duplicate": (tensors(P, P), ValueError, "parameter at position 1 is the one at 0 again"),
    "a duplicate in two groups": (tensors({"params": [P]}, {"params": [P]}), ValueError, "more than one parameter group"),
    "a set": (lambda: torch_api.MaskedAdam([{"params": {P}}]), TypeError, "ordered collections"),
    "integers": (
        lambda: tensors(torch.zeros(1), torch.arange(3))().set_trainable(lambda name, p: not p.is_floating_point(), True),
        ValueError,
        "'param1' has dtype torch.int64 and cannot be trained; expected a floating or complex",
    ),
    "meta": (tensors(torch.nn.Parameter(torch.zeros(3, device="meta"))), ValueError, "'param0' .*meta device and has no memory"),
    "a lazy module": (lambda: torch_api.MaskedAdam(torch.nn.LazyLinear(2).parameters()), ValueError, "'param0' is not initialized yet"),
    "a lazy conjugate": (
        tensors(torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64).conj())),
        ValueError,
        "lazy conjugate or negative",
    ),
    "a sparse parameter": (
        tensors(torch.nn.Parameter(torch.zeros(3).to_sparse())),
        ValueError,
        "layout torch.sparse_coo; expected torch.strided",
    ),
    "a pattern that matches nothing": (build(mask="hed.*"), ValueError, r"pattern 'hed.\*' matches none of 4 parameters.*Did you mean"),
    "a module name for a pattern": (build(mask="head"), ValueError, r"Did you mean 'head.\*'"),
    "a pattern without names": (lambda: torch_api.MaskedAdam([P], mask="*"), ValueError, "needs parameter names.*named_parameters"),
    "a decay pattern that matches nothing": (build(decay_mask="*.kernel"), ValueError, r"decay_mask: the pattern '\*.kernel'"),
    "a mask of another structure": (
        build(mask={"body": {"weight": True, "bias": False}, "head": {"weight": True}}),
        ValueError,
        "no entry for 'head.bias'",
    ),
    "a mask with a foreign key": (build(mask={"neck": True}), ValueError, "key 'neck' is no parameter or module"),
    "an unknown keyword": (build(learnig_rate=1.0), TypeError, "unknown argument 'learnig_rate'.*Known: .*weight_decay"),
    "a near keyword": (build(max_grad_nrm=1.0), TypeError, "Did you mean 'max_grad_norm'"),
    "an unknown group key": (
        tensors({"params": [P], "weigth_decay": 0.1}),
        ValueError,
        "unknown key 'weigth_decay'.*Did you mean 'weight_decay'",
    ),
    "a negative lr": (build(lr=-1.0), ValueError, "Invalid learning rate: -1.0"),
    "a negative lr in a group": (tensors({"params": [P], "lr": -1.0}), ValueError, "Invalid learning rate: -1.0"),
    "a NaN lr": (build(lr=float("nan")), ValueError, "Invalid learning rate: nan"),
    "a negative eps": (build(eps=-1e-8), ValueError, "Invalid epsilon value: -1e-08"),
    "a beta of one": (build(betas=(0.9, 1.0)), ValueError, "Invalid beta parameter at index 1: 1.0"),
    "one beta": (build(betas=(0.9,)), ValueError, "betas is .*; expected 2 numbers"),
    "betas that are no pair": (build(betas=0.9), ValueError, "betas is 0.9; expected 2 numbers"),
    "a negative decay": (build(weight_decay=-1), ValueError, "Invalid weight_decay value: -1"),
    "a negative momentum": (build(torch_api.MaskedSGD, momentum=-1), ValueError, "Invalid momentum value: -1"),
    "Nesterov without momentum": (build(torch_api.MaskedSGD, nesterov=True), ValueError, "Nesterov momentum requires"),
    "a negative lr_scale": (tensors({"params": [P], "lr_scale": -1.0}), ValueError, "Invalid lr_scale: -1.0"),
    "trainable that is no bool": (tensors({"params": [P], "trainable": "no"}), TypeError, "'trainable' is 'no'; expected True or False"),
    "an option that is no bool": (build(amsgrad=1), TypeError, "'amsgrad' is 1; expected True or False"),
    "lr that is no number": (build(lr="fast"), TypeError, "'lr' is 'fast'; expected a number"),
    "lr of two elements": (build(lr=torch.tensor([0.1, 0.2])), ValueError, "Tensor lr must be 1-element"),
    "differentiable": (build(differentiable=True), ValueError, "differentiable=True is not supported"),
    "a norm of zero": (build(max_grad_norm=0), ValueError, "max_grad_norm is 0; expected a positive number"),
    "an unknown write-back": (build(writeback="fast"), ValueError, "writeback is 'fast'; expected 'inplace' or 'copy'"),
    "no rule": (
        lambda: torch_api.OptaxOptimizer([P], "adam"),
        TypeError,
        "tx is 'adam'; expected an optax transformation",
    ),
    "decay_mask without decay": (
        lambda: torch_api.OptaxOptimizer([P], optimizer_spec.OptimizerSpec(lambda lr=0.1: rules.sgd(lr)), decay_mask=True),
        ValueError,
        "decay_mask is given, but this rule has no weight_decay",
    ),
}


@pytest.mark.parametrize(("make", "kind", "text"), CONSTRUCTION.values(), ids=CONSTRUCTION.keys())
def test_bad_construction_raises_before_any_parameter_moves(make, kind, text):
    address = P.data_ptr()
    with pytest.raises(kind, match=text):
        make()
    assert P.data_ptr() == address


def fresh():
    params = random_params(shapes=[(4, 3), (3,)])
    optimizer = torch_api.MaskedAdamW([("a", params[0]), ("b", params[1])], lr=0.1, max_grad_norm=1.0)
    set_grads(params, random_grads(params))
    optimizer.step()
    set_grads(params, random_grads(params))
    return optimizer, params


def unchanged(optimizer, params, values, saved):
    now = optimizer.state_dict()
    assert now["param_groups"] == saved["param_groups"]
    assert all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
    assert all(torch.equal(now["state"][i][k], saved["state"][i][k]) for i in saved["state"] for k in saved["state"][i])


def wrong_shape(params):
    params[1].grad = None
    params[1].data, keep = torch.zeros(5), params[1].data
    params[1].grad = torch.zeros(5)
    params[1].data = keep


def sparse(params):
    params[1].grad = torch.zeros(3).to_sparse()


GRADIENTS = {
    "sparse": (sparse, "gradient of 'b' is sparse .*torch.optim.SparseAdam"),
    "another shape": (wrong_shape, r"gradient of 'b' has shape \(5,\).*the parameter has shape \(3,\).*Nothing was updated"),
}


@pytest.mark.parametrize(("spoil", "text"), GRADIENTS.values(), ids=GRADIENTS.keys())
def test_bad_gradient_raises_and_updates_no_parameter(spoil, text):
    optimizer, params = fresh()
    values, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    spoil(params)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    unchanged(optimizer, params, values, saved)
    set_grads(params, random_grads(params))
    optimizer.step()
    assert not torch.equal(params[1], values[1])


def test_gradient_on_another_device_raises():
    optimizer, params = fresh()
    values, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    leaf = optimizer._trainable[0]
    leaf.device = torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"dtype torch.float32 on cpu; the parameter has .* on cuda:0"):
        optimizer.step()
    unchanged(optimizer, params, values, saved)


def test_parameter_whose_shape_differs_from_its_state_raises():
    optimizer, params = fresh()
    params[1].grad = None
    params[1].data = torch.zeros(6)
    params[1].grad = torch.ones(6)
    values, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 'b' has shape \(3,\), but the parameter has \(6,\)"):
        optimizer.step()
    unchanged(optimizer, params, values, saved)


GROUPS = {
    "a parameter that is there": (lambda ps: {"params": [("c", ps[0])]}, ValueError, "more than one parameter group"),
    "no names beside names": (lambda ps: {"params": [torch.nn.Parameter(torch.zeros(2))]}, ValueError, "with/without names"),
    "a mask that matches nothing": (
        lambda ps: {"params": [("c", torch.nn.Parameter(torch.zeros(2)))], "mask": "d"},
        ValueError,
        "pattern 'd' matches none of 1 parameters",
    ),
    "a negative lr": (lambda ps: {"params": [("c", torch.nn.Parameter(torch.zeros(2)))], "lr": -1}, ValueError, "learning rate: -1"),
    "no dict": (lambda ps: [ps[0]], TypeError, "param_group must be a dict"),
    "no params": (lambda ps: {"lr": 0.1}, ValueError, "a param group has no 'params'"),
}


@pytest.mark.parametrize(("make", "kind", "text"), sampled_tuples(GROUPS.values()))
def test_bad_added_group_raises_and_the_optimizer_continues(make, kind, text):
    optimizer, params = fresh()
    values, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(kind, match=text):
        optimizer.add_param_group(make(params))
    unchanged(optimizer, params, values, saved)
    optimizer.step()


def test_bad_selector_in_set_trainable_raises():
    optimizer, params = fresh()
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="pattern 'c' matches none of 2 parameters"):
        optimizer.set_trainable("c", False)
    unchanged(optimizer, params, [p.detach().clone() for p in params], saved)


@pytest.mark.parametrize(
    ("what", "text"),
    [("lr", "'lr' is 'fast'; expected a number"), ("betas", "betas is 'fast'; expected 2 numbers")],
)
def test_invalid_group_value_raises_at_the_step(what, text):
    optimizer, params = fresh()
    values, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0][what] = saved["param_groups"][0][what] = "fast"
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.step()
    unchanged(optimizer, params, values, saved)
