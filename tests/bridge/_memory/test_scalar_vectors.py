"""Scalar state: torch tensors for the user, one vector per dtype inside the program."""

import copy
import gc
import io
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import torch_api
from bridge._compiler import plan, update
from bridge._memory import jax_buffers
from bridge._process import x64

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

SHAPES = (200, 200), (200, 210), (300, 200), (40_000,)  # too large for buckets


def params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give(ps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def stepped(optimizer, ps, steps=3):
    for seed in range(steps):
        give(ps, seed)
        optimizer.step()
    return optimizer


def test_scalar_state_is_not_a_jax_array():
    ps = params()
    gc.collect()
    small = lambda: sum(x.size <= len(SHAPES) for x in jax.live_arrays())  # noqa: E731
    before = small()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps)
    assert small() == before
    for state in optimizer.state.values():
        assert jax_buffers.find_buffer(state["step"]) == (None, None)
        assert not jax_buffers.is_over_jax_buffer(state["step"])
        assert state["step"].shape == ()
        assert state["step"].untyped_storage().nbytes() == 4
        assert state["step"] == 3


def test_program_takes_and_returns_one_vector_of_scalars():
    ps = params()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps)
    (launch,) = optimizer._launch_cache.last_used
    donated, arguments = launch.executable.update.in_avals[0][:2], launch.executable.update.in_avals[0][2:]
    assert [len(column) for column in donated] == [len(SHAPES), 2 * len(SHAPES)]
    assert [aval.shape for aval in arguments[0]] == [(len(SHAPES),)]
    with x64():
        results = jax.tree.leaves(
            jax.eval_shape(partial(update.update_step, launch.executable.plan), *plan.abstract_args(launch.executable.plan))
        )
    assert [x.shape for x in results if x.size < 100] == [(len(SHAPES),), ()]  # the second is the result to wait for


def test_scalars_are_adjacent_and_read_without_a_copy():
    ps = params()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps)
    (launch,) = optimizer._launch_cache.last_used
    (cells,) = launch.arguments.scalars
    assert cells.length == 4 * len(ps)
    assert cells.read().__array_interface__["data"][0] == cells.address == min(optimizer.state[p]["step"].data_ptr() for p in ps)
    ps[1].requires_grad_(False)
    stepped(optimizer, ps, 1)
    (cells,) = optimizer._launch_cache.last_used[0].arguments.scalars
    assert cells.length == 0  # an inactive scalar lies between them
    assert cells.read().tolist() == [4.0] * (len(ps) - 1)
    assert int(optimizer.state[ps[1]]["step"]) == 3


def test_held_scalar_keeps_its_address_and_shows_each_step():
    ps = params()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps, 1)
    held = [optimizer.state[p]["step"] for p in ps]
    addresses = [x.data_ptr() for x in held]
    stepped(optimizer, ps, 2)
    assert [x.data_ptr() for x in held] == addresses
    assert [int(x) for x in held] == [3] * len(ps)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.randn(8))]})  # all parameters are arranged again
    optimizer.param_groups[1]["params"][0].grad = torch.ones(8)
    with pytest.warns(torch_api.CompilationWarning):
        stepped(optimizer, ps, 1)
    assert [int(x) for x in held] == [4] * len(ps)
    assert [optimizer.state[p]["step"].data_ptr() for p in ps] == addresses


@pytest.mark.parametrize("way", ["in place", "another tensor", "another type", "a number", "data"])
def test_step_continues_from_a_count_changed_by_hand(way):
    ps = params()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps)
    mine = torch.tensor(9.0)
    state = optimizer.state[ps[1]]
    old = state["step"]
    if way == "in place":
        state["step"].fill_(9)
    elif way == "data":
        state["step"].data = mine
    else:
        state["step"] = {"another tensor": mine, "another type": torch.tensor(9), "a number": 9}[way]
    stepped(optimizer, ps, 1)
    assert [int(optimizer.state[p]["step"]) for p in ps] == [4, 10, 4, 4]
    assert optimizer.state[ps[1]]["step"].dtype is torch.float32
    assert mine == (10 if way in ("another tensor", "data") else 9)  # as in torch, a tensor of the user is updated in place
    assert int(old) == {"in place": 10, "data": 10}.get(way, 3)


def test_one_tensor_in_two_states_counts_separately():
    ps = params()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps)
    optimizer.state[ps[0]]["step"] = optimizer.state[ps[1]]["step"]
    give(ps)
    ps[1].grad = None
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in ps] == [4, 3, 4, 4]


def test_subsets_advance_only_their_own_counts():
    ps = params()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps, 1)
    for frozen in range(len(ps)):
        give(ps, frozen)
        ps[frozen].grad = None
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in ps] == [len(ps)] * len(ps)


def test_saved_scalar_has_only_its_own_bytes_and_is_a_copy():
    ps = params()
    optimizer = stepped(torch_api.MaskedAdamW(ps, lr=1e-3), ps)
    file = io.BytesIO()
    torch.save(optimizer.state[ps[0]]["step"], file)
    assert file.tell() < 2000
    saved = copy.deepcopy(optimizer.state_dict())
    others = params()
    resumed = torch_api.MaskedAdamW(others, lr=1e-3)
    resumed.load_state_dict(saved)
    stepped(resumed, others, 2)
    assert [int(x["step"]) for x in saved["state"].values()] == [3] * len(ps)
    assert [int(resumed.state[p]["step"]) for p in others] == [5] * len(ps)


def test_hidden_scalar_state_is_kept():
    """SGD with dampening keeps a flag for its first gradient; torch derives it from the presence of the buffer."""
    ours, theirs = params(), params()
    a = torch_api.MaskedSGD(ours, lr=0.1, momentum=0.9, dampening=0.5)
    b = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, dampening=0.5)
    for seed in range(4):
        give(ours, seed), give(theirs, seed)
        if seed == 2:
            a.load_state_dict(copy.deepcopy(a.state_dict()))
        a.step(), b.step()
    assert set(a.state[ours[0]]) == {"momentum_buffer"}
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("standard_promotion")
def test_scalars_of_each_dtype_have_their_own_vector():
    named = {f"p{i}": p for i, p in enumerate(params())}
    transforms = {"norms": (optax.novograd, {"lr": 1e-3}), "adam": (optax.adam, {"lr": 1e-3})}
    labels = {"p0": "norms", "p1": "norms", "p2": "adam", "p3": "adam"}
    optimizer = torch_api.PartitionedOptimizer(named.items(), transforms, labels)
    stepped(optimizer, list(named.values()))
    (launch,) = optimizer._launch_cache.last_used
    kinds = {tuple({x.dtype for x in cells.tensors}): [float(x) for x in cells.tensors] for cells in launch.arguments.scalars}
    assert kinds.keys() == {(torch.float32,), (torch.int32,)}
    assert kinds[torch.int32,] == [3, 3]
    assert [float(optimizer.state[named[name]]["nu"]) for name in ("p0", "p1")] == kinds[torch.float32,]
    assert min(kinds[torch.float32,]) > 1000  # squared norms


@pytest.mark.usefixtures("standard_promotion")
def test_scalars_of_a_dtype_unknown_to_numpy_are_stacked():
    """The parameters are float32; with half parameters such a scalar would be float32."""
    count = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros((), jnp.bfloat16), params),
        lambda updates, state, params=None: (updates, jax.tree.map(lambda count: count + jnp.ones((), count.dtype), state)),
    )
    ps = params()
    optimizer = stepped(torch_api.OptaxOptimizer(ps, count, lr=1e-3), ps)
    (launch,) = optimizer._launch_cache.last_used
    (cells,) = launch.arguments.scalars
    assert cells.tensors[0].dtype is torch.bfloat16
    assert cells.length == 0
    assert [float(x) for x in cells.tensors] == [3.0] * len(ps)
