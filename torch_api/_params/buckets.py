"""Decide which parameters share a bucket, and give each parameter its buffer.

A bucket is one buffer whose rows are parameters of equal size. A program updates all its rows as one array. The gradients reach the
program in one of three ways: each as an argument, gathered into a second buffer, or read by address where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from bridge._compiler import policy
from bridge._memory import address_space, adoption, jax_buffers
from bridge._process import gc_paused
from bridge._xla import probes

from .record import ParamRecord


class BucketKey(NamedTuple):
    """Parameters with equal keys may be rows of one bucket. addressed: their gradients may be read by address."""

    kind: Hashable
    addressed: bool = False


def is_gathered(leaf: ParamRecord) -> bool:
    """Return whether the parameter's gradient would be gathered if it were in a bucket."""
    return policy.BUCKETING.gathers_row(_param_bytes(leaf), leaf.device.type)


def _param_bytes(leaf: ParamRecord) -> int:
    return leaf.shape.numel() * leaf.dtype.itemsize


def is_addressed(leaf: ParamRecord) -> bool:
    """Return whether the parameter's gradient may be read by address if it is in a bucket."""
    return not leaf.left_bucket and leaf.grad_dtype is leaf.dtype and policy.BUCKETING.may_address_row(_param_bytes(leaf), leaf.device.type)


def is_large_row(leaf: ParamRecord) -> bool:
    """Return whether a parameter is in a bucket only to save arrays: it is large enough for a loop of its own."""
    return not leaf.has_own_buffer and is_addressed(leaf) and not is_gathered(leaf)


def is_padded(leaf: ParamRecord) -> bool:
    """Return whether the parameter is updated faster in a padded row of its own. Its gradient is then copied into a padded row."""
    return address_space.CAN_READ_BY_ADDRESS and leaf.device.type == "cpu" and policy.THREADING.splits_unevenly(leaf.shape.numel())


@gc_paused()
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
        if key is None or at_home or goes_back or adoption.why_not_adoptable(leaf.local_tensor, prefetcher.mappings):
            leaf.adopt(writeback, own_buffer=row is not None and not at_home, prefetcher=prefetcher)
        else:
            leaves_by_key.setdefault(key, []).append(leaf)
    return leaves_by_key


def _fill_buckets(key: BucketKey, leaves: Sequence[ParamRecord]) -> list[tuple[ParamRecord, bool]]:
    """Move parameters with equal keys into buckets, if there are enough of them.

    Returns:
      Each parameter, and whether it gets a buffer of its own instead.
    """
    bucketing, count, row_bytes = policy.BUCKETING, len(leaves), _param_bytes(leaves[0])
    addressed = key.addressed and bucketing.makes_addressed_bucket(count, row_bytes) and probes.fuses_multiple_outputs()
    enough = addressed or bucketing.makes_bucket(count, row_bytes, leaves[0].device.type)
    several = bucketing.addressed_bucket_count(count, row_bytes) if addressed else 1
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
