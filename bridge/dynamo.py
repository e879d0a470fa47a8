"""Where torch.compile breaks its graph: dynamo cannot follow addresses and jax, and fails half-way."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ._compat.torch import DYNAMO, disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(function: _Function) -> _Function:
    """A function at which torch.compile breaks its graph, and which then runs as it is.

    torch's own decorator waits for the first call; the public one would import dynamo here, which takes as long as
    torch itself.
    """
    return disable_dynamo(function)


def not_traced_where_imported(function: Callable[..., Any]) -> Callable[..., Any]:
    """`not_traced`, which does not import dynamo for a call: where nothing has, nothing compiles."""
    outside = not_traced(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return outside(*args, **kwargs) if DYNAMO in sys.modules else function(*args, **kwargs)

    return call
