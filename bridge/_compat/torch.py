"""Private names of torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad, profiler
from torch.optim import Optimizer

from .lookup import private

# ------------------------------------------------------------------ copies


def _copy_each(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """`_foreach_copy_`, one tensor after the other."""
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)


# Copies of many tensors in one call. Without it one call of torch for each.
foreach_copy_: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = private("torch._foreach_copy_", _copy_each)

# A tensor over a DLPack capsule. Without it torch's public call, which does the same behind some questions of Python's.
tensor_from_capsule: Callable[[object], torch.Tensor] = private("torch._C._from_dlpack", torch.from_dlpack)

# A clone that shares the memory until one of both is written; it fails where something else keeps the memory alive. Without it parameters
# that were loaded from a file keep their own memory and are copied at each step.
lazy_clone: Callable[[torch.Tensor], torch.Tensor] | None = private("torch._lazy_clone", None)


# ------------------------------------------------------------------ who holds a tensor's memory


def _yes(*_: object) -> bool:
    return True


def _no(*_: object) -> bool:
    return False


# Whether a tensor is a view. Without it each counts as one whose base others may hold, and is never updated in place.
is_view: Callable[[torch.Tensor], bool] = private("torch.Tensor._is_view", _yes)

_base_of: Callable[[torch.Tensor], torch.Tensor | None] | None = private("torch.Tensor._base.__get__", None)
_tensor_holders: Callable[[torch.Tensor], int] | None = private("torch.Tensor._use_count", None)
_use_count: Callable[[int], int] | None = private("torch._C._storage_Use_Count", None)
_address_of: Callable[[torch.UntypedStorage], int] | None = private("torch.UntypedStorage._cdata.__get__", None)


def _holders_of_base(view: torch.Tensor) -> tuple[int, int] | None:
    """How many references there are to the tensor that a view was made of, from Python and in all; safetensors gives such views."""
    if _base_of is None or _tensor_holders is None:
        return None
    base = _base_of(view)
    return None if base is None else (sys.getrefcount(base), _tensor_holders(base))


_ONLY_ITS_VIEW = _holders_of_base(torch.zeros(2).view(2))


def is_only_view(view: torch.Tensor) -> bool:
    """Whether nothing but this view holds the tensor that it was made of. Where torch does not tell, no: such a parameter is copied."""
    return _ONLY_ITS_VIEW is not None and _holders_of_base(view) == _ONLY_ITS_VIEW


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors hold the storage; 0, which nobody takes for sole ownership, where torch does not tell.

    Each parameter then keeps its memory, and each step copies it: that is slow, and `report()` and `bridge.doctor()` say so.
    """
    if _use_count is None or _address_of is None:
        return 0
    storage = tensor.untyped_storage()
    return _use_count(_address_of(storage)) - 1  # `storage` itself is one holder


# ------------------------------------------------------------------ guards

Guard = Callable[[Sequence[torch.Tensor]], Callable[..., bool] | None]


def no_guard(tensors: Sequence[torch.Tensor]) -> None:
    """Return no guard: each step looks at each leaf."""


def _guard() -> Guard:
    """What makes one C call that says whether tensors still have the class, dtype, device, sizes, strides and `requires_grad` of these.

    torch.compile guards its graphs by it. It is used only where it answers as expected. It denies all in an autocast region.
    """
    guards = private("torch._C._dynamo.guards.TensorGuards", None)

    def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
        return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check if tensors else None

    one = torch.zeros(2, 3)
    others = torch.zeros(3, 2), torch.zeros(3, 2).t(), one.double(), torch.zeros(2, 3, requires_grad=True), None
    try:
        check = guard([one])
        if check is not None and check(torch.ones(2, 3)) is True and not any(map(check, others)):
            return guard
    except (AttributeError, TypeError, SystemError):
        pass
    return no_guard


# Without it the metadata of the leaves are compared one by one, in Python.
guard: Guard = _guard()


def _another(_: torch.Tensor) -> object:
    return object()


# How often a tensor was written. Without it a constant of a traced loss counts as written, and each call traces the loss anew.
version: Callable[[torch.Tensor], object] = private("torch.Tensor._version.__get__", _another)


# ------------------------------------------------------------------ who hears of a step


def heard() -> tuple[Mapping[int, Callable[..., object]], Mapping[int, Callable[..., object]], Callable[[], bool], Callable[[], bool]]:
    """Return who hears of steps: hooks of all optimizers before and after each, whether some thread has a profiler, and whether this has.

    Without these names somebody hears each step, which then goes through torch's own wrapper.
    """
    before = private("torch.optim.optimizer._global_optimizer_pre_hooks", None)
    after = private("torch.optim.optimizer._global_optimizer_post_hooks", None)
    here = private("torch.autograd._profiler_enabled", None)
    somewhere = private("torch.autograd.profiler._is_profiler_enabled", None)
    known = Optimizer.__annotations__.keys() >= {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
    if known and None not in (before, after, here) and isinstance(somewhere, bool) and isinstance(here(), bool):
        return before, after, functools.partial(getattr, profiler, "_is_profiler_enabled"), here
    return {}, {}, _yes, _no


# The entry of an optimizer's attributes by which schedulers know that it has made a step. Without it they warn that none was made.
OPT_CALLED = "_opt_called"

# ------------------------------------------------------------------ torch.compile

# Have torch.compile break its graph at a function, without importing dynamo for it. Without it torch's public decorator, which imports it.
disable_dynamo: Callable[[Callable[..., Any]], Callable[..., Any]] = private("torch._disable_dynamo", torch.compiler.disable)

# Among `sys.modules` once something is compiled. Where torch names it otherwise, `jax_function` runs in a graph that is being traced.
DYNAMO = "torch._dynamo"

# ------------------------------------------------------------------ autograd

# Whether a transformation of torch.func is active, and the level of forward-mode derivatives, which is at least 0 in `dual_level`. Without
# them each call of a `jax_function` goes the way of transformed calls, which costs 15 us.
functorch_is_active: Callable[[], bool] = private("torch._C._are_functorch_transforms_active", _yes)
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level", 0)

# Whether a tensor is batched by torch's old vmap. Without it torch itself fails where such a one is given, with a text of its own.
is_legacy_batch: Callable[[torch.Tensor], bool] = private("torch._C._functorch.is_legacy_batchedtensor", _no)

# The class from which `torch.autograd.Function` has `apply`, and so an `apply` that was kept in a variable. Without it `Function` itself: a
# kept one then runs torch's own code, which fails on traced tensors.
FUNCTION: Any = private("torch.autograd.function._SingleLevelFunction", torch.autograd.Function)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its questions about transformations (2 us), for where none is active; with them where that is all."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


# Has torch ask modes and subclasses again, in the handler of a signal that arrives where they are disabled. Without it such a handler may
# not trace.
with_overrides: Callable[[], AbstractContextManager[object]] = private("torch._C._EnableTorchFunction", nullcontext)


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def _as_subclass(kind: type[_Tensor], tensor: torch.Tensor) -> _Tensor:
    return tensor.as_subclass(kind)


# A tensor as one of a subclass. Without it the public method, which also takes note of a view.
make_subclass: Callable[[type, torch.Tensor], Any] = private("torch.Tensor._make_subclass", _as_subclass)


# ------------------------------------------------------------------ modules

# Hooks of all modules before their forward. Without it a tracker of FLOPs is not recognized, and fails on traced tensors.
global_forward_pre_hooks: Mapping[int, object] = private("torch.nn.modules.module._global_forward_pre_hooks", {})

# The batch norms, the norms that keep statistics of batches, and the convolutions. Without their bases, those of torch.nn.
_BATCH = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_INSTANCE = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
BATCH_NORMS: type | tuple[type, ...] = private("torch.nn.modules.batchnorm._BatchNorm", _BATCH)
NORMS: type | tuple[type, ...] = private("torch.nn.modules.batchnorm._NormBase", (*_BATCH, *_INSTANCE))
CONVOLUTIONS: type | tuple[type, ...] = private("torch.nn.modules.conv._ConvNd", _CONVOLUTIONS)

# ------------------------------------------------------------------ operators


def _named(space: object, prefix: str) -> SimpleNamespace:
    """The functions of a public module by the names that they have in its private one."""
    return SimpleNamespace(**{f"{prefix}{name}": function for name, function in vars(space).items() if callable(function)})


# Where torch's Python finds its operators, by the prefix that names have there. Without one, the functions of the public module.
_SPACES = {
    "_nn": (nn.functional, ""),
    "_linalg": (torch.linalg, "linalg_"),
    "_fft": (torch.fft, "fft_"),
    "_special": (torch.special, "special_"),
}
BENEATH: dict[str, Any] = {f"torch._C.{name}": private(f"torch._C.{name}", _named(*public)) for name, public in _SPACES.items()}
SPECIAL: Any = BENEATH["torch._C._special"]

# `stft` below torch's Python, which pads. Without it torch.stft has no implementation, and the error names what it calls.
unpadded_stft: Callable[..., torch.Tensor] | None = private("torch._C._VariableFunctions.stft", None)


def _dirichlet(concentration: torch.Tensor) -> torch.Tensor:
    """Gamma variates over their sum."""
    drawn = torch.distributions.Gamma(concentration, torch.ones_like(concentration)).rsample()
    return drawn / drawn.sum(-1, True)


# A draw from a Dirichlet distribution. Without it the same distribution, by other draws.
sample_dirichlet: Callable[[torch.Tensor], torch.Tensor] = private("torch._sample_dirichlet", _dirichlet)

OVERLOADS: type = type(torch.ops.aten.add)  # the class of `torch.ops.aten.NAME`


def writes(overload: object) -> bool:
    """Whether an overload of an operator changes an argument. Where torch does not tell, yes: it is refused, not run on constants."""
    schema = getattr(overload, "_schema", None)
    return schema is None or any(x.alias_info and x.alias_info.is_write for x in schema.arguments)
