"""Structure of the drop-in classes: state, bytes, compilations, addresses, checkpoints before the first step."""

import copy
import inspect
import math
import pickle

import numpy as np
import pytest
import torch
from oracles import FUSES, clones, movement_error, random_params, run_pair, set_grads
from signatures import own_parameters

import bridge
import torch_api
from torch_api._rules import torch_rules

pytestmark = pytest.mark.unoptimized

NAMES = ["RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Muon", "Adafactor", "Adam", "AdamW", "SGD"]


def masked(name):
    return getattr(torch_api, f"Masked{name}")


def theirs_of(name):
    return getattr(torch.optim, name, None) or pytest.skip(f"this torch has no {name}")


def advance(optimizer, params, steps=1):
    for _ in range(steps):
        set_grads(params, [torch.randn_like(p) for p in params])
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_arguments_have_the_order_and_defaults_of_torch(name):
    theirs = inspect.signature(theirs_of(name)).parameters
    ours = own_parameters(masked(name))
    assert list(ours) == list(theirs)
    for n, p in theirs.items():
        assert (ours[n].kind, ours[n].default) == (p.kind, p.default), n


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_continue_alike(name):
    p = torch.nn.Parameter(torch.randn(3, 3))
    optimizer = masked(name)([("w", p)], lr=0.01)
    advance(optimizer, [p], 2)
    ends = []
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), optimizer):
        torch.manual_seed(1)
        (q,) = twin.param_groups[0]["params"]
        advance(twin, [q], 2)
        ends.append(q.detach().clone())
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[2])


@pytest.mark.parametrize("name", NAMES)
def test_frozen_bits_addresses_and_compilations_stay_constant(name):
    params = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    params[2].data[0] = torch.tensor([float("nan"), -0.0, 1e-42])
    bits = params[2].detach().clone().view(torch.int32)
    optimizer = masked(name)([("a", params[0]), ("b", params[1]), ("c", params[2])], mask=["a", "b"], lr=0.01)
    places = [p.data_ptr() for p in params[:2]]
    compiled = None
    for step in range(4):
        set_grads(params, [torch.randn_like(p) for p in params])
        params[2].grad.fill_(math.nan)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
            for key in ("weight_decay", "alpha", "lambd", "momentum_decay", "rho"):
                if key in group:
                    group[key] = 0.1 + 0.01 * step
        optimizer.step()
        compiled = compiled or bridge.compilations()
        if step == 0:
            places = [p.data_ptr() for p in params[:2]]
            state = {key: t.data_ptr() for key, t in optimizer.state[params[0]].items()}
    assert bridge.compilations() == compiled
    assert places == [p.data_ptr() for p in params[:2]]
    assert state == {key: t.data_ptr() for key, t in optimizer.state[params[0]].items()}
    assert torch.equal(params[2].detach().view(torch.int32), bits)
    assert params[2] not in optimizer.state
    assert optimizer.state_dict()["state"].keys() >= {0, 1} if name != "SGD" else True


@FUSES
@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    {"RMSprop": 20, "Adagrad": 20, "ASGD": 20, "NAdam": 28, "RAdam": 28, "Adamax": 28, "Adadelta": 28, "Rprop": 28}.items(),
)
def test_step_reads_and_writes_each_array_once(name, bytes_per_element):
    """Parameter, gradient and state are read once; parameter and state are written once."""
    (p,) = random_params(shapes=[(128, 128)])
    optimizer = masked(name)([p])
    advance(optimizer, [p])
    assert optimizer.bytes_accessed() == pytest.approx(bytes_per_element * p.numel(), rel=0.01)


# ---------------------------------------------------------------------- Adagrad has state before the first step


def test_adagrad_has_state_before_the_first_step_as_in_torch():
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    options = {"lr": 0.1, "initial_accumulator_value": 0.5}
    a, b = torch_api.MaskedAdagrad(ours, **options), torch.optim.Adagrad(theirs, **options)
    one, two = a.state_dict()["state"], b.state_dict()["state"]
    assert one.keys() == two.keys() == set(range(len(ours)))
    for index, fields in two.items():
        assert one[index].keys() == fields.keys()
        assert all(torch.equal(one[index][key], value) and one[index][key].dtype is value.dtype for key, value in fields.items())
    fresh_a, fresh_b = torch_api.MaskedAdagrad(ours, lr=9.0), torch.optim.Adagrad(theirs, lr=9.0)
    fresh_a.load_state_dict(copy.deepcopy(b.state_dict()))
    fresh_b.load_state_dict(copy.deepcopy(a.state_dict()))
    never = lambda params: [None if i == 1 else torch.randn_like(p) for i, p in enumerate(params)]  # noqa: E731
    run_pair(fresh_a, ours, fresh_b, theirs, 10, grads=never)
    moved = [i for i in range(len(ours)) if i != 1]
    assert max(movement_error(ours[i], theirs[i], start[i]) for i in moved) < 1e-5
    third = torch.optim.Adagrad(theirs)
    third.load_state_dict(copy.deepcopy(fresh_a.state_dict()))  # with state for a parameter that never had a gradient
    run_pair(fresh_a, ours, third, theirs, 10)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


def test_state_of_adagrad_follows_masks_groups_and_copies():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = torch_api.MaskedAdagrad([("a", params[0]), ("b", params[1])], mask="a", initial_accumulator_value=0.25)
    assert set(optimizer.state) == {params[0]}
    optimizer.set_trainable("b", True)
    assert set(optimizer.state) == set(params[:2])
    optimizer.set_trainable("b", False, keep_state=False)
    assert set(optimizer.state) == {params[0]}
    optimizer.add_param_group({"params": [("c", params[2])], "initial_accumulator_value": 0.5, "trainable": True})
    assert float(optimizer.state[params[2]]["sum"][0]) == 0.5
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [float(state["sum"][0]) for state in twin.state.values()] == [0.25, 0.5]
    z = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert torch_api.MaskedAdagrad([z], initial_accumulator_value=0.5).state[z]["sum"][0] == 0.5 + 0.5j


# ---------------------------------------------------------------------- Muon and Adafactor


def test_muon_refuses_vectors_with_advice():
    matrix, bias = torch.nn.Parameter(torch.randn(3, 3)), torch.nn.Parameter(torch.randn(3))
    named = [("weight", matrix), ("bias", bias)]
    with pytest.raises(
        ValueError, match=r"Muon only supports 2D parameters .* size: torch.Size\(\[3\]\) \('bias'\). Freeze it by the mask"
    ):
        torch_api.MaskedMuon(named)
    optimizer = torch_api.MaskedMuon(named, mask="weight")
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optimizer.set_trainable("bias", True)
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optimizer.add_param_group({"params": [("other", torch.nn.Parameter(torch.randn(2, 2, 2)))], "trainable": True})
    assert len(optimizer.param_groups) == 1
    advance(optimizer, [matrix, bias])
    mixed = torch_api.PartitionedOptimizer(
        named, {"muon": (torch_rules.MUON, {"lr": 0.01}), "adamw": (torch_rules.ADAM, {"lr": 0.01})}, {"weight": "muon", "bias": "adamw"}
    )
    advance(mixed, [matrix, bias])
    assert {key for p in (matrix, bias) for key in mixed.state[p]} == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_edited_static_hyperparameters_are_validated_and_take_effect():
    p = torch.nn.Parameter(torch.randn(2, 4))
    optimizer = torch_api.MaskedMuon([p], lr=0.1, weight_decay=0.0)
    moves = []
    for name in (None, "match_rms_adamw", "spectral_unclamped"):
        optimizer.param_groups[0]["adjust_lr_fn"] = name
        before = p.detach().clone()
        p.grad = torch.ones(2, 4)
        optimizer.step()
        moves.append(float((p.detach() - before).norm()))
    assert moves[1] / moves[0] == pytest.approx(0.2 * math.sqrt(4), rel=1e-2)
    assert moves[2] / moves[0] == pytest.approx(math.sqrt(2 / 4), rel=1e-2)
    for key, value, error in (("adjust_lr_fn", "other", ValueError), ("ns_steps", 2.5, TypeError), ("ns_steps", 100, ValueError)):
        kept = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        with pytest.raises(error, match=r"not supported|expected an integer|less than 100"):
            optimizer.step()
        optimizer.param_groups[0][key] = kept
    with pytest.raises(ValueError, match="expected 2 numbers"):
        torch_api.MaskedAdafactor([p], eps=(None,))


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_masked_elements_are_excluded_from_every_sum(name):
    p = torch.nn.Parameter(torch.randn(6, 4))
    q = torch.nn.Parameter(p.detach().clone())
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[:, :2] = True
    optimizer, other = (masked(name)([("w", x)], lr=0.1, mask={"w": mask}) for x in (p, q))
    start = p.detach().clone()
    for _ in range(3):
        p.grad = torch.randn_like(p)
        q.grad = torch.where(mask, p.grad, 1e6)
        optimizer.step()
        other.step()
    assert torch.equal(p, q)
    assert torch.equal(p[~mask], start[~mask])
    assert not torch.equal(p[mask], start[mask])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_epsilon_of_adafactor_depends_on_the_parameters_dtype(dtype):
    """Adafactor's epsilon bounds the update if gradients are tiny; that of bfloat16 is much larger than float32's."""
    p = torch.nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = torch_api.MaskedAdafactor([p], lr=1.0)
    p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    eps = torch.finfo(dtype).eps
    # row * column / max(mean row, eps) is g^4 / eps where g^2 is below eps, and at least eps^2.
    estimate = max(1e-12 / max(1e-6, eps), eps * eps)
    moved = 1.0 - min(1e-3 / math.sqrt(estimate), 1.0)
    np.testing.assert_allclose(p.detach().float().numpy(), moved, atol=0.02)
    assert optimizer.state[p]["row_var"].dtype is dtype
    assert tuple(optimizer.state[p]["row_var"].shape) == (4, 1)
    assert optimizer.state[p]["step"].dtype is torch.float32
