"""Compiler options for programs whose numbers or bytes are tested but not their speed."""

import jax

from bridge._xla import compile_options

EFFORT = {"xla_backend_optimization_level": 0}  # no LLVM optimizations
_EMITTERS = "xla_cpu_use_fusion_emitters"  # XLA's MLIR emitters for loops, which compile more slowly


def options():
    """Return options that skip LLVM's optimizations, which take most of the compile time on a CPU; XLA's fusions stay the same."""
    if jax.default_backend() != "cpu":
        return {}
    return EFFORT | ({_EMITTERS: False} if compile_options._is_supported(_EMITTERS, False) else {})
