"""What is asked of XLA before jax starts."""

from __future__ import annotations

import os

FUSION_FLAG = "xla_cpu_use_multi_output_fusion"


def request_fusion() -> bool:
    """Ask XLA's CPU compiler to write several results from one loop; True if the request can still be heard.

    XLA reads the environment when jax starts its CPU client, so this acts only before that, only where the user has
    set no `--xla_backend_extra_options` of their own, and not with MASKBRIDGE_XLA_FLAGS=0. Without it every update is
    as correct, and Adam moves 40 bytes a parameter instead of 28.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("MASKBRIDGE_XLA_FLAGS") == "0" or "xla_backend_extra_options" in flags or client_started():
        return FUSION_FLAG in flags
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_extra_options={FUSION_FLAG}".strip()
    return True


def client_started() -> bool:
    """Whether jax has a client; a jax that no longer tells is taken to have none, and the flag then does nothing."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()
