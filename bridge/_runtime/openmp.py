"""Pause torch's OpenMP threads, which wait for their next operation by spinning, on cores that an XLA program needs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

PAUSE_SOFT = 1  # omp_pause_soft, https://www.openmp.org/spec-html/5.0/openmpsu157.html
# The least elements that a program updates for each torch thread: below, restarting the threads costs more than their spinning.
MIN_ELEMENTS_PER_THREAD = 1 << 17


def _find_pause_function() -> Callable[[int], int] | None:
    """Find `omp_pause_resource_all` (OpenMP 5.0) in the runtime that torch is linked to. Return None with MASKBRIDGE_OPENMP=0."""
    if os.environ.get("MASKBRIDGE_OPENMP") == "0" or "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        try:
            pause = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).omp_pause_resource_all
        except (OSError, AttributeError):
            continue
        pause.argtypes, pause.restype = (ctypes.c_int,), ctypes.c_int
        return pause
    return None


# Ends the threads that torch's last operation on this thread has left. torch starts them again with its next parallel operation. Threads
# of operations on other Python threads stay. None where the runtime has no such function.
pause = _find_pause_function()
