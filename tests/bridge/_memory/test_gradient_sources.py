"""Gradients as arguments of a program: viewed, gathered, addressed; the storages are checked, and held until the caller lets go."""

import numpy as np
import pytest
import torch
from packing import misaligned

from bridge._memory import address_space
from bridge._memory.gradient_sources import AddressedGradients, GatheredGradients, GradientArguments, ViewedGradient

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
needs_addresses = pytest.mark.skipif(not address_space.CAN_READ_BY_ADDRESS, reason="only for Linux on x86-64")


def arguments(sources, grads, held=None):
    source = GradientArguments(sources, CPU)
    available = source.gather(grads) if source.buffers else grads
    return source.as_arguments([available[i] for i in source.positions], [] if held is None else held)


def viewed(position, grad, order=None):
    return ViewedGradient(position, grad.shape, grad.dtype, order)


def gathered(positions, grads, joined):
    buffer = torch.zeros(len(positions), grads[0].numel())
    rows = [buffer[i].view(grads[0].shape) for i in range(len(positions))]
    return GatheredGradients(positions, buffer, rows, buffer.view(-1, *grads[0].shape[1:]) if joined else None)


@pytest.mark.parametrize("joined", [True, False], ids=["by cat", "by copies"])
def test_viewed_and_gathered_gradients_keep_the_order_of_the_sources(joined):
    grads = [torch.randn(3, 4) for _ in range(4)]
    sources = [viewed(2, grads[2]), gathered((3, 0), grads, joined), viewed(1, grads[1])]
    first, rows, last = arguments(sources, grads)
    np.testing.assert_array_equal(first, grads[2].reshape(-1))
    np.testing.assert_array_equal(rows, torch.stack([grads[3], grads[0]]).reshape(-1))
    np.testing.assert_array_equal(last, grads[1].reshape(-1))


def test_viewed_gradient_is_not_copied_and_its_dimensions_are_ordered():
    plain, last = torch.randn(6, 5), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    views = arguments([viewed(0, plain), viewed(1, last, (0, 2, 3, 1))], [plain, last])
    assert [x.ctypes.data for x in views] == [plain.data_ptr(), last.data_ptr()]
    np.testing.assert_array_equal(views[1], last.permute(0, 2, 3, 1).reshape(-1))


def test_part_of_a_flat_buffer_is_viewed():
    flat = torch.randn(32)
    part = flat[8:24].view(4, 4)
    (view,) = arguments([viewed(0, part)], [part])
    assert view.ctypes.data == part.data_ptr()


def addressed(grads, positions):
    rows = address_space.RowAddresses(len(positions), list(range(len(positions))), torch.float32, [None] * len(positions), 2)
    return AddressedGradients(positions, rows)


@needs_addresses
@pytest.mark.parametrize("change", [lambda g: g, lambda g: torch._neg_view(-g), lambda g: g.t().contiguous().t(), misaligned])
def test_addressed_gradients_begin_where_the_arguments_say(change):
    grads, held = [change(torch.randn(4, 4)) for _ in range(3)], []
    memory, starts = arguments([addressed(grads, (2, 0))], grads, held)
    for grad, start in zip((grads[2], grads[0]), starts, strict=False):
        np.testing.assert_array_equal(memory[int(start) : int(start) + 16], grad.resolve_neg().reshape(-1))
    assert starts[2:].tolist() == [0, 0]


kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda grads: [viewed(0, grads[0])], id="viewed"),
        pytest.param(lambda grads: [addressed(grads, (0,))], id="addressed", marks=needs_addresses),
    ],
)


@kinds
@pytest.mark.parametrize("size", [0, 60])
def test_gradient_whose_storage_was_freed_or_shrunk_is_not_read(kind, size):
    grads = [torch.randn(4, 4)]
    source = kind(grads)
    grads[0].untyped_storage().resize_(size)
    with pytest.raises(ValueError, match=r"expected a tensor with elements that can be read: its memory (was freed|is too small)"):
        arguments(source, grads)


@kinds
def test_storages_are_held_by_the_caller_and_by_nobody_else(kind):
    grads, held = [torch.randn(4, 4)], []
    arguments(kind(grads), grads, held)
    address = grads[0].data_ptr()
    (storage,), alone = held, torch.zeros(3).untyped_storage()
    assert storage.data_ptr() == address
    assert holders(storage) > holders(alone)
    grads[0].data = torch.zeros(1)  # as another thread might do while the program runs
    assert holders(storage) == holders(alone)


def holders(storage):
    return torch._C._storage_Use_Count(storage._cdata)


def test_gradient_without_memory_is_copied():
    zeros = torch._efficientzerotensor((4, 4))
    (view,) = arguments([viewed(0, zeros)], [zeros])
    assert not view.any()
