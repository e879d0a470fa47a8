"""Whose memory a parameter lives in, for how long, and what happens when it may not move."""

import copy
import gc
import io
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

import torch_api
from bridge import storage

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
LAYOUTS = {
    "0-d": lambda: torch.randn(()),
    "vector": lambda: torch.randn(5),
    "matrix": lambda: torch.randn(6, 7),
    "transposed": lambda: torch.randn(6, 7).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last of one channel": lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "size-1 dimensions": lambda: torch.randn(1, 4, 1),
}


def own(tensor):
    """A parameter that is the only holder of its storage, strides kept."""
    return torch.nn.Parameter(tensor.clone(memory_format=torch.preserve_format))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_placed_parameter_keeps_values_strides_and_identity_and_lies_in_jax_memory(layout, dtype):
    param = own(layout().to(dtype))
    before, strides = param.detach().clone(), param.stride()
    placement = storage.place(param)
    assert placement.writeback == "inplace"
    assert param.data_ptr() == placement.memory.array.unsafe_buffer_pointer()
    assert param.stride() == strides
    assert param.is_leaf
    assert param.requires_grad
    assert torch.equal(param, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_donated_call_writes_where_the_parameter_looks(dtype):
    param = own(torch.ones(4, 6).to(dtype).t())
    memory = storage.place(param).memory
    with storage.x64():
        result = jax.jit(lambda x: x + x, donate_argnums=0)(memory.array).block_until_ready()
    address = param.data_ptr()
    storage.settle([memory], [result])
    assert param.data_ptr() == address == memory.array.unsafe_buffer_pointer()
    assert torch.equal(param.detach(), torch.full((6, 4), 2.0, dtype=dtype))


def test_placing_twice_moves_once():
    param = own(torch.randn(8))
    first = storage.place(param).memory
    assert storage.place(param).memory is first
    assert storage.place(param, "copy").memory is None


def test_a_result_at_another_address_is_refused():
    param = own(torch.randn(8))
    memory = storage.place(param).memory
    with pytest.raises(RuntimeError, match=r"came back at another address.*writeback='copy'"):
        storage.settle([memory], [jnp.zeros(8)])


def test_a_parameter_outlives_optimizer_and_memory_object():
    param = own(torch.full((1 << 14,), 3.0))
    optimizer = torch_api.MaskedAdamW([param], lr=0.0, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    memory = weakref.ref(storage.memory_of(param.detach()))
    del optimizer
    gc.collect()
    assert memory() is not None
    [torch.full((1 << 14,), 9.0) for _ in range(8)]
    assert bool((param == 3.0).all())
    param.data = torch.zeros(2)
    gc.collect()
    assert memory() is None


def test_state_outlives_the_optimizer():
    param = own(torch.randn(64))
    optimizer = torch_api.MaskedAdam([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    moment = optimizer.state[param]["exp_avg"]
    expected = moment.clone()
    del optimizer
    gc.collect()
    torch.randn(64)
    assert torch.equal(moment, expected)


def test_deleting_parameter_and_optimizer_frees_the_buffers():
    param = own(torch.randn(1000))
    optimizer = torch_api.MaskedAdam([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    memories = [weakref.ref(storage.memory_of(t)) for t in (param.detach(), *optimizer.state[param].values())]
    del optimizer, param
    gc.collect()
    assert [memory() for memory in memories] == [None] * 4


def flat_buffer_views():
    flat = torch.randn(128)
    return torch.nn.Parameter(flat[:64]), flat


def held_elsewhere():
    tensor = torch.randn(64)
    return torch.nn.Parameter(tensor), tensor


def shared():
    param = torch.nn.Parameter(torch.randn(64))
    param.data.share_memory_()
    return param, param.data


NOT_ALONE = {
    "a view into a flat buffer": (flat_buffer_views, "a view into a larger storage"),
    "another tensor over it": (held_elsewhere, "another tensor shares its storage"),
    "shared memory": (shared, "in shared memory"),
}


@pytest.mark.parametrize(("make", "why"), NOT_ALONE.values(), ids=NOT_ALONE.keys())
def test_a_parameter_that_shares_its_storage_is_updated_where_it_is(make, why):
    param, other = make()
    address, start = param.data_ptr(), param.detach().clone()
    optimizer = torch_api.MaskedSGD([param], lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param.data_ptr() == address == other.data_ptr()
    assert torch.allclose(param.detach(), start - 0.5)
    assert torch.equal(other[:64], param.detach())
    assert optimizer.report().rows[0]["write-back"] == f"copy: {why}"


def test_a_strided_parameter_is_updated_where_it_is():
    base = torch.zeros(8, 8)
    param = torch.nn.Parameter(base[:, ::2])
    optimizer = torch_api.MaskedSGD([param], lr=1.0)
    param.grad = torch.ones(8, 4)
    optimizer.step()
    assert bool((base[:, ::2] == -1).all())
    assert bool((base[:, 1::2] == 0).all())


def test_an_empty_parameter_takes_steps():
    param = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer = torch_api.MaskedAdam([param])
    for _ in range(2):
        param.grad = torch.zeros(0, 3)
        optimizer.step()
    assert optimizer.state[param]["exp_avg"].shape == (0, 3)
    assert float(optimizer.state[param]["step"]) == 2.0


@pytest.mark.parametrize("writeback", ["inplace", "copy"])
def test_both_ways_of_writing_back_give_the_same_bits(writeback):
    shapes = [(9, 5), (5,), (), (2, 3, 3, 3)]
    start = [torch.randn(shape) for shape in shapes]
    results = []
    for way in ("inplace", writeback):
        params = [own(t) for t in start]
        addresses = [p.data_ptr() for p in params]
        optimizer = torch_api.MaskedAdamW(params, lr=0.1, writeback=way)
        for step in range(5):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            optimizer.step()
        assert way == "inplace" or addresses == [p.data_ptr() for p in params]
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_replaced_data_is_adopted_again():
    param = own(torch.zeros(64))
    optimizer = torch_api.MaskedSGD([param], lr=1.0, momentum=0.5)
    param.grad = torch.ones(64)
    optimizer.step()
    param.data = torch.full((64,), 10.0)
    optimizer.step()
    address = param.data_ptr()
    assert bool((param == 8.5).all())  # the momentum of before went on: 10 - (0.5 * 1 + 1)
    optimizer.step()
    assert param.data_ptr() == address


def test_data_replaced_by_another_dtype_goes_on_with_its_moments():
    param = own(torch.zeros(64))
    optimizer = torch_api.MaskedSGD([param], lr=1.0, momentum=0.5)
    param.grad = torch.ones(64)
    optimizer.step()
    param.data = torch.full((64,), 10.0, dtype=torch.bfloat16)
    param.grad = torch.ones(64, dtype=torch.bfloat16)
    optimizer.step()
    assert param.dtype is torch.bfloat16
    assert bool((param == 8.5).all())


def test_two_optimizers_share_one_memory_of_a_parameter():
    param = own(torch.zeros(64))
    optimizers = [torch_api.MaskedSGD([param], lr=1.0), torch_api.MaskedSGD([param], lr=10.0)]
    address = param.data_ptr()
    for optimizer in optimizers * 2:
        param.grad = torch.ones(64)
        optimizer.step()
    assert param.data_ptr() == address
    assert bool((param == -22).all())


def test_module_saves_copies_and_loads_as_before():
    model = torch.nn.Linear(5, 3)
    optimizer = torch_api.MaskedAdamW(model.parameters(), lr=0.1)
    addresses = [p.data_ptr() for p in model.parameters()]
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    twin = copy.deepcopy(model)
    optimizer.step()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded["weight"], twin.weight)
    assert not torch.equal(model.weight, twin.weight)
    model.load_state_dict(loaded)
    assert torch.equal(model.weight, twin.weight)
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_a_graph_built_before_the_optimizer_still_runs_backward():
    model = torch.nn.Linear(4, 4)
    loss = model(torch.ones(2, 4)).square().sum()
    torch_api.MaskedAdamW(model.parameters())
    loss.backward()
    expected = torch.autograd.grad(model(torch.ones(2, 4)).square().sum(), model.weight)[0]
    assert torch.allclose(model.weight.grad, expected)


def test_a_step_between_forward_and_backward_raises_torchs_usual_error():
    model = torch.nn.Linear(4, 4)
    optimizer = torch_api.MaskedSGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
