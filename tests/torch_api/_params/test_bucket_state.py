"""State of bucketed parameters: storages, edits by hand, checkpoints and several optimizers work as without buckets."""

import copy
import gc
import io
import pickle

import jax
import numpy as np
import pytest
import safetensors.torch as safetensors
import torch
from oracles import clones, random_grads, same
from packing import assert_near, bucket_rows, bucketed, parameters, random_subset, run, states, without_buckets

import torch_api
from bridge._memory import jax_buffers

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

# ---------------------------------------------------------------------- storages


def saved_bytes(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return len(buffer.getvalue())


def test_storage_of_each_tensor_has_exactly_its_bytes():
    params = parameters()
    ours = bucketed(torch_api.MaskedAdamW(params, amsgrad=True))
    run([(ours, params)], 2)
    tensors = [*params, *states(ours, params)]
    assert [t.untyped_storage().nbytes() for t in tensors] == [t.nbytes for t in tensors]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    for p in (params[0], params[9]):
        for t in (p, ours.state[p]["exp_avg_sq"], ours.state[p]["step"]):
            assert saved_bytes(t) == saved_bytes(t.detach().clone().requires_grad_(t.requires_grad) if t is not p else clones([p])[0])
    assert saved_bytes(torch.zeros(16)) < saved_bytes(torch.zeros(16 * 13))  # the comparison can fail: file sizes differ


def test_safetensors_saves_only_the_bytes_of_each_tensor(tmp_path):
    params = parameters()
    run([(bucketed(torch_api.MaskedAdam(params)), params)], 1)
    safetensors.save_file({str(i): p.detach() for i, p in enumerate(params)}, tmp_path / "x")
    loaded = safetensors.load_file(tmp_path / "x")
    assert same([loaded[str(i)] for i in range(len(params))], params)
    one, sizes = params[0].detach(), []
    for tensor in (one, one.clone(), torch.zeros(13, *one.shape)):
        safetensors.save_file({"w": tensor}, tmp_path / "one")
        sizes.append((tmp_path / "one").stat().st_size)
    assert sizes[0] == sizes[1] < sizes[2]  # the comparison can fail: the third file is larger


def test_addresses_of_parameters_and_state_stay_constant():
    params = parameters()
    ours = bucketed(torch_api.MaskedAdamW(params, amsgrad=True))
    run([(ours, params)], 1)
    tensors = [*params, *states(ours, params)]
    addresses = [t.data_ptr() for t in tensors]
    run([(ours, params)], 20, random_subset)
    assert addresses == [t.data_ptr() for t in tensors]
    assert all(a is b for a, b in zip(tensors, [*params, *states(ours, params)], strict=True))
    assert len(set(addresses)) == len(addresses)


def test_parameters_and_state_outlive_the_optimizer_and_each_other():
    params = parameters()
    ours = bucketed(torch_api.MaskedAdam(params))
    run([(ours, params)], 2)
    kept = [*params, ours.state[params[3]]["exp_avg"]]
    values = [t.detach().clone() for t in kept]
    del ours
    gc.collect()
    junk = [torch.full((n,), 7.0) for n in range(1, 300)]
    assert same(kept, values)
    alone = kept[3]
    del params, kept, junk
    gc.collect()
    junk = [torch.full((n,), 7.0) for n in range(1, 300)]
    assert torch.equal(alone, values[3])
    del junk


# ---------------------------------------------------------------------- edits by hand


def trained_pair():
    params = parameters()
    start, others = clones(params), clones(params)
    ours = bucketed(torch_api.MaskedAdam([(f"p{i}", p) for i, p in enumerate(params)], lr=0.01), 13)
    runs = [(ours, params), (torch.optim.Adam(others, lr=0.01), others)]
    run(runs, 3)
    return runs, start


def replace(optimizer, p):
    optimizer.state[p]["exp_avg"] = torch.full_like(optimizer.state[p]["exp_avg"], 0.5)


def pop(optimizer, p):
    optimizer.state.pop(p)


def other_data(optimizer, p):
    optimizer.state[p]["exp_avg"].data = torch.full_like(optimizer.state[p]["exp_avg"], 0.25)


def filled(optimizer, p):
    optimizer.state[p]["exp_avg_sq"].fill_(2.0)


def swapped(optimizer, p):
    group = optimizer.param_groups[0]["params"]
    one, other = optimizer.state[group[0]], optimizer.state[group[2]]
    one["step"], other["step"] = torch.tensor(9.0), torch.tensor(4.0)


@pytest.mark.parametrize("edit", [replace, pop, other_data, filled, swapped])
def test_steps_continue_from_edited_state_as_in_torch(edit):
    runs, start = trained_pair()
    for _ in range(2):
        for optimizer, params in runs:
            edit(optimizer, params[1])
        run(runs, 2)
    (ours, params), (theirs, others) = runs
    assert_near(params, others, start)
    assert [float(ours.state[p]["step"]) for p in params] == [float(theirs.state[q]["step"]) for q in others]


def test_replaced_data_is_moved_back_into_its_bucket_row():
    runs, start = trained_pair()
    (ours, params), _ = runs
    memory, address = ours._records[1].jax_buffer, params[1].data_ptr()
    for _ in range(3):
        value = torch.randn(4, 4)
        for _, ps in runs:
            ps[1].data = value.clone()
        assert params[1].data_ptr() != address
        run(runs, 2)
        assert params[1].data_ptr() == address
        assert jax_buffers.find_buffer(params[1].detach())[0] is memory
    assert_near(params, runs[1][1], start)


HOLD = {"the tensor": lambda p: p.data, "a view": lambda p: p.data[1:3], "a view of a view": lambda p: p.detach().view(-1)[3:][::2]}


@pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD.keys())
def test_old_data_with_another_holder_keeps_its_values(hold):
    runs, start = trained_pair()
    (_, params), (_, others) = runs
    held = hold(params[1])
    values, new = held.clone(), torch.randn(4, 4)
    for _, ps in runs:
        ps[1].data = new.clone()
    run(runs, 4)
    assert torch.equal(held, values)
    assert_near(params, others, start)
    assert len({p.data_ptr() for p in params}) == len(params)


def replace_all(optimizer, p):
    """Replace all state of a parameter; the caller checks that the old tensors keep their values."""
    optimizer.state[p] = {name: torch.full_like(tensor, 2.0) for name, tensor in optimizer.state[p].items()}


@pytest.mark.parametrize("edit", [pop, replace, replace_all])
def test_old_state_with_another_holder_keeps_its_values(edit):
    runs, start = trained_pair()
    (ours, params), (_, others) = runs
    held = list(ours.state[params[1]].values())
    values = [t.clone() for t in held]
    for optimizer, ps in runs:
        edit(optimizer, ps[1])
    kept = [i for i, t in enumerate(held) if all(t is not now for now in ours.state.get(params[1], {}).values())]
    assert kept
    run(runs, 3)
    assert same([held[i] for i in kept], [values[i] for i in kept])
    assert_near(params, others, start)


@pytest.mark.parametrize("second", [False, True], ids=["a dead row", "a row of another optimizer"])
def test_inactive_rows_are_rebound_after_their_bucket_moved(second):
    params = parameters(shapes=[(10,)] * 6)
    start, others = clones(params), clones(params)
    runs = [(bucketed(torch_api.MaskedAdam(params, lr=0.01), 6), params), (torch.optim.Adam(others, lr=0.01), others)]
    run(runs, 2)
    moving = [(torch_api.MaskedSGD(params[3:], lr=0.1), params[3:]), (torch.optim.SGD(others[3:], lr=0.1), others[3:])] if second else runs
    active_grads = random_grads if second else lambda ps: [None, *random_grads(ps[1:])]
    run(moving, 1, active_grads)
    held = [np.asarray(array) for array in jax.live_arrays()]  # pins the buffers, so XLA must write results elsewhere
    run(moving, 1, active_grads)
    assert {jax_buffers.find_buffer(p.detach())[0] for p in params} == {runs[0][0]._records[5].jax_buffer}
    del held
    run(runs, 2)
    assert_near(params, others, start)


def test_model_may_be_cast_to_bfloat16_between_steps():
    class Model(torch.nn.Module):
        def __init__(self, start):
            super().__init__()
            self.all = torch.nn.ParameterList(torch.nn.Parameter(p.detach().clone()) for p in start)

    start = parameters(shapes=[(10,), (4, 4), (3, 5), (2, 5), (7,)])
    make = lambda model: torch_api.MaskedAdam(model.parameters(), lr=0.01)  # noqa: E731
    one, other = Model(start), Model(start)
    ours = bucketed(make(one))
    with without_buckets():
        theirs = make(other)
        runs = [(ours, list(one.parameters())), (theirs, list(other.parameters()))]
        for convert in (lambda model: model, lambda model: model.bfloat16(), lambda model: model.float()):
            convert(one)
            convert(other)
            run(runs, 3)
    assert_near(runs[0][1], runs[1][1], start, 1e-6)
    assert set(bucket_rows(theirs)) == {None}


# ---------------------------------------------------------------------- masks, several optimizers


@pytest.mark.parametrize("keep", [True, False])
def test_freezing_and_thawing_keeps_the_moments_of_other_parameters(keep):
    runs, start = trained_pair()
    (ours, params), (theirs, others) = runs
    frozen = (1, 5, 9)
    others_state = lambda: [t.clone() for i, p in enumerate(params) for t in ours.state.get(p, {}).values() if i not in frozen]  # noqa: E731
    before = others_state()
    for i in frozen:
        ours.set_trainable(f"p{i}", False, keep_state=keep)
        others[i].requires_grad_(False)
    assert same(others_state(), before)
    values = [params[i].detach().clone() for i in frozen]
    run(runs, 3, lambda ps: [None if i in frozen else torch.randn_like(p) for i, p in enumerate(ps)])
    assert same([params[i] for i in frozen], values)
    before = others_state()
    for i in frozen:
        ours.set_trainable(f"p{i}", True)
        assert keep == (params[i] in ours.state)
        others[i].requires_grad_(True)
        if not keep:
            theirs.state.pop(others[i])
    assert same(others_state(), before)
    run(runs, 3)
    assert_near(params, others, start)


@pytest.mark.parametrize("coarse_first", [True, False])
def test_two_optimizers_may_bucket_the_same_parameters_differently(coarse_first):
    params = parameters(shapes=[(10,)] * 8 + [(4, 4)] * 4)
    start, others = clones(params), clones(params)
    halves = lambda ps: [{"params": ps[:6]}, {"params": ps[6:], "maximize": True}]  # noqa: E731
    ours = [lambda: torch_api.MaskedAdam(params, lr=0.01), lambda: torch_api.MaskedSGD(halves(params), lr=0.1, momentum=0.9)]
    theirs = [torch.optim.Adam(others, lr=0.01), torch.optim.SGD(halves(others), lr=0.1, momentum=0.9)]
    order = (0, 1) if coarse_first else (1, 0)
    made = {i: ours[i]() for i in order}
    for _ in range(6):
        for i in order:
            run([(made[i], params), (theirs[i], others)], 1, random_subset)
    assert_near(params, others, start)


def test_second_optimizer_may_have_half_of_a_bucket():
    params = parameters(shapes=[(10,)] * 8)
    start, others = clones(params), clones(params)
    ours = bucketed(torch_api.MaskedAdam(params, lr=0.01)), torch_api.MaskedSGD(params[:4], lr=0.1)
    theirs = torch.optim.Adam(others, lr=0.01), torch.optim.SGD(others[:4], lr=0.1)
    for _ in range(4):
        run([(ours[0], params), (theirs[0], others)], 1)
        run([(ours[1], params[:4]), (theirs[1], others[:4])], 1)
    assert_near(params, others, start)


# ---------------------------------------------------------------------- checkpoints and copies


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies_are_independent(copied):
    params = parameters(shapes=[(10,)] * 6)
    ours = bucketed(torch_api.MaskedAdam(params, lr=0.01), 6)
    run([(ours, params)], 3)
    values = clones(params)
    twin, twins = copied((ours, params))
    run([(twin, twins)], 2)
    assert same(params, values)
    assert not {p.data_ptr() for p in params} & {p.data_ptr() for p in twins}
    twin, twins = copied((ours, params))
    run([(ours, params), (twin, twins)], 4)
    assert_near(twins, params, values)
    assert [t.untyped_storage().nbytes() for t in states(twin, twins)] == [t.nbytes for t in states(ours, params)]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies_are_bucketed(copied):
    params = parameters(shapes=[(10,)] * 6)
    ours = bucketed(torch_api.MaskedAdam(params, lr=0.01), 6)
    run([(ours, params)], 1)
    twin, twins = copied((ours, params))
    run([(twin, twins)], 2)
    bucketed(twin, 6)


def test_parameters_are_bucketed_again_after_a_change_of_dtype():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    ours = bucketed(torch_api.MaskedAdam(model.parameters(), lr=0.01), 12)
    run([(ours, list(model.parameters()))], 1)
    model.bfloat16()
    run([(ours, list(model.parameters()))], 2)
    bucketed(ours, 12)


def test_state_dicts_load_from_and_into_torch_between_steps():
    runs, start = trained_pair()
    (ours, params), (theirs, others) = runs
    saved = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    memories = {leaf.jax_buffer for leaf in ours._trainable}
    run(runs, 2)
    ours.load_state_dict(saved[1])
    theirs.load_state_dict(saved[0])
    run(runs, 3, random_subset)
    assert_near(params, others, start)
    assert {leaf.jax_buffer for leaf in bucketed(ours, 13)._trainable} == memories
    assert [t.untyped_storage().nbytes() for t in states(ours, params)] == [t.nbytes for t in states(ours, params)]
    for name, tensor in ours.state_dict()["state"][3].items():
        torch.testing.assert_close(tensor, theirs.state_dict()["state"][3][name], rtol=1e-5, atol=1e-8)


def test_state_dict_without_buckets_and_with_partial_state_loads():
    params = parameters()
    make = lambda ps: torch_api.MaskedAdam(ps, lr=0.01)  # noqa: E731
    start = clones(params)
    others = clones(params)
    theirs = torch.optim.Adam(others, lr=0.01)
    run([(theirs, others)], 3, lambda ps: [torch.randn_like(p) if i % 3 else None for i, p in enumerate(ps)])
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            p.copy_(q)
    ours = bucketed(make(params), 13)
    ours.load_state_dict(theirs.state_dict())
    run([(ours, params), (theirs, others)], 4, random_subset)
    run([(ours, params), (theirs, others)], 1)
    assert_near(params, others, start)
    assert [float(ours.state[p]["step"]) for p in params] == [float(theirs.state[q]["step"]) for q in others]
