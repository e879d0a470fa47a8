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
    """Copy tensors as `_foreach_copy_` does, one after the other."""
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)


# Copy many tensors in one call. Without it torch is called once for each, or by the public name that torch 2.15 has.
foreach_copy_: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object] = private(
    "torch._foreach_copy_", getattr(getattr(torch, "foreach", None), "copy_", _copy_each)
)

# A tensor over a DLPack capsule. Without it torch's public function, which checks some things in Python first.
tensor_from_capsule: Callable[[object], torch.Tensor] = private("torch._C._from_dlpack", torch.from_dlpack)

# A clone that shares its memory until one of the two is written. It fails if another object keeps the memory alive. Without it parameters
# that were loaded from a file keep their own memory, and each step copies them.
lazy_clone: Callable[[torch.Tensor], torch.Tensor] | None = private("torch._lazy_clone", None)


# ------------------------------------------------------------------ who uses a tensor's memory


def _yes(*_: object) -> bool:
    return True


def _no(*_: object) -> bool:
    return False


# Whether a tensor is a view. Without it every tensor counts as a view whose base may be used elsewhere, and is never updated in place.
is_view: Callable[[torch.Tensor], bool] = private("torch.Tensor._is_view", _yes)

_base_of: Callable[[torch.Tensor], torch.Tensor | None] | None = private("torch.Tensor._base.__get__", None)
_tensor_use_count: Callable[[torch.Tensor], int] | None = private("torch.Tensor._use_count", None)
_storage_use_count: Callable[[int], int] | None = private("torch._C._storage_Use_Count", None)
_storage_pointer: Callable[[torch.UntypedStorage], int] | None = private("torch.UntypedStorage._cdata.__get__", None)


def _base_reference_counts(view: torch.Tensor) -> tuple[int, int] | None:
    """Return the number of Python references and of all references to a view's base. safetensors gives views as parameters."""
    if _base_of is None or _tensor_use_count is None:
        return None
    base = _base_of(view)
    return None if base is None else (sys.getrefcount(base), _tensor_use_count(base))


_SOLE_VIEW_COUNTS = _base_reference_counts(torch.zeros(2).view(2))


def is_only_view(view: torch.Tensor) -> bool:
    """Return whether only this view holds its base. If torch does not tell, the answer is no, and each step copies the parameter."""
    return _SOLE_VIEW_COUNTS is not None and _base_reference_counts(view) == _SOLE_VIEW_COUNTS


def storage_use_count(tensor: torch.Tensor) -> int:
    """Return how many tensors use the storage; 0 if torch does not tell, which never counts as sole use.

    Each parameter then keeps its own memory, and each step copies it, which is slow. `report()` and `bridge.doctor()` say so.
    """
    if _storage_use_count is None or _storage_pointer is None:
        return 0
    storage = tensor.untyped_storage()
    return _storage_use_count(_storage_pointer(storage)) - 1  # `storage` itself is one user


# ------------------------------------------------------------------ guards

GuardMaker = Callable[[Sequence[torch.Tensor]], Callable[..., bool] | None]


def no_guard(tensors: Sequence[torch.Tensor]) -> None:
    """Return None: without a guard, each step looks at each leaf."""


def _find_guard() -> GuardMaker:
    """Return the function that makes torch.compile's guard: one C call that checks many tensors.

    The guard checks class, dtype, device, sizes, strides and `requires_grad`. In an autocast region it fails for all tensors. It is used
    only if it answers as expected here.
    """
    tensor_guards = private("torch._C._dynamo.guards.TensorGuards", None)

    def make(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
        return tensor_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check if tensors else None

    one = torch.zeros(2, 3)
    others = torch.zeros(3, 2), torch.zeros(3, 2).t(), one.double(), torch.zeros(2, 3, requires_grad=True), None
    try:
        check = make([one])
        if check is not None and check(torch.ones(2, 3)) is True and not any(map(check, others)):
            return make
    except (AttributeError, TypeError, SystemError):
        pass
    return no_guard


# Without it, Python compares the metadata of the leaves one by one.
make_guard: GuardMaker = _find_guard()


def _new_object(_: torch.Tensor) -> object:
    return object()


# How often a tensor was written. Without it every constant of a traced loss counts as written, and each call traces the loss again.
version: Callable[[torch.Tensor], object] = private("torch.Tensor._version.__get__", _new_object)


# ------------------------------------------------------------------ who observes a step


def step_observers() -> tuple[
    Mapping[int, Callable[..., object]], Mapping[int, Callable[..., object]], Callable[[], bool], Callable[[], bool]
]:
    """Return who observes steps.

    Without these names every step counts as observed, and goes through torch's own wrapper.

    Returns:
      The hooks of all optimizers before a step, those after a step, whether any thread has a profiler, and whether this thread has one.
    """
    before = private("torch.optim.optimizer._global_optimizer_pre_hooks", None)
    after = private("torch.optim.optimizer._global_optimizer_post_hooks", None)
    here = private("torch.autograd._profiler_enabled", None)
    somewhere = private("torch.autograd.profiler._is_profiler_enabled", None)
    known = Optimizer.__annotations__.keys() >= {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
    if known and None not in (before, after, here) and isinstance(somewhere, bool) and isinstance(here(), bool):
        return before, after, functools.partial(getattr, profiler, "_is_profiler_enabled"), here
    return {}, {}, _yes, _no


# The attribute of an optimizer by which schedulers know that it has made a step. Without it they warn that there was none.
OPT_CALLED = "_opt_called"

# ------------------------------------------------------------------ torch.compile

# Have torch.compile break its graph at a function. Without it torch's public decorator, which imports dynamo at once.
disable_dynamo: Callable[[Callable[..., Any]], Callable[..., Any]] = private("torch._disable_dynamo", torch.compiler.disable)

# The module that is imported once something is compiled. If torch renames it, `jax_function` runs inside a graph that is being traced.
DYNAMO = "torch._dynamo"

# ------------------------------------------------------------------ autograd

# Whether a torch.func transformation is active, and the level of forward-mode derivatives, which is at least 0 in `dual_level`. Without
# them each call of a `jax_function` is handled as a transformed call, which is slower.
functorch_is_active: Callable[[], bool] = private("torch._C._are_functorch_transforms_active", _yes)
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level", 0)

# Whether a tensor is batched by torch's old vmap. Without it torch itself raises an error for such a tensor, with a text of its own.
is_legacy_batch: Callable[[torch.Tensor], bool] = private("torch._C._functorch.is_legacy_batchedtensor", _no, needed=True)

# Whether `apply` of `torch.autograd.Function` is C code (torch 2.14). If it is Python code (torch 2.13), it calls `apply` of its base.
APPLY_IS_C: bool = not isinstance(vars(torch.autograd.Function).get("apply"), classmethod)

# The class whose `apply` every Function calls; with torch 2.13 also an `apply` kept in a variable. Without it `Function` itself:
# such an `apply` then runs torch's own code, which fails on traced tensors.
_single_level: Any = private("torch.autograd.function._SingleLevelFunction", torch.autograd.Function, needed=True)
FUNCTION_BASE: Any = torch.autograd.Function if APPLY_IS_C else _single_level


def unchecked_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its checks for transformations, for use where none is active; with them if torch has no other."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


# Let torch's modes and subclasses act again, in the handler of a signal that arrives while they are disabled. Without it such a handler
# may not trace.
with_overrides: Callable[[], AbstractContextManager[object]] = private("torch._C._EnableTorchFunction", nullcontext, needed=True)


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def _as_subclass(kind: type[_Tensor], tensor: torch.Tensor) -> _Tensor:
    return tensor.as_subclass(kind)


# A tensor as one of a subclass. Without it the public method, which also records a view.
make_subclass: Callable[[type, torch.Tensor], Any] = private("torch.Tensor._make_subclass", _as_subclass)


# ------------------------------------------------------------------ modules

# Hooks that run before the forward of any module. Without it a counter of FLOPs is not recognized, and fails on traced tensors.
global_forward_pre_hooks: Mapping[int, object] = private("torch.nn.modules.module._global_forward_pre_hooks", {}, needed=True)

# The batch norms, the norms with statistics of batches, and the convolutions. Without these base classes, the classes of torch.nn.
_BATCH = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_INSTANCE = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
BATCH_NORMS: type | tuple[type, ...] = private("torch.nn.modules.batchnorm._BatchNorm", _BATCH)
NORMS: type | tuple[type, ...] = private("torch.nn.modules.batchnorm._NormBase", (*_BATCH, *_INSTANCE))
CONVOLUTIONS: type | tuple[type, ...] = private("torch.nn.modules.conv._ConvNd", _CONVOLUTIONS)

# ------------------------------------------------------------------ operators


def _named(space: object, prefix: str) -> SimpleNamespace:
    """Return the functions of a public module by the names that they have in the private one."""
    return SimpleNamespace(**{f"{prefix}{name}": function for name, function in vars(space).items() if callable(function)})


# Where torch's Python code finds its operators, by the prefix of their names. Without one, the functions of the public module.
_PUBLIC_NAMESPACES = {
    "_nn": (nn.functional, ""),
    "_linalg": (torch.linalg, "linalg_"),
    "_fft": (torch.fft, "fft_"),
    "_special": (torch.special, "special_"),
}
PRIVATE_NAMESPACES: dict[str, Any] = {
    f"torch._C.{name}": private(f"torch._C.{name}", _named(*public), needed=True) for name, public in _PUBLIC_NAMESPACES.items()
}
SPECIAL: Any = PRIVATE_NAMESPACES["torch._C._special"]

# `stft` below torch's Python code, which pads. Without it torch.stft has no implementation, and the error names the function it calls.
unpadded_stft: Callable[..., torch.Tensor] | None = private("torch._C._VariableFunctions.stft", None, needed=True)


def _dirichlet(concentration: torch.Tensor) -> torch.Tensor:
    """Return Gamma variates divided by their sum."""
    drawn = torch.distributions.Gamma(concentration, torch.ones_like(concentration)).rsample()
    return drawn / drawn.sum(-1, True)


# A draw from a Dirichlet distribution. Without it the same distribution with other draws.
sample_dirichlet: Callable[[torch.Tensor], torch.Tensor] = private("torch._sample_dirichlet", _dirichlet, needed=True)

OVERLOAD_PACKET: type = type(torch.ops.aten.add)  # the class of `torch.ops.aten.NAME`


def mutates_arguments(overload: object) -> bool:
    """Return whether an operator overload writes to an argument. If torch does not tell, the answer is yes, and the overload is refused."""
    schema = getattr(overload, "_schema", None)
    return schema is None or any(x.alias_info and x.alias_info.is_write for x in schema.arguments)
