"""Convert tensors and arrays between torch and jax. This is the only module that uses DLPack.

Zero-copy means that both sides see the same bytes: a write through torch is visible in the jax array, although jax calls the array
immutable. Import again after a write, because a jax array that was printed keeps the old values
(https://github.com/jax-ml/jax/issues/19123).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import torch
import torch.utils.dlpack
from jax.core import Tracer

from bridge._compat.jax import array_from_capsule, capsule_from_array
from bridge._compat.torch import tensor_from_capsule
from bridge._compat.types import Device
from bridge._ir.types import PyTree
from bridge._names import path_name
from bridge._process import x64

from .tensor_storage import why_unreadable

# The alignment in bytes that zero-copy needs. On the CPU jax refuses less (XLA's cpu_function_runtime.h, MinAlign). On a GPU a program
# refuses an argument with less (xla/service/gpu/buffer_allocations, kEntryParameterAlignBytes).
ALIGNMENT, ALIGNMENT_GPU = 64, 16


def to_jax(tree: PyTree, copy: bool | None = False) -> PyTree:
    """Do what `bridge.to_jax` does, for a tensor or a pytree without modules: same arguments, results and errors."""
    if isinstance(tree, torch.Tensor):
        return _tensor_to_jax(tree, copy, "")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: _tensor_to_jax(x, copy, path_name(path)) if isinstance(x, torch.Tensor) else x, tree
    )


def to_torch(tree: PyTree, copy: bool | None = False) -> PyTree:
    """Do what `bridge.to_torch` does, for an array or a pytree that jax knows: same arguments, results and errors."""
    if isinstance(tree, jax.Array):
        return _array_to_torch(tree, copy, "")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: _array_to_torch(x, copy, path_name(path)) if isinstance(x, jax.Array) else x, tree
    )


def with_dense_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if the tensor has no memory of its own (a subclass that wraps other tensors, lazy zeros).

    Raises:
      ValueError: The elements cannot be read: the storage was resized, or the copy fails.
    """
    why, cause = why_unreadable(tensor), None
    if not why:
        if not _has_no_address(tensor):
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        try:
            copy.copy_(tensor.detach())  # the detached tensor may be of the subclass
            return copy
        except Exception as error:  # noqa: BLE001 - a subclass may raise anything
            why, cause = f"it has no memory, and a copy of it fails ({error})", error
    raise ValueError(
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} was given, expected a tensor with elements that can be read: {why}. "
        "Give a plain tensor, or set .grad to None."
    ) from cause


def order_torch_after(tokens: Sequence[jax.Array], may_fail: bool = False) -> None:
    """Order torch's next operations after executions. `tokens` are results of these executions, in order, that nobody donates.

    On the CPU this waits, because jax dispatches asynchronously and may still read torch's memory. On a GPU the host does not wait: the
    export makes torch's current stream wait for the last execution, which runs after the others. If an execution `may_fail`, the host
    waits for its error, because jaxlib 0.11 crashes when the result of a failed execution is exported.
    """
    if not tokens:
        return
    device = next(iter(tokens[-1].devices()))
    if device.platform == "cpu" or may_fail:
        for token in tokens:
            token.block_until_ready()
    else:
        export: Callable[..., object] = tokens[-1].__dlpack__  # jax.Array's stub has no `stream`
        export(stream=torch.cuda.current_stream(device.local_hardware_id).cuda_stream)


def torch_stream_token(device: Device) -> jax.Array:
    """Return a zero on the GPU that is ready when torch's current stream has done its work. A program that takes it runs after that."""
    return _importer("cuda")(_zero_on_gpu(device.local_hardware_id), device)


@functools.cache
def _zero_on_gpu(index: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, device=f"cuda:{index}")


def cpu_device() -> Device:
    """Return jax's CPU device. Raise a RuntimeError with the remedy if jax has none."""
    return _jax_device("cpu", 0)


def device_of(tensor: torch.Tensor) -> Device:
    """Return the jax device that holds the tensor's memory. Raise a RuntimeError with the remedy if jax does not see that device."""
    return _jax_device(tensor.device.type, tensor.device.index or 0)


def _tensor_to_jax(tensor: torch.Tensor, copy: bool | None, name: str) -> jax.Array:
    if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"to_jax: {_tensor_title(tensor, name)} {_why_not_exportable(tensor)}")
    if why := why_unreadable(tensor):
        raise ValueError(f"to_jax: {_tensor_title(tensor, name)} cannot be read: {why}. Pass a tensor whose storage was not resized.")
    if _has_no_address(tensor):
        if copy is False:
            raise ValueError(
                f"to_jax: {_tensor_title(tensor, name)} is a {type(tensor).__name__} without memory of its own. Pass copy=None, or a "
                "plain tensor."
            )
        tensor, copy = with_dense_storage(tensor), None
    if tensor.is_conj() or tensor.is_neg():
        # A DLPack capsule has no such bits: jax would get the memory without the conjugation or negation.
        if copy is False:
            raise ValueError(
                f"to_jax: {_tensor_title(tensor, name)} is a lazy conjugate or negative. Pass copy=None, or "
                "resolve_conj()/resolve_neg() first."
            )
        tensor, copy = tensor.resolve_conj().resolve_neg(), None
    if copy:
        tensor = tensor.clone()
    importer, device, alignment = _import_method(tensor.device)
    try:
        if tensor.data_ptr() % alignment:
            raise ValueError("unaligned")  # jax would copy the tensor, or raise an error of its own
        return importer(tensor, device)
    except (RuntimeError, ValueError, BufferError) as error:
        if copy is False:
            raise ValueError(f"to_jax: {_tensor_title(tensor, name)} {_why_not_aliased(tensor, error)}") from error
    return importer(tensor.clone(memory_format=torch.contiguous_format), device)


def _has_no_address(tensor: torch.Tensor) -> bool:
    """Return whether a tensor with elements has no address: a subclass that wraps other tensors, or lazy zeros."""
    try:
        return not torch.Tensor.data_ptr(tensor) and tensor.numel() > 0
    except RuntimeError:  # a tensor inside a torch.func transformation, which no import takes
        return False


def _why_not_exportable(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "is on the meta device and has no memory. Materialize it first (to_empty)."
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; expected torch.strided. Convert it with to_dense()."
    return "requires grad, and jax cannot see torch's graph. Pass tensor.detach()."


def _why_not_aliased(tensor: torch.Tensor, error: Exception) -> str:
    remedy = "Pass copy=None to copy where needed, or"
    if not _is_dense(tensor):
        return f"has strides {tensor.stride()}, which leave gaps or overlap; jax reads dense memory only. {remedy} contiguous()."
    if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
        return (
            f"starts at {tensor.data_ptr():#x}, not aligned to {ALIGNMENT} bytes (a slice or a view into a flat buffer). {remedy} clone()."
        )
    return f"was refused by jax: {str(error).splitlines()[0]} {remedy} clone()."


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or dense_order(tensor) is not None


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the permutation of dimensions that makes the tensor contiguous, the identity if it is; None if there is none."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    sizes, strides = tensor.shape, tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (-strides[d], sizes[d] == 1)))
    expected = 1
    for d in reversed(order):
        if sizes[d] != 1:
            if strides[d] != expected:
                return None
            expected *= sizes[d]
    return order


def _array_to_torch(array: jax.Array, copy: bool | None, name: str) -> torch.Tensor:
    title = f"to_torch: array {name!r}" if name else "to_torch: the array"
    if isinstance(array, Tracer):
        raise ValueError(f"{title} is a tracer ({array.aval}): torch needs values. Call to_torch outside jit.")
    if array.is_deleted():
        raise ValueError(
            f"{title} was donated or deleted and has no memory. Keep the result of the call that took it, or pass a copy there."
        )
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"{title} is a random key, and torch has no such type. Pass jax.random.key_data(key); wrap_key_data turns it back."
        )
    if len(array.devices()) != 1:
        raise ValueError(f"{title} is sharded over {len(array.devices())} devices; expected one. Pass array.addressable_shards[i].data.")
    if copy:
        array = array.copy()
    try:
        return _exporter()(array)
    except (RuntimeError, ValueError, BufferError, TypeError) as error:
        raise ValueError(
            f"{title} of dtype {array.dtype} and shape {array.shape} cannot be seen by torch: {str(error).splitlines()[0]}"
        ) from error


@functools.cache
def _jax_device(platform: str, index: int) -> Device:
    backend = {"cuda": "gpu"}.get(platform, platform)
    try:
        devices = jax.local_devices(backend=backend)  # `jax.devices` also lists other processes, after jax.distributed.initialize
    except (RuntimeError, AssertionError) as error:
        said = f"jax said: {(str(error).splitlines() or [type(error).__name__])[0]}"
        asked: str | None = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        if platform == "cpu" and asked and "cpu" not in asked.split(","):
            raise RuntimeError(
                f"jax has no CPU device, but it must see memory on the CPU: JAX_PLATFORMS is {asked!r}. Set "
                f"JAX_PLATFORMS={asked},cpu, or unset it, before jax starts. {said}"
            ) from error
        raise RuntimeError(
            f"jax has no {backend} backend, but a tensor is on {platform}:{index}. Install the matching jax "
            f"(for NVIDIA maskbridge[cuda12] or maskbridge[cuda13], as torch.version.cuda says), or move the model to the CPU. {said}"
        ) from error
    for device in devices:
        if getattr(device, "local_hardware_id", None) in (index, None) or (len(devices) == 1 and platform == "cpu"):
            return device
    raise RuntimeError(
        f"jax sees {devices}, but a tensor is on {platform}:{index}. Make CUDA_VISIBLE_DEVICES and jax's visible devices agree."
    )


@functools.cache
def _import_method(device: torch.device) -> tuple[Callable[[torch.Tensor, Device], jax.Array], Device, int]:
    """Return, for tensors on one torch device, the function that imports them, the jax device, and the alignment that it needs."""
    platform = device.type
    return _importer(platform), _jax_device(platform, device.index or 0), ALIGNMENT if platform == "cpu" else ALIGNMENT_GPU


@functools.cache
def _importer(platform: str) -> Callable[[torch.Tensor, Device], jax.Array]:
    """Return the function that imports tensors on a platform: jaxlib's private calls if they work, else jax's public function."""
    return _raw_importer(platform) or _public_import


def _raw_importer(platform: str) -> Callable[[torch.Tensor, Device], jax.Array] | None:
    """Return an import by jaxlib's private calls, or None if they do not work here.

    `jax.dlpack.from_dlpack` takes several times as long. The private name moves between releases (lucidrains/jax2torch#6).
    """
    from_capsule, capsule = array_from_capsule, torch.utils.dlpack.to_dlpack
    if from_capsule is None:
        return None

    def fast(tensor: torch.Tensor, device: Device) -> jax.Array:
        return from_capsule(capsule(tensor), device, None, False)

    def ordered(tensor: torch.Tensor, device: Device) -> jax.Array:
        number = device.get_stream_for_external_ready_events()  # jax waits for this stream before it reads the array
        _external_stream(number, tensor.device).wait_stream(torch.cuda.current_stream(tensor.device.index))
        return from_capsule(capsule(tensor), device, number, False)

    importer = fast if platform == "cpu" else ordered
    probe = torch.zeros(ALIGNMENT, device=platform)
    try:
        if importer(probe, _jax_device(platform, probe.device.index or 0)).unsafe_buffer_pointer() == probe.data_ptr():
            return importer
    except (AttributeError, TypeError, RuntimeError, ValueError):
        pass
    return None


@functools.cache
def _external_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle, device=device)


def _public_import(tensor: torch.Tensor, device: Device) -> jax.Array:
    with x64():
        if device.platform == "cpu":
            return jax.dlpack.from_dlpack(tensor, copy=False)
        with torch.cuda.device(tensor.device):  # torch exports only from the current device
            return jax.dlpack.from_dlpack(tensor, copy=False)


@functools.cache
def _exporter() -> Callable[[jax.Array], torch.Tensor]:
    return _raw_exporter() or torch.from_dlpack


def _raw_exporter() -> Callable[[jax.Array], torch.Tensor] | None:
    """Return an export of arrays by private calls, or None if they do not work here. Arrays on a GPU take the public function."""
    calls = _capsule_calls()
    if calls is None:
        return None
    to_capsule, from_capsule = calls

    def fast(array: jax.Array) -> torch.Tensor:
        on_cpu = next(iter(array.devices())).platform == "cpu"
        return from_capsule(to_capsule(array, None)) if on_cpu else torch.from_dlpack(array)

    return fast


@functools.cache
def _capsule_calls() -> tuple[Callable[[jax.Array, None], object], Callable[[object], torch.Tensor]] | None:
    """Return the calls from an array to a capsule and from the capsule to a tensor; None if they do not work here."""
    to_capsule, from_capsule = capsule_from_array, tensor_from_capsule
    if to_capsule is None:
        return None
    try:
        # The first export may happen inside a function that jax traces, or under a transfer guard.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            probe = jax.numpy.zeros(ALIGNMENT, device=cpu_device())
        found = from_capsule(to_capsule(probe, None)).data_ptr() == probe.unsafe_buffer_pointer()
        return (to_capsule, from_capsule) if found else None
    except (TypeError, RuntimeError, ValueError):
        return None


def _tensor_title(tensor: torch.Tensor, name: str) -> str:
    return f"tensor {name!r} {tuple(tensor.shape)}" if name else f"the tensor of shape {tuple(tensor.shape)}"
