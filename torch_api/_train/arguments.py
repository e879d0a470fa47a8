"""The other tensors of a train step: buffers and frozen parameters, and how a program reads or updates them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
import torch

from bridge._autograd.fast_signature import is_dense
from bridge._compat.lookup import SAFE_MODE
from bridge._compiler.spec import LeafSpec, Signature
from bridge._interop.dlpack import ALIGNMENT, dense_order
from bridge._interop.dtypes import numpy_dtype
from bridge._interop.tensor_storage import why_unreadable
from bridge._memory import adoption, jax_buffers
from bridge._memory.call_arguments import TensorViews
from bridge._tracing.op_registry import is_autocast_enabled
from bridge._train import train_program
from torch_api._params.record import ParamRecord
from torch_api._params.sharding import dtensor_layout_of
from torch_api._step.bound_executable import ProgramOperand
from torch_api._step.optimizer_access import OptimizerAccess
from torch_api._step.summaries import CopySummary
from torch_api.optimizer import OptaxOptimizer

from .batch import CLS_NAME
from .module_guard import ModuleGuard

# An input that a program does not change: a `JaxBuffer`, an array over torch's memory, or None for a tensor that each call imports.
ReadArray: TypeAlias = jax_buffers.JaxBuffer | jax.Array | np.ndarray | None


class PerCallInput(NamedTuple):
    """A tensor that can be imported for one call only.

    position: its index in `frozen_inputs`. order: the order of its dimensions in memory. view: makes an array from its address; None if
    nothing can.
    """

    position: int
    tensor: torch.Tensor
    order: tuple[int, ...] | None
    view: TensorViews | None


class ModuleTensorSources:
    """Where a program that trains some parameters finds each tensor of the module.

    donated_buffers, in_place_tensors: the module's buffers that the program updates in place.
    copied_buffers, copied_dim_orders: the module's buffers whose new values are copied back.
    frozen_inputs: all other inputs, as `JaxBuffer` or as array over torch's own memory. The entry is None for the tensors of
      `per_call_inputs`, which each call imports.
    per_call_inputs: tensors whose import is valid for one call only. It keeps nothing alive, so that the tensor can be aligned later.
    """

    def __init__(self, module_guard: ModuleGuard, written_buffers: Sequence[str], leaves: Sequence[ParamRecord]) -> None:
        self._module_guard, self._leaf_by_id = module_guard, {id(leaf.param): leaf for leaf in leaves}
        self.donated_buffers: list[jax_buffers.JaxBuffer] = []
        self.in_place_tensors: list[torch.Tensor] = []
        self.copied_buffers: list[torch.Tensor] = []
        self.copied_dim_orders: list[tuple[int, ...] | None] = []
        self.frozen_inputs: list[ReadArray] = []
        self.per_call_inputs: list[PerCallInput] = []
        self._signatures: list[Signature] = []
        self._sources: dict[str, train_program.TensorSource] = {}
        self._read_positions: dict[jax_buffers.JaxBuffer, int] = {}
        with torch.inference_mode(False):
            for name in written_buffers:
                self._sources[name] = self._source_of_written_buffer(module_guard.buffers[name])

    def _source_of_written_buffer(self, buffer: torch.Tensor) -> train_program.TensorSource:
        memory, order, _, _ = adoption.adopt(buffer, "inplace", needs_own_buffer=True)
        spec = _spec(buffer, order)
        if memory is not None:
            self.donated_buffers.append(memory)
            self.in_place_tensors.append(buffer)
            return train_program.TensorSource("buffers", len(self.donated_buffers) - 1, None, spec)
        self.copied_buffers.append(buffer)
        self.copied_dim_orders.append(order)
        return train_program.TensorSource("copied", len(self.copied_buffers) - 1, None, spec)

    def find_sources(self, operands: Sequence[ProgramOperand]) -> tuple[dict[str, train_program.TensorSource], tuple[Signature, ...]]:
        """Return where the program of these operands finds each tensor, and the signatures of the arrays in `frozen_inputs`."""
        donated = [block.leaves[0].jax_buffer for block in operands if block.leaves[0].jax_buffer is not None]
        copied_back = [block.leaves[0] for block in operands if block.bucket is None and block.leaves[0].jax_buffer is None]
        in_memory = {memory: ("params", i) for i, memory in enumerate(donated)} | {
            m: ("buffers", i) for i, m in enumerate(self.donated_buffers)
        }
        in_torch = {id(leaf.param): i for i, leaf in enumerate(copied_back)}
        for name, tensor in (*self._module_guard.params.items(), *self._module_guard.buffers.items()):
            if name in self._sources:
                continue
            memory, row = jax_buffers.find_buffer(tensor)
            if id(tensor) in in_torch:
                leaf = self._leaf_by_id[id(tensor)]
                self._sources[name] = train_program.TensorSource("kept", in_torch[id(tensor)], None, _spec(tensor, leaf.dim_order))
            elif memory in in_memory:
                self._sources[name] = train_program.TensorSource(*in_memory[memory], row, _spec(tensor, _dim_order(tensor)))
            else:
                self._sources[name] = train_program.TensorSource(
                    "read", self._read_position(tensor, memory), row, _spec(tensor, _dim_order(tensor))
                )
        return self._sources, tuple(self._signatures)

    def _read_position(self, tensor: torch.Tensor, memory: jax_buffers.JaxBuffer | None) -> int:
        if memory in self._read_positions:  # another row of the same bucket
            return self._read_positions[memory]
        position, order = len(self.frozen_inputs), _dim_order(tensor)
        if memory is not None:
            self._read_positions[memory] = position
            self._signatures.append((tuple(memory.array.shape), str(memory.array.dtype)))
        else:
            self._signatures.append(((tensor.numel(),), str(numpy_dtype(tensor.dtype))))
        array = memory if memory is not None else _view_over_torch(tensor, order)
        self.frozen_inputs.append(array)
        if array is None:
            self.per_call_inputs.append(
                PerCallInput(position, tensor, order, TensorViews(_flat_shape(tensor)) if _is_viewable(tensor) and not SAFE_MODE else None)
            )
        return position


def _view_over_torch(tensor: torch.Tensor, order: tuple[int, ...] | None) -> jax.Array | None:
    """Return a flat array over the tensor's memory, or None if no array stays valid over several calls.

    On a GPU, each import orders jax's work after torch's, so each call makes its own.
    """
    if not _is_viewable(tensor):
        return None
    adoption.align_storage(tensor)
    try:
        return adoption.import_read_only(tensor, order)
    except ValueError:  # not aligned
        return None


def _is_viewable(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a dense CPU tensor, in any order of dimensions, whose memory no program changes."""
    return tensor.device.type == "cpu" and is_dense(tensor) and tensor.numel() > 0 and not jax_buffers.is_over_jax_buffer(tensor)


def _flat_shape(tensor: torch.Tensor) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((tensor.numel(),), numpy_dtype(tensor.dtype))]


def _spec(tensor: torch.Tensor, order: tuple[int, ...] | None) -> LeafSpec:
    return LeafSpec(None, tuple(tensor.shape), str(numpy_dtype(tensor.dtype)), order)


def _dim_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    order = dense_order(tensor)
    return None if order is None or order == tuple(range(tensor.ndim)) else order


def summarize_copies_of_module(
    module_guard: ModuleGuard, copied_buffers: Sequence[torch.Tensor], per_call_inputs: Sequence[PerCallInput]
) -> list[CopySummary]:
    """Return which buffers and frozen tensors each call copies, and why."""
    found = [("buffer", tensor, adoption.why_not_adoptable(tensor)) for tensor in copied_buffers]
    for _, tensor, _, view in per_call_inputs if SAFE_MODE is False else ():
        if tensor.device.type == "cpu" and (view is None or tensor.data_ptr() % ALIGNMENT):
            unaligned = f"its memory does not begin at a multiple of {ALIGNMENT} bytes"
            found.append(("frozen tensor", tensor, unaligned if view is not None else "it is not dense, or the program writes its memory"))
    names = {id(tensor): name for name, tensor in (*module_guard.params.items(), *module_guard.buffers.items())}
    by_reason: dict[tuple[str, str], list[torch.Tensor]] = {}
    for what, tensor, reason in found:
        by_reason.setdefault((what, reason), []).append(tensor)
    return [
        CopySummary(what, reason, sum(tensor.nbytes for tensor in tensors), tuple(names[id(tensor)] for tensor in tensors))
        for (what, reason), tensors in by_reason.items()
    ]


# ------------------------------------------------------------------ what cannot be trained in one program


def check_arguments(module: object, loss_fn: object, optimizer: object, accumulate: object) -> None:
    """Raise if an argument of the constructor has a wrong type or value."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{CLS_NAME}: module is a {type(module).__name__}; expected a torch.nn.Module.")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"{CLS_NAME}: module is a DistributedDataParallel, whose communication hangs on torch's backward pass; here none runs. Give "
            "module.module on one process, or train with loss.backward() and optimizer.step()."
        )
    if not callable(loss_fn):
        raise TypeError(f"{CLS_NAME}: loss_fn is a {type(loss_fn).__name__}; expected a function loss_fn(model, *batch).")
    if not isinstance(optimizer, OptaxOptimizer):
        raise TypeError(
            f"{CLS_NAME}: optimizer is a {type(optimizer).__name__}; expected one of torch_api, whose update is a JAX program. "
            "For torch.optim.AdamW give torch_api.MaskedAdamW with the same arguments."
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"{CLS_NAME}: accumulate is {accumulate!r}; expected a whole number of calls, 1 or more.")


_torch_dispatch = attrgetter("__torch_dispatch__")


def check_readable(module: torch.nn.Module) -> None:
    """Raise if a parameter or buffer, trained or not, has a kind that no array can represent."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        is_subclass = _torch_dispatch(type(tensor)) is not _torch_dispatch(torch.Tensor) and dtensor_layout_of(tensor) is None
        if tensor.layout is not torch.strided or tensor.is_quantized or is_subclass:
            kind = type(tensor).__name__ if is_subclass else f"of layout {tensor.layout} and dtype {tensor.dtype}"
            raise ValueError(
                f"{CLS_NAME}: {name!r} is {kind}, and no JAX array can stand for it. Train with loss.backward() and optimizer.step(), or "
                "give the train step a module without it."
            )


def check_same_params(module_guard: ModuleGuard, optimizer: OptimizerAccess) -> torch.device:
    """Return the device of the module; raise if it has several, or if the parameters of module and optimizer differ."""
    by_device: dict[torch.device, str] = {}
    for name, tensor in (*module_guard.params.items(), *module_guard.buffers.items()):
        by_device.setdefault(tensor.device, name)
    if len(by_device) != 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in by_device.items()) or "it has no parameters"
        raise ValueError(f"{CLS_NAME}: the module must be on one device, but {places}. Move it by module.to(device).")
    known = {id(leaf.param) for leaf in optimizer.records}
    missing = [name for name, p in module_guard.params.items() if p.requires_grad and id(p) not in known]
    if missing:
        raise ValueError(
            f"{CLS_NAME}: parameters {_few_names(missing)} of the module require grad, but are not the optimizer's and would never be "
            "trained. Give them to the optimizer (its mask can freeze them), or set requires_grad=False."
        )
    module_params = {id(p) for p in module_guard.params.values()}
    foreign = [leaf.name for leaf in optimizer.trainable if leaf.param.requires_grad and id(leaf.param) not in module_params]
    if foreign:
        raise ValueError(
            f"{CLS_NAME}: the optimizer trains {_few_names(foreign)}, not among the module's parameters, so no gradient could reach it. "
            "Put all that is trained into one module (torch.nn.ModuleDict), or make an optimizer of this module's parameters."
        )
    sharded = [leaf.name for leaf in optimizer.trainable if leaf.dtensor_layout is not None]
    if sharded:
        raise ValueError(
            f"{CLS_NAME}: parameter {sharded[0]!r} is a DTensor, and a program of one process holds only its part. "
            "Train it with loss.backward() and optimizer.step()."
        )
    return next(iter(by_device))


def check_module_storages(module_guard: ModuleGuard) -> None:
    """Raise if the storage of a parameter or buffer was freed."""
    for name, tensor in (*module_guard.params.items(), *module_guard.buffers.items()):
        if why := why_unreadable(tensor):
            raise ValueError(
                f"{CLS_NAME}: {name!r} of the module cannot be read: {why}. Nothing was updated: give its storage back before the call."
            )


def refuse_keywords(loss_fn: Callable[..., object], names: Collection[str], takes_extra_args: bool, has_batch: bool) -> None:
    """Raise if keyword arguments of a call are not arguments of the transformation. They are most likely a batch: `step(**batch)`."""
    if takes_extra_args and not has_batch:
        try:
            inspect.signature(loss_fn).bind(None)
            return
        except TypeError:
            pass  # loss_fn takes a batch
        except ValueError:  # a callable without a signature
            return
    elif takes_extra_args:
        return
    raise TypeError(
        f"{CLS_NAME}: keyword arguments of a call go to the optimizer's transformation, which does not take {sorted(names)}. Pass the "
        "batch as one dict, train_step(batch), which loss_fn(model, batch) receives."
    )


def refuse_autocast() -> None:
    """Raise inside torch.autocast, whose casts happen in torch's dispatcher and so have no effect on a traced program."""
    if is_autocast_enabled():
        raise RuntimeError(
            f"{CLS_NAME} was called inside torch.autocast, which has no effect on a compiled program. Leave the context; for half "
            "precision use module.to(torch.bfloat16) and an optimizer with master_weights=True."
        )


def _few_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
