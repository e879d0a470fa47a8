"""Thresholds that decide how an update is divided and where its gradients are read. They change speed, not results.

Each policy is a frozen dataclass with a field for each threshold, and has one instance that all code reads: `BUCKETING`, `CHUNKING`,
`THREADING` and `STREAMING`. Code reads these names from this module at each decision, so that a test can replace an instance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bridge._memory.address_space import CAN_READ_BY_ADDRESS
from bridge._process import CORES


def _single_core_elements(cores: int) -> int:
    """Return up to how many elements one core is faster: waking the other threads takes longer than their share of the work."""
    return (1 << 17) * cores // max(cores - 1, 1)


@dataclass(frozen=True)
class BucketingPolicy:
    """Which parameters share a bucket, when a row leaves it, and whether its gradients are gathered, arguments or addressed.

    max_gathered_row_bytes: rows up to this size on a CPU are gathered. Gathering reads and writes a gradient once more, but saves an
      argument, a loop and a view, which is worth it for small rows.
    max_gathered_row_bytes_on_gpu: the same on a GPU, where each argument costs the host more.
    grads_as_arguments_on: device types on which larger parameters are in buckets too, each gradient an argument: fewer arrays in a call
      cost the host of a GPU less time, and one kernel for equal parameters is faster than one for each.
    min_addressed_row_bytes, max_addressed_row_bytes: between these sizes, gradients of rows on a CPU may be read by address. Gathering
      smaller rows takes no longer; arguments of larger rows cost little in comparison.
    max_gathered_bucket_bytes: up to this size, a bucket with rows small enough is gathered and not read by address. Gathering is faster
      for rows above `min_addressed_row_bytes`, but needs this much memory.
    max_gathered_elements: up to so many trained elements in total, no gradient is read by address, because gathering costs less than
      a call of one more program.
    addressed_dtypes: dtypes of parameters and state whose gradients may be read by address. XLA's CPU compiler computes other dtypes
      in float32.
    min_gathered_rows: the fewest parameters that make a bucket whose gradients are gathered.
    min_argument_rows: the fewest parameters that make a bucket whose gradients are arguments.
    min_addressed_rows: the fewest parameters that make a bucket whose gradients are read by address. Fewer rows are faster as single
      parameters of a larger program.
    large_addressed_row_bytes, min_large_addressed_rows: the same for rows above this size.
    max_addressed_bucket_bytes: the largest bucket whose gradients are read by address. Moving parameters into or out of a bucket needs
      its bytes twice for that time.
    leaf_overhead_bytes: the cost of one more parameter's arrays in a step, as the bytes that a core moves in that time.
    """

    max_gathered_row_bytes: int = 1 << 17
    max_gathered_row_bytes_on_gpu: int = 1 << 20
    grads_as_arguments_on: frozenset[str] = frozenset({"cuda"})
    min_addressed_row_bytes: int = 1 << 15
    max_addressed_row_bytes: int = 1 << 20
    max_gathered_bucket_bytes: int = 1 << 23
    max_gathered_elements: int = _single_core_elements(CORES)
    addressed_dtypes: frozenset[str] = frozenset({"float32", "float64"})
    min_gathered_rows: int = 4
    min_argument_rows: int = 2
    min_addressed_rows: int = 40
    large_addressed_row_bytes: int = 1 << 18
    min_large_addressed_rows: int = 64
    max_addressed_bucket_bytes: int = 1 << 26
    leaf_overhead_bytes: int = 1 << 20

    def gathers_row(self, row_bytes: int, device_type: str) -> bool:
        """Return whether rows of this size are small enough to gather their gradients."""
        return row_bytes <= {"cpu": self.max_gathered_row_bytes, "cuda": self.max_gathered_row_bytes_on_gpu}.get(device_type, 0)

    def may_address_row(self, row_bytes: int, device_type: str) -> bool:
        """Return whether the gradients of rows of this size may be read by address."""
        return (
            CAN_READ_BY_ADDRESS
            and device_type == "cpu"
            and device_type not in self.grads_as_arguments_on
            and min(self.min_addressed_row_bytes, self.max_gathered_row_bytes) < row_bytes <= self.max_addressed_row_bytes
        )

    def makes_addressed_bucket(self, row_count: int, row_bytes: int) -> bool:
        """Return whether so many rows whose gradients may be read by address are enough for a bucket."""
        return row_count >= (self.min_addressed_rows if row_bytes <= self.large_addressed_row_bytes else self.min_large_addressed_rows)

    def makes_bucket(self, row_count: int, row_bytes: int, device_type: str) -> bool:
        """Return whether so many rows are enough for a bucket whose gradients are gathered or arguments."""
        if self.gathers_row(row_bytes, device_type):
            return row_count >= self.min_gathered_rows
        return device_type in self.grads_as_arguments_on and row_count >= self.min_argument_rows

    def addressed_bucket_count(self, row_count: int, row_bytes: int) -> int:
        """Return into how many buckets the rows are divided, if their gradients are read by address."""
        return -(-row_bytes * row_count // self.max_addressed_bucket_bytes)

    def is_underused(self, row_count: int, rows_with_grad: int, row_moved_bytes: int) -> bool:
        """Return whether a bucket costs more than its parameters with a gradient would outside it.

        Args:
          row_count: the number of rows of the bucket. Each step reads and writes all of them.
          rows_with_grad: how many rows have a gradient.
          row_moved_bytes: bytes that the update of one row moves.
        """
        return rows_with_grad * (row_moved_bytes + self.leaf_overhead_bytes) < row_count * row_moved_bytes


@dataclass(frozen=True)
class ChunkingPolicy:
    """How the leaves of an update are divided over executables. A leaf is a parameter, or a bucket.

    max_shared_loops: loops (one for each leaf) up to which all leaves are one program, whose loops overlap. With more, equal leaves get
      programs of their own, which compile faster and serve several sets of gradients.
    max_equal_leaves: the most equal leaves in one program.
    """

    max_shared_loops: int = 64
    max_equal_leaves: int = 24

    @property
    def chunk_sizes(self) -> list[int]:
        """The sizes of chunks in descending order: few sizes that serve any number of equal leaves, the last of them 1."""
        return list(dict.fromkeys((self.max_equal_leaves, math.isqrt(self.max_equal_leaves), 1)))

    def min_equal_leaves(self, loops: int) -> float:
        """Return how many equal leaves are worth programs of their own in an update with this many loops."""
        return math.inf if loops <= self.max_shared_loops else math.isqrt(self.max_equal_leaves)


@dataclass(frozen=True)
class ThreadingPolicy:
    """How the loops of one executable are divided over the cores.

    cores: the cores that this process may use.
    single_core_elements, single_core_operations: a program with at most so many elements and operations runs on one core, because waking
      the other threads takes longer than their share of the work.
    many_loops_per_core: with this many loops for each core, XLA's threads share them while the calling thread does other work. Inline
      execution would add the calling thread, which is one too many.
    short_loop_elements: if many loops have at most so many elements on average, and none has half of all elements, each loop runs on one
      core and several run at once: no loop waits for its other half.
    long_loop_elements: if loops have more elements on average, the schedule of small loops makes no difference.
    max_unordered_elements: the most elements that XLA may store between loops for its own schedule of loops: a fraction of the size at
      which the C library returns memory to the system. XLA stores one more array for each loop if it cannot write several results from
      one loop.
    min_large_elements: elements from which the loops of an array matter. A smaller array is in the cache of one core.
    """

    cores: int = CORES
    single_core_elements: int = _single_core_elements(CORES)
    single_core_operations: int = 40 * _single_core_elements(CORES)
    many_loops_per_core: float = 16
    short_loop_elements: int = 1 << 17
    long_loop_elements: int = 1 << 20
    max_unordered_elements: float = 1 << 20
    min_large_elements: int = 1 << 14

    def has_many_loops(self, loops: int) -> bool:
        """Return whether a program with so many loops has enough for every core."""
        return loops >= self.many_loops_per_core * self.cores

    def has_short_loops(self, sizes: list[int]) -> bool:
        """Return whether a program has many loops, and each runs best on one core. `sizes`: the elements of each loop."""
        elements = sum(sizes)
        return self.has_many_loops(len(sizes)) and elements <= len(sizes) * self.short_loop_elements and max(sizes) * self.cores <= elements

    def may_reorder_loops(self, sizes: list[int]) -> bool:
        """Return whether the schedule of a program's loops matters. `sizes`: the elements of each loop."""
        return len(sizes) > self.many_loops_per_core and sum(sizes) <= len(sizes) * self.long_loop_elements

    def splits_unevenly(self, size: int) -> bool:
        """Return whether XLA splits a loop over this many elements unevenly, which makes the loop slow.

        jaxlib 0.10.2 splits a loop into two parts for two to four cores. If the second part is shorter, the loop checks its bound at each
        element, and LLVM does not vectorize it. XLA does not do this with three parts or more.
        """
        return 2 <= self.cores <= 4 and size % 2 == 1 and size >= self.min_large_elements


@dataclass(frozen=True)
class StreamingPolicy:
    """Which gradients are read for their norm and finite check before the update, and how.

    min_elements: the fewest elements, in total and for each core. With fewer, the calls cost more than they save.
    chunk_elements: the elements of one chunk of a gradient.
    concurrent_chunks: the chunks that one loop iteration reads. Several chunks at once keep more reads of memory in flight than one.
    dtypes: the dtypes of gradients that can be read.
    """

    min_elements: int = 1 << 20
    chunk_elements: int = 1 << 13
    concurrent_chunks: int = 8
    dtypes: frozenset[str] = frozenset({"float32", "float64"})

    def can_stream(self, dtype: str, size: int) -> bool:
        """Return whether the streaming statistics can read a gradient of this dtype and size."""
        return dtype in self.dtypes and size >= self.chunk_elements

    def is_worth_streaming(self, elements: int) -> bool:
        """Return whether the streaming statistics are worth their calls for gradients with this many elements in total."""
        return CAN_READ_BY_ADDRESS and elements >= self.min_elements


BUCKETING = BucketingPolicy()
CHUNKING = ChunkingPolicy()
THREADING = ThreadingPolicy()
STREAMING = StreamingPolicy()
