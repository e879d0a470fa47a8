"""The compiler options of programs whose numbers or bytes are compared, and whose speed is not."""

import jax

from bridge._xla import compile_options

EFFORT = {"xla_backend_optimization_level": 0}  # LLVM optimizes nothing
_EMITTERS = "xla_cpu_use_fusion_emitters"  # XLA's loops from MLIR, which take longer to compile


def options():
    """On a CPU a quarter to a third of the time of compiling: XLA decides before machine code is made which loops it writes."""
    if jax.default_backend() != "cpu":
        return {}
    return EFFORT | ({_EMITTERS: False} if compile_options._known(_EMITTERS, False) else {})
