"""Where torch.compile breaks its graph: dynamo cannot follow addresses and jax, and fails half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(function: _Function) -> _Function:
    """A function at which torch.compile breaks its graph, and which then runs as it is.

    torch's own decorator waits for the first call; the public one would import dynamo here, which takes as long as
    torch itself.
    """
    disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return disable(function)
