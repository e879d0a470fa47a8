"""Conversion of a torch optimizer's state to the state of an optax transformation, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.tree_util import KeyPath

from bridge._compiler.state_layout import leaf_finder, name_suffixes
from bridge._compiler.state_layout import to_key_path as dict_path
from bridge._interop.dlpack import to_jax, to_torch
from bridge._interop.dtypes import numpy_dtype
from bridge._ir.numerics import is_prng_key
from bridge._ir.types import PyTree
from bridge._names import did_you_mean, path_name
from bridge._process import default_promotion, x64

from .optimizer import OptaxOptimizer
from .transformation_of import Param, expected_state, list_params, nest_by_path, scalar_device, transformation

# optax's names for torch's state fields. Some fields have no counterpart: torch's amsgrad keeps the maximum before the bias
# correction, optax's after it; torch's Rprop keeps the last gradient, optax.rprop the last update.
_OPTAX_NAMES: dict[str, tuple[str, ...]] = {
    "step": ("count",), "exp_avg": ("mu",), "exp_avg_sq": ("nu",), "exp_inf": ("nu",), "momentum_buffer": ("trace",),
    "square_avg": ("nu", "e_g"), "acc_delta": ("e_x",), "grad_avg": ("mu",), "sum": ("sum_of_squares",),
}  # fmt: skip
# Parts of a state that are settings and not results of training: optax.inject_hyperparams, masks of elements (bridge.select).
_SETTINGS = frozenset({"hyperparams", "hyperparams_states", "elements"})

# Shape (None: any), dtype and device of a field.
_ExpectedField: TypeAlias = tuple[tuple[int, ...] | None, torch.dtype, torch.device]


class _StateSlot(NamedTuple):
    """A leaf of an optax state.

    param_index: the parameter that it belongs to; None if it belongs to all of `members`. name: its name without the parameter's.
    """

    path: KeyPath
    name: str
    param_index: int | None
    members: tuple[int, ...]

    @property
    def path_text(self) -> str:
        return path_name(self.path)

    @property
    def is_count(self) -> bool:
        return self.param_index is None and self.name.split(".")[-1] == "count"

    @property
    def is_setting(self) -> bool:
        return not _SETTINGS.isdisjoint(self.name.split("."))


def to_optax_state(
    optimizer: torch.optim.Optimizer,
    tx: object = None,
    *,
    module: torch.nn.Module | None = None,
    count: int | None = None,
    copy: bool = False,
) -> PyTree:
    """Return the optimizer's state as the tree of `tx.init(params)`, over the nested dict of its parameters.

    With it, `tx` continues in pure JAX where the optimizer stopped: `state = to_optax_state(opt, optax.adam(1e-3))`.

    Args:
      optimizer: any optimizer of this package or of torch.optim.
      tx: the optax transformation that continues. Its leaves are filled by name: optax's `mu` from torch's `exp_avg`, `nu` from
        `exp_avg_sq`, `trace` from `momentum_buffer`, `count` from `step`. None means the transformation that the optimizer runs. This is
        the one that it was made with, or `bridge.rules.adam(...)` for MaskedAdam and torch.optim.Adam. If it has several transformations,
        or does not train all parameters, it is an `optax.partition`, whose label "frozen" has the other parameters (`MaskedNode` in the
        state of the other labels).
      module: names the parameters. Without it, they have the names that the optimizer was given, or "param0", "param1", ...
      count: the value of optax's count if the optimizer counts nothing (a schedule in optax.sgd after torch.optim.SGD).
      copy: False: arrays alias the memory of the optimizer's state if dtype and alignment allow it, so the optimizer's next step changes
        them. True: all arrays are copies. Counts are always copies.

    Returns:
      The state. A parameter that was never updated has the value of `tx.init`. An array whose dtype is wider than in `tx` keeps it
      (`state_dtype`); a narrower one is cast. State beside the transformation's (`ema_param`, `master_param`, `rounding_key`) and the state
      of frozen parameters are left out.

    Raises:
      ValueError: a field has no leaf in the state of `tx`, or a leaf has no field (the text names both); shapes differ; parameters
        with one common count were updated a different number of times; or the state is a DTensor.

    Example:
      >>> import optax, torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedAdam([("w", w)])
      >>> w.sum().backward()
      >>> opt.step()
      >>> torch_api.to_optax_state(opt, optax.adam(1e-3))[0].mu["w"]
      Array([0.1, 0.1], dtype=float32)
    """
    what = "to_optax_state"
    params = list_params(what, optimizer, module)
    template = _StateTemplate(what, transformation(what, optimizer, params) if tx is None else tx, params)
    slot_by_field: dict[tuple[int, str], _StateSlot] = {}
    leaves = []
    for position, place in enumerate(template.slots):
        tensor, source_fields = _value_of(
            what, place, params, template.shapes[position], functools.partial(template.initial, position), count
        )
        for giver in source_fields:
            other = slot_by_field.setdefault(giver, place)
            if other.param_index is not None and other is not place:
                raise ValueError(
                    f"{what}: both {other.path_text!r} and {place.path_text!r} would have the {giver[1]!r} of {params[giver[0]].name!r}. "
                    "Give a transformation that keeps it once."
                )
        leaves.append(template.initial(position) if tensor is None else template.array(position, tensor, copy))
    for i, param in enumerate(params):
        rest = sorted(field for field in param.fields if (i, field) not in slot_by_field and field != "step")
        if rest:
            names = ", ".join(sorted({place.name for place in template.slots})) or "none, for it has no state"
            raise ValueError(
                f"{what}: the state of {param.name!r} has {rest[0]!r}, for which this transformation has no place, and it would be lost. "
                f"Give the transformation that keeps it, or no tx. Places: {names}."
            )
    return template.structure.unflatten(leaves)


def load_optax_state(
    optimizer: torch.optim.Optimizer, state: PyTree, *, module: torch.nn.Module | None = None, count: int | None = None
) -> None:
    """Write an optax state over the nested dict of parameters into the optimizer, in place: the inverse of `to_optax_state`.

    Tensors of `optimizer.state` stay the same objects at the same addresses. A parameter without state gets it. Parameters,
    param groups, averages and master weights are not changed.

    Args:
      optimizer: any optimizer of this package or of torch.optim.
      state: the state of any transformation, with jax or NumPy arrays as leaves. They are matched by name as in `to_optax_state`. Settings
        (`optax.inject_hyperparams`) are skipped: the optimizer has its own in its groups.
      module: as in `to_optax_state`.
      count: the optimizer's `step` if the state counts nothing (optax.rmsprop). None keeps the present `step`.

    Raises:
      ValueError: a trained parameter has no array for a field; an array belongs to no parameter, or to a frozen one; shapes differ; a
        dtype would lose digits; or a leaf is a tracer, donated, or on several devices. Nothing is changed then.

    Example:
      >>> import jax.numpy as jnp, optax, torch, torch_api
      >>> tx = optax.adam(1e-3)
      >>> params = {"w": jnp.ones(2)}
      >>> _, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedAdam([("w", w)])
      >>> torch_api.load_optax_state(opt, state)
      >>> opt.state[w]["exp_avg"]
      tensor([0.1000, 0.1000])
    """
    with optimizer._transaction() if isinstance(optimizer, OptaxOptimizer) else nullcontext():
        _load(optimizer, state, module, count)


def _load(optimizer: torch.optim.Optimizer, state: PyTree, module: torch.nn.Module | None, count: int | None) -> None:
    what = "load_optax_state"
    params = list_params(what, optimizer, module)
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    places = _make_slots([path for path, _ in flat], params)
    found = _fields_by_param(
        what, params, [_expected_fields(optimizer, p) for p in params], zip(places, _to_tensors(what, places, flat), strict=True), count
    )
    for param, fields in zip(params, found, strict=True):
        own = optimizer.state[param.tensor] if fields else {}
        for name, tensor in fields.items():
            known = own.get(name)
            if isinstance(known, torch.Tensor) and known.shape == tensor.shape:
                with torch.no_grad():
                    known.copy_(tensor)
            else:
                own[name] = tensor.clone()


# ------------------------------------------------------------------ places


def _make_slots(paths: Sequence[KeyPath], params: Sequence[Param]) -> list[_StateSlot]:
    """Return for each leaf of a state the parameters that it belongs to."""
    found = _match_paths(paths, [dict_path(param.path) for param in params])
    below: dict[KeyPath, set[int]] = {}
    for path, (owner, _) in zip(paths, found, strict=True):
        if owner is not None:
            for end in range(len(path)):
                below.setdefault(path[:end], set()).add(owner)
    everyone = tuple(i for i, param in enumerate(params) if param.trained)

    def members(path: KeyPath) -> tuple[int, ...]:
        # A count belongs to the parameters with arrays next to it, or, without such arrays, to all trained parameters, which must agree.
        # The search stays inside one part of an optax.partition.
        near_by = (below[path[:end]] for end in range(len(path) - 1, len(_partition_prefix(path)) - 1, -1) if path[:end] in below)
        return tuple(sorted(next(near_by, everyone)))

    return [
        _StateSlot(path, name, owner, members(path) if owner is None else (owner,))
        for path, (owner, name) in zip(paths, found, strict=True)
    ]


def _partition_prefix(path: KeyPath) -> KeyPath:
    """Return the prefix of a key path that leads into a part of an optax.partition; empty if there is none."""
    return path[: max((i + 2 for i, key in enumerate(path) if getattr(key, "name", None) == "inner_states"), default=0)]


def _match_paths(paths: Sequence[KeyPath], names: Sequence[KeyPath]) -> list[tuple[int | None, str]]:
    """Return the parameter of each path, and the rest of the path as a name.

    Each part of an optax.partition has some of the parameters only.
    """
    index = {name: i for i, name in enumerate(names)}
    lengths = sorted(set(map(len, names)))
    parts: dict[KeyPath, list[KeyPath]] = {}
    for path in paths:
        parts.setdefault(_partition_prefix(path), []).append(path)
    found: dict[KeyPath, tuple[int | None, str]] = {}
    for head, own in parts.items():
        inner = [path[len(head) :] for path in own]
        subpaths = {path[start : start + n] for path in inner for n in lengths for start in range(len(path) - n + 1)}
        known = [name for name in names if name in subpaths]
        owner_of = leaf_finder(inner, known) if known else lambda path: (None, path_name(path))
        for path, rest in zip(own, inner, strict=True):
            owner, name = owner_of(rest)
            found[path] = (None if owner is None else index[known[owner]]), path_name(head + rest) if owner is None else name
    return [found[path] for path in paths]


def _field(place: _StateSlot, fields: Iterable[str]) -> str | None:
    """Return the field of a torch optimizer's state that a slot holds: the field with the slot's name, or with torch's name for it."""
    ends = name_suffixes(place.name or "state")
    fields = set(fields)
    same = [field for field in fields if field in ends]
    # torch's RMSprop keeps the momentum of the scaled gradient, optax.rmsprop that of the update, which is lr times as large.
    unlike = {"momentum_buffer"} if "square_avg" in fields else set()
    alike = [field for field in sorted(fields - unlike) if not set(ends).isdisjoint(_OPTAX_NAMES.get(field, ()))]
    return max(same, key=len) if same else next(iter(alike), None) if not place.is_setting else None


def _value_of(
    what: str, place: _StateSlot, params: Sequence[Param], shape: tuple[int, ...], initial: Callable[[], jax.Array], count: int | None
) -> tuple[torch.Tensor | None, list[tuple[int, str]]]:
    """Return the optimizer's value for a slot, None for its initial value; and the fields that the value comes from."""
    found: list[tuple[Param, torch.Tensor]] = []
    source_fields: list[tuple[int, str]] = []
    last = place.name.split(".")[-1]
    for i in place.members:
        param = params[i]
        field = _field(place, param.fields)
        if field is not None:
            source_fields.append((i, field))
            found.append((param, param.fields[field]))
        elif param.fields and last in param.hidden:
            found.append((param, torch.tensor(param.hidden[last])))
        elif (param.fields or param.has_no_state) and place.is_count and count is not None:
            found.append((param, torch.tensor(count)))
        elif (param.fields and not place.is_setting) or (param.has_no_state and place.is_count):
            remedy = (
                "Give count, how many updates there were." if place.is_count else "Give the transformation that goes with it, or no tx."
            )
            raise ValueError(
                f"{what}: the optimizer has nothing for {place.path_text!r}: its state of {param.name!r} has {sorted(param.fields)}. "
                f"{remedy}"
            )
    if not found:
        return None, []
    for param, tensor in found:
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{what}: {place.path_text!r} has shape {shape} in the state of this transformation, but the optimizer's of {param.name!r} "
                f"has {tuple(tensor.shape)}. Give the transformation that goes with it, or no tx."
            )
    late = [params[i] for i in place.members if not (params[i].fields or params[i].has_no_state or place.is_setting)]
    others = found[1:] + [(param, torch.as_tensor(np.asarray(initial()))) for param in late[:1]]
    for param, tensor in others:
        if tensor is not found[0][1] and not torch.equal(tensor.to(found[0][1].dtype), found[0][1]):
            _raise_disagreement(what, place, found[0], (param, tensor))
    return found[0][1], source_fields


def _raise_disagreement(what: str, place: _StateSlot, one: tuple[Param, torch.Tensor], other: tuple[Param, torch.Tensor]) -> NoReturn:
    (a, x), (b, y) = one, other
    raise ValueError(
        f"{what}: {place.path_text!r} is one for {a.name!r} and {b.name!r}, of which the optimizer has {_describe_value(x)} and "
        f"{_describe_value(y)}: one is frozen, or had fewer gradients. Give a tx that separates them: bridge.select(tx, mask), or "
        "optax.partition with a label for each."
    )


def _describe_value(tensor: torch.Tensor) -> str:
    return str(tensor.item()) if tensor.numel() == 1 else f"different arrays of shape {tuple(tensor.shape)}"


class _StateTemplate:
    """The initial state of a transformation, as shapes. Arrays are computed only when they are needed."""

    def __init__(self, what: str, tx: object, params: Sequence[Param]) -> None:
        self._what, self._params = what, params
        init_state = getattr(tx, "init", None)
        if not callable(init_state) or isinstance(tx, type):
            raise TypeError(
                f"{what}: tx is {getattr(tx, '__name__', repr(tx))}; expected an optax transformation, such as optax.adam(1e-3), or None."
            )
        self._init: Callable[[PyTree], PyTree] = init_state
        self._initial_leaves: list[jax.Array] | None = None
        types = [numpy_dtype(param.tensor.dtype) for param in params]
        self._keeps_64bit = any(dtype in (np.float64, np.complex128) for dtype in types)
        keys: list[Hashable] = []

        def init(tree: PyTree) -> PyTree:
            state = self._init(tree)
            keys[:] = [jax.random.key_impl(x) if is_prng_key(x) else None for x in jax.tree.leaves(state)]
            return jax.tree.map(lambda x: jax.random.key_data(x) if is_prng_key(x) else jnp.asarray(x), state)

        shapes = [jax.ShapeDtypeStruct(tuple(param.tensor.shape), dtype) for param, dtype in zip(params, types, strict=True)]
        with x64(self._keeps_64bit), default_promotion():
            abstract_state = jax.eval_shape(init, nest_by_path((param.path, shape) for param, shape in zip(params, shapes, strict=True)))
        flat, self.structure = jax.tree_util.tree_flatten_with_path(abstract_state)
        self.slots = _make_slots([path for path, _ in flat], params)
        self._leaves = [(aval, key) for (_, aval), key in zip(flat, keys, strict=True)]
        self.shapes = [aval.shape for aval, _ in self._leaves]

    def initial(self, position: int) -> jax.Array:
        """Return the initial value of a leaf."""
        if self._initial_leaves is None:  # copies, because an init may return the parameters themselves
            tree = nest_by_path((param.path, to_jax(param.tensor.detach(), copy=True)) for param in self._params)
            with x64(self._keeps_64bit), default_promotion():
                self._initial_leaves = jax.tree.leaves(self._init(tree))
        return self._initial_leaves[position]

    def array(self, position: int, tensor: torch.Tensor, copy: bool) -> jax.Array:
        """Return the tensor as this leaf, in the leaf's dtype, unless that dtype would lose digits."""
        aval, key = self._leaves[position]
        if key is not None:
            return jax.random.wrap_key_data(to_jax(tensor, copy=True), impl=key)
        target = getattr(torch, str(aval.dtype))
        tensor = tensor.to(target) if _holds_exactly(tensor, target) else tensor
        return to_jax(tensor, copy=True if copy or tensor.ndim == 0 else None)


def _holds_exactly(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether another dtype holds the values exactly."""
    if tensor.dtype == dtype or torch.promote_types(tensor.dtype, dtype) == dtype:
        return True
    return tensor.numel() == 1 and bool(tensor.to(dtype).to(tensor.dtype) == tensor)


# ------------------------------------------------------------------ back


def _expected_fields(optimizer: torch.optim.Optimizer, param: Param) -> dict[str, _ExpectedField]:
    """Return shape (None: any), dtype and device of each state field of a parameter: as it is, or as a step would make it."""
    if not param.trained:
        return {}
    p = param.tensor
    wanted: dict[str, _ExpectedField] = {}
    for name, field in expected_state(optimizer, param).items():
        shape = None if field.state_index == -1 else tuple(p.shape) if field.shape is None else tuple(field.shape)
        wanted[name] = shape, getattr(torch, field.dtype), scalar_device(optimizer, param) if shape == () else p.device
    return wanted | {name: (tuple(x.shape), x.dtype, x.device) for name, x in param.fields.items()}


def _to_tensors(what: str, places: Sequence[_StateSlot], flat: Sequence[tuple[KeyPath, object]]) -> list[torch.Tensor]:
    """Return the leaves of a state as tensors, without a copy where possible."""
    arrays: dict[str, jax.typing.ArrayLike | torch.Tensor] = {}
    for place, (_, x) in zip(places, flat, strict=True):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | torch.Tensor | float | int):
            raise ValueError(f"{what}: {place.path_text!r} is {x!r}; expected an array. Give the state of `tx.init` or `tx.update`.")
        arrays[place.path_text] = jax.random.key_data(x) if is_prng_key(x) else x  # pyright: ignore
    jax.block_until_ready([x for x in arrays.values() if not isinstance(x, Tracer) and isinstance(x, jax.Array) and not x.is_deleted()])
    with x64():
        arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for name, x in arrays.items()}
    tensors = to_torch(arrays, copy=None)
    return [torch.as_tensor(tensors[place.path_text]).detach() for place in places]


def _fields_by_param(
    what: str,
    params: Sequence[Param],
    expected: Sequence[Mapping[str, _ExpectedField]],
    slots_and_tensors: Iterable[tuple[_StateSlot, torch.Tensor]],
    count: int | None,
) -> list[dict[str, torch.Tensor]]:
    """Return the new fields of each parameter, in the dtypes of its present fields."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in params]
    names: set[str] = set()
    for place, tensor in slots_and_tensors:
        names.add(place.name)
        hits = [(i, field) for i in place.members if (field := _field(place, expected[i])) is not None]
        hidden = any(place.name.split(".")[-1] in params[i].hidden for i in place.members if params[i].trained)
        if not (hits or hidden or place.is_setting or place.is_count):
            _raise_unused(what, place, params, expected)
        for i, field in hits:
            fitted = _fit_to(what, place, tensor, *expected[i][field])
            known = found[i].setdefault(field, fitted)
            if known is not fitted and not torch.equal(known, fitted):
                raise ValueError(
                    f"{what}: the state has two values for {field!r} of {params[i].name!r}, the second at {place.path_text!r}. Give the "
                    "part of the state that is the optimizer's."
                )
    for param, fields, own in zip(params, found, expected, strict=True):
        for field in own.keys() - fields.keys():
            if field == "step" and count is not None:
                fields[field] = torch.tensor(count, dtype=own[field][1], device=own[field][2])
            elif field != "step" or field not in param.fields:
                remedy = "Give count, how many updates there were." if field == "step" else f"Names there: {', '.join(sorted(names))}."
                raise ValueError(f"{what}: the state has nothing for {field!r} of {param.name!r}. {remedy}")
    return found


def _raise_unused(what: str, place: _StateSlot, params: Sequence[Param], expected: Sequence[Mapping[str, _ExpectedField]]) -> NoReturn:
    """Raise an error for an array of a state that no field of the optimizer takes."""
    if place.param_index is not None and not params[place.param_index].trained:
        raise ValueError(
            f"{what}: {place.path_text!r} is state of {params[place.param_index].name!r}, which is frozen in this optimizer. Train it "
            "(set_trainable, requires_grad), or leave its state out (optax.MaskedNode)."
        )
    if place.param_index is not None:
        fields = sorted(expected[place.param_index])
        raise ValueError(f"{what}: {place.path_text!r} is no state of this optimizer, whose fields are {fields}. It would be lost.")
    depth = len(params[0].path)
    raise ValueError(
        f"{what}: {place.path_text!r} belongs to no parameter. "
        f"{did_you_mean('.'.join(place.path_text.split('.')[-depth:]), [p.name for p in params])}"
    )


def _fit_to(
    what: str, place: _StateSlot, tensor: torch.Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{what}: {place.path_text!r} has shape {tuple(tensor.shape)}; expected {shape}.")
    if not _holds_exactly(tensor, dtype):
        raise ValueError(
            f"{what}: {place.path_text!r} has dtype {tensor.dtype}; the optimizer keeps {dtype}, in which digits would be lost. Cast it "
            "first, or construct with state_dtype."
        )
    return tensor.to(dtype=dtype, device=device)
