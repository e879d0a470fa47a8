"""The compiler options of updates and of whole training steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import jax
import numpy as np

from bridge._compat.types import Device
from bridge._ir.queries import Properties

from .compile import CompilerOptions

# XLA's names for the order in which its CPU compiler puts what a program does; one that knows the first does nothing for the second.
_ORDERS = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"), ("xla_cpu_enable_concurrency_optimized_scheduler", False)


# How many bits of a vector LLVM is to use. XLA's own choice is 256; a CPU that has no more of them is not changed by this.
_WIDTH = "xla_cpu_prefer_vector_width", 512


def of_update(device: Device) -> CompilerOptions:
    """The compiler options of an update: on a CPU, the widest vectors, and the order that needs the least memory for what is between.

    XLA's own order begins all leaves before it ends one, so that all of what is between is there at once. Above 32 MiB the C
    library gives such memory back after each call, and each page of it costs a fault in the next: LAMB on ResNet-50 had 22,000
    of them, which took half of its time. A user who sets an order, or a width, in XLA_FLAGS keeps it.

    Where memory is fast an update waits for its arithmetic too, some 45 operations of an AdamW for each element: with vectors twice as wide
    GPT-2 small took 0.97 times as long where torch fused needed 34 ms, 0.99 times where it needed 53.
    """
    if device.platform != "cpu":
        return {}
    set_by_user = os.environ.get("XLA_FLAGS", "")
    orders = () if any(option in set_by_user for option, _ in _ORDERS) else _ORDERS
    widths = () if _WIDTH[0] in set_by_user else (_WIDTH,)
    return dict(known for options in (orders, widths) for known in _first_known(options))


def _first_known(options: Sequence[tuple[str, str | bool | int]]) -> list[tuple[str, str | bool | int]]:
    """The first of some compiler options that this jaxlib takes, if any."""
    return next(([(option, value)] for option, value in options if _known(option, value)), [])


# XLA's own name for what its CPU compiler hands to the YNN library, and of that all but convolutions.
LIBRARY_OPTION = "xla_cpu_experimental_ynn_fusion_type"
_NO_CONVOLUTIONS, _SUMS_ALONE = "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", "LIBRARY_FUSION_TYPE_REDUCE"

# What XLA's compilers are to leave out, and its names for the passes that take barriers out, that write a small loop as one function, and
# that divide loops among cores; a name that it has not does nothing.
_PASSES_OPTION, _BARRIERS_END, _LOOPS_AS_ONE = "xla_disable_hlo_passes", "cse_barrier_expander", "small-while-loop-hoisting"
_LOOPS_DIVIDED = "cpu-parallel-task-assigner"


def of_training(device: Device, properties: Properties) -> CompilerOptions:
    """The compiler options of a whole training step: on a CPU, barriers stay, and convolutions run on all cores.

    XLA's CPU compiler takes barriers out before it fuses, unless that pass is left out: `bridge._tracing.materialize` and
    `bridge._compiler.passes.loop_order` say what they are for. Where some are in loops, loops over a few numbers stay loops as well: jaxlib
    0.10.2 would write them as one function, in which it knows no barrier and ends the process (shape.h:843, "Check failed"), or refuses
    ("Unhandled opcode"). Where some are in what a reduction does with two numbers, none stays: it would end the process too
    (computation_partitioner.cc:269).

    jaxlib 0.10.2 gives them to a library that runs those of a small network on one core, where XLA's own use all: 9 ms
    instead of 6.5 for the digits job of benchmarks/ on 2 cores. A jaxlib without the option, a user who sets it in
    XLA_FLAGS, and a program with convolutions of several groups (the library takes half the time) keep what they have.

    Matrix products are the library's as well, unless all are small: then XLA's own take less, and of larger ones up to twice as long.
    """
    if device.platform != "cpu":
        return {}
    library = _NO_CONVOLUTIONS if properties.has_large_product else _SUMS_ALONE
    return of_barriers(properties) | ({} if properties.has_grouped_convolution else _unless_set(LIBRARY_OPTION, library))


def of_barriers(properties: Properties) -> CompilerOptions:
    """The compiler options with which the barriers of a program on a CPU stay, where they can."""
    left_out = f"{_BARRIERS_END},{_LOOPS_AS_ONE}" if properties.has_barrier_in_loop else _BARRIERS_END
    return {} if properties.has_barrier_in_reduction else _unless_set(_PASSES_OPTION, left_out)


def on_one_core(options: CompilerOptions) -> CompilerOptions:
    """Compiler options of a program for a CPU, and that none of its loops is divided among cores."""
    if _PASSES_OPTION in os.environ.get("XLA_FLAGS", ""):
        return options
    left_out = ",".join(filter(None, (options.get(_PASSES_OPTION), _LOOPS_DIVIDED)))
    return options | _unless_set(_PASSES_OPTION, left_out)


def in_any_order(options: CompilerOptions) -> CompilerOptions:
    """Compiler options of an update of some loops that stores next to nothing between them, whose order XLA may choose.

    Its own begins with all that is computed of numbers and with small packs; that which needs the least memory ends with those. ResNet-50
    takes 0.98 to 1.0 times as long in XLA's.
    """
    return {option: value for option, value in options.items() if option not in dict(_ORDERS)}


def _unless_set(option: str, value: str | bool | int) -> CompilerOptions:
    """A compiler option that this jaxlib takes, unless the user has set it in XLA_FLAGS."""
    return {} if option in os.environ.get("XLA_FLAGS", "") or not _known(option, value) else {option: value}


@functools.cache
def _known(option: str, value: str | bool | int) -> bool:
    """Whether this jaxlib takes a compiler option; asked once, of a program of one operation."""
    try:
        options: CompilerOptions = {option: value}
        _nothing().compile(compiler_options=options)
    except RuntimeError:
        return False
    return True


@functools.cache
def _nothing() -> jax.stages.Lowered:
    return jax.jit(lambda x: x).lower(np.float32(0))  # the same program whatever types the thread has that asks first
