"""Ask XLA's CPU compiler for multi-output fusion, several results from one loop, for maskbridge's programs alone.

Without it an update reads its inputs once for each result. The numbers are the same.
"""

from __future__ import annotations

import os

from bridge._compat.jax import by_program, client_started

FUSION_FLAG = "xla_cpu_use_multi_output_fusion"
SWITCH = "MASKBRIDGE_XLA_FLAGS"
_MAP = "xla_backend_extra_options"


def request() -> None:
    """Set the flag for the whole process in XLA_FLAGS, if that is needed.

    Usually each of our programs asks for the fusion, and nothing else that jax compiles changes. The process flag is set if jax lacks the
    private name for that, or with MASKBRIDGE_XLA_FLAGS=1, with which a user's own `jax.jit` is fused as well. XLA reads XLA_FLAGS when jax
    starts its CPU client, so the flag must be set before. A user's own `--xla_backend_extra_options` stays as it is. With
    MASKBRIDGE_XLA_FLAGS=0 there is no fusion.
    """
    switch, flags = os.environ.get(SWITCH), os.environ.get("XLA_FLAGS", "")
    whole = switch == "1" or not by_program()
    if switch != "0" and whole and _MAP not in flags and not client_started():
        os.environ["XLA_FLAGS"] = f"{flags} --{_MAP}={FUSION_FLAG}".strip()


def requested() -> bool:
    """Return whether our programs are compiled with multi-output fusion, by the environment variables."""
    return bool(without_it()) or (os.environ.get(SWITCH) != "0" and by_program())


def without_it() -> dict[str, str | bool]:
    """Return the compiler options that turn off the fusion that the process flag asks for."""
    return {_MAP: ""} if FUSION_FLAG in os.environ.get("XLA_FLAGS", "") else {}
