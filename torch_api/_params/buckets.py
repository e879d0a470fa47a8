"""Decide which parameters share a bucket, and give each parameter its buffer.

A bucket is one buffer whose rows are parameters of equal size. A program updates all its rows as one array. The gradients reach the
program in one of three ways: each as an argument, gathered into a second buffer, or read by address where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from bridge._compiler import chunking
from bridge._memory import address_space, adoption, jax_buffers
from bridge._memory.ownership import mappings_read_once
from bridge._process import gc_paused
from bridge._xla import probes

from .record import ParamRecord

# By device type. Gathering reads and writes a gradient once more, but saves an argument, a loop and a view: worth it for small rows.
MAX_GATHERED_ROW_BYTES = {"cpu": 1 << 17, "cuda": 1 << 20}
# Device types on which larger parameters are in buckets too, each gradient an argument: fewer arrays in a call cost the host of a GPU
# less time, and one kernel for equal parameters is faster than one for each.
GRADS_AS_ARGUMENTS_ON = frozenset({"cuda"})
# Rows on the CPU whose gradients may be read by address. Arguments of larger rows cost little in comparison; gathering rows up to the
# second bound takes no longer than reading them by address.
MAX_ADDRESSED_ROW_BYTES, MIN_ADDRESSED_ROW_BYTES = 1 << 20, 1 << 15
# For rows above that second bound: gathering is faster than reading by address, but needs this much memory.
MAX_GATHERED_BUCKET_BYTES = 1 << 23
# Dtypes of parameters and state whose gradients may be read by address. XLA's CPU compiler computes other dtypes in float32.
ADDRESSED_DTYPES = frozenset({"float32", "float64"})
# The fewest parameters that make a bucket, by how their gradients are passed. Fewer addressed rows are faster as single parameters of a
# larger program; the number depends on the bytes of a row.
MIN_GATHERED_ROWS, MIN_ARGUMENT_ROWS = 4, 2
MIN_ADDRESSED_ROWS, LARGE_ADDRESSED_ROW_BYTES, MIN_LARGE_ADDRESSED_ROWS = 40, 1 << 18, 64
# Moving parameters into or out of a bucket needs its bytes twice for that time.
MAX_ADDRESSED_BUCKET_BYTES = 1 << 26
# The cost of one more parameter's arrays in a step, as the bytes that a core moves in that time.
LEAF_OVERHEAD_BYTES = 1 << 20


class BucketKey(NamedTuple):
    """Parameters with equal keys may be rows of one bucket. addressed: their gradients may be read by address."""

    kind: Hashable
    addressed: bool = False


def is_gathered(leaf: ParamRecord) -> bool:
    """Return whether the parameter's gradient would be gathered if it were in a bucket."""
    return _param_bytes(leaf) <= MAX_GATHERED_ROW_BYTES.get(leaf.device.type, 0)


def _param_bytes(leaf: ParamRecord) -> int:
    return leaf.shape.numel() * leaf.dtype.itemsize


def is_addressed(leaf: ParamRecord) -> bool:
    """Return whether the parameter's gradient may be read by address if it is in a bucket."""
    return (
        address_space.CAN_READ_BY_ADDRESS
        and not leaf.left_bucket
        and leaf.device.type == "cpu"
        and leaf.device.type not in GRADS_AS_ARGUMENTS_ON
        and leaf.grad_dtype is leaf.dtype
        and min(MIN_ADDRESSED_ROW_BYTES, MAX_GATHERED_ROW_BYTES["cpu"]) < _param_bytes(leaf) <= MAX_ADDRESSED_ROW_BYTES
    )


def is_large_row(leaf: ParamRecord) -> bool:
    """Return whether a parameter is in a bucket only to save arrays: it is large enough for a loop of its own."""
    return not leaf.has_own_buffer and is_addressed(leaf) and not is_gathered(leaf)


def is_underused(row_count: int, rows_with_grad: int, row_moved_bytes: int) -> bool:
    """Return whether a bucket costs more than its parameters with a gradient would outside it.

    Args:
      row_count: the number of rows of the bucket. Each step reads and writes all of them.
      rows_with_grad: how many rows have a gradient.
      row_moved_bytes: bytes that the update of one row moves.
    """
    return rows_with_grad * (row_moved_bytes + LEAF_OVERHEAD_BYTES) < row_count * row_moved_bytes


def is_padded(leaf: ParamRecord) -> bool:
    """Return whether the parameter is updated faster in a padded row of its own. Its gradient is then copied into a padded row."""
    return address_space.CAN_READ_BY_ADDRESS and leaf.device.type == "cpu" and chunking.splits_unevenly(leaf.shape.numel())


@gc_paused()
@mappings_read_once()
def assign_buffers(leaves: Sequence[ParamRecord], key_of: Callable[[ParamRecord], BucketKey | None], writeback: str) -> None:
    """Give each parameter its buffer: a row of a bucket for parameters with equal keys, a buffer of its own for others.

    A parameter that is already in a jax-owned buffer stays there. In a bucket it stays only if all parameters of the bucket have one key:
    else two programs would donate the same buffer.

    Args:
      key_of: the bucket key of a parameter; None for one outside buckets.
      writeback: the optimizer's option. With "copy" nothing is moved.
    """
    if writeback == "inplace":
        adoption.delete_imports(leaf.local_tensor for leaf in leaves)
    prefetcher = adoption.CopyPrefetcher(2 * max(map(_param_bytes, leaves), default=0))
    keys = _bucket_keys(leaves, key_of if writeback == "inplace" else lambda _: None, writeback, prefetcher)
    leaves_by_key = _adopt_outside_buckets(leaves, keys, writeback, prefetcher)
    to_adopt = [pair for key, bucket_leaves in leaves_by_key.items() for pair in _fill_buckets(key, bucket_leaves)]
    for leaf, alone in to_adopt:
        if alone:
            prefetcher.prefetch(leaf.local_tensor)
    for leaf, alone in to_adopt:
        leaf.adopt(writeback, own_buffer=alone, prefetcher=prefetcher)


def _bucket_keys(
    leaves: Sequence[ParamRecord],
    key_of: Callable[[ParamRecord], BucketKey | None],
    writeback: str,
    prefetcher: adoption.CopyPrefetcher,
) -> dict[ParamRecord, BucketKey | None]:
    """Return the bucket key of each parameter. The copies of large parameters outside buckets begin meanwhile."""
    keys: dict[ParamRecord, BucketKey | None] = {}
    for leaf in sorted(leaves, key=_param_bytes, reverse=True):  # the largest are rarely in buckets
        leaf.refresh_metadata()
        keys[leaf] = key_of(leaf)
        if keys[leaf] is None and writeback == "inplace" and leaf.dtensor_layout is None and leaf.bucket_row is None:
            prefetcher.prefetch(leaf.local_tensor)
    return keys


def _adopt_outside_buckets(
    leaves: Sequence[ParamRecord], keys: Mapping[ParamRecord, BucketKey | None], writeback: str, prefetcher: adoption.CopyPrefetcher
) -> dict[BucketKey, list[ParamRecord]]:
    """Adopt the parameters that stay where they are or belong in no bucket. Return the others by their key."""
    located = [(leaf, *jax_buffers.find_buffer(leaf.local_tensor)) for leaf in leaves]
    keys_in_bucket: dict[jax_buffers.JaxBuffer, set[BucketKey | None]] = {}
    for leaf, buffer, row in located:
        if row is not None and buffer is not None:
            keys_in_bucket.setdefault(buffer, set()).add(keys[leaf])
    leaves_by_key: dict[BucketKey, list[ParamRecord]] = {}
    for leaf, buffer, row in located:
        key = keys[leaf]
        at_home = buffer is not None and (row is None or (key is not None and len(keys_in_bucket[buffer]) == 1))
        goes_back = (
            leaf.jax_buffer is not None
            and leaf.bucket_row is not None
            and adoption.fits_row(leaf.local_tensor, leaf.jax_buffer, leaf.bucket_row)
        )
        if key is None or at_home or goes_back or adoption.why_not_adoptable(leaf.local_tensor):
            leaf.adopt(writeback, own_buffer=row is not None and not at_home, prefetcher=prefetcher)
        else:
            leaves_by_key.setdefault(key, []).append(leaf)
    return leaves_by_key


def _fill_buckets(key: BucketKey, leaves: Sequence[ParamRecord]) -> list[tuple[ParamRecord, bool]]:
    """Move parameters with equal keys into buckets, if there are enough of them.

    Returns:
      Each parameter, and whether it gets a buffer of its own instead.
    """
    gathered, size = is_gathered(leaves[0]), _param_bytes(leaves[0])
    many = len(leaves) >= (MIN_ADDRESSED_ROWS if size <= LARGE_ADDRESSED_ROW_BYTES else MIN_LARGE_ADDRESSED_ROWS)
    addressed = key.addressed and many and probes.fuses_multiple_outputs()
    enough = addressed or (
        len(leaves) >= (MIN_GATHERED_ROWS if gathered else MIN_ARGUMENT_ROWS)
        and (gathered or leaves[0].device.type in GRADS_AS_ARGUMENTS_ON)
    )
    several = -(-size * len(leaves) // MAX_ADDRESSED_BUCKET_BYTES) if addressed else 1
    # Spread neighbors over the buckets. Then each bucket has some gradients, and programs do not differ in how many they update.
    # Few buckets at a time, because the bytes that are moved exist twice.
    groups = [[leaf.local_tensor for leaf in leaves[nth::several]] for nth in range(several)]
    groups = groups if enough else [[leaf.local_tensor] for leaf in leaves if is_padded(leaf)]
    batch_size = max(2, len(groups) // 8)
    for start in range(0, len(groups), batch_size):
        adoption.adopt_into_bucket(groups[start : start + batch_size])
    return [(leaf, not enough and not is_padded(leaf)) for leaf in leaves]


def foreign_memory_params(leaves: Iterable[ParamRecord]) -> list[str]:
    """Return the names of parameters that each step copies because their memory is not from torch's allocator and may have other users."""
    return [
        leaf.name
        for leaf in leaves
        if leaf.copy_reason in (adoption.FOREIGN, adoption.SHARED)
        and leaf.jax_buffer is None
        and not leaf.local_tensor.untyped_storage().resizable()
    ]
