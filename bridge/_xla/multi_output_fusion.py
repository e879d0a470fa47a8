"""Ask XLA's CPU compiler for multi-output fusion, several results from one loop, for maskbridge's programs alone.

Without it an update reads its inputs once for each result. The numbers are the same.
"""

from __future__ import annotations

import os

from bridge._compat.jax import client_started, has_per_program_flag

FUSION_FLAG = "xla_cpu_use_multi_output_fusion"
FUSION_VARIABLE = "MASKBRIDGE_XLA_FLAGS"
_EXTRA_OPTIONS = "xla_backend_extra_options"


def set_process_flag() -> None:
    """Set the flag for the whole process in XLA_FLAGS, if that is needed.

    Usually each of our programs asks for the fusion, and nothing else that jax compiles changes. The process flag is set if jax lacks the
    private name for that, or with MASKBRIDGE_XLA_FLAGS=1, with which a user's own `jax.jit` is fused as well. XLA reads XLA_FLAGS when jax
    starts its CPU client, so the flag must be set before. A user's own `--xla_backend_extra_options` stays as it is. With
    MASKBRIDGE_XLA_FLAGS=0 there is no fusion.
    """
    switch, flags = os.environ.get(FUSION_VARIABLE), os.environ.get("XLA_FLAGS", "")
    for_process = switch == "1" or not has_per_program_flag()
    if switch != "0" and for_process and _EXTRA_OPTIONS not in flags and not client_started():
        os.environ["XLA_FLAGS"] = f"{flags} --{_EXTRA_OPTIONS}={FUSION_FLAG}".strip()


def is_fusion_enabled() -> bool:
    """Return whether our programs are compiled with multi-output fusion, by the environment variables."""
    return bool(disabling_options()) or (os.environ.get(FUSION_VARIABLE) != "0" and has_per_program_flag())


def disabling_options() -> dict[str, str | bool]:
    """Return the compiler options that turn off the fusion that the process flag asks for."""
    return {_EXTRA_OPTIONS: ""} if FUSION_FLAG in os.environ.get("XLA_FLAGS", "") else {}
