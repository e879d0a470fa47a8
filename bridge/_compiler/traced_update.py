"""A transformation traced over the leaves of an `UpdateSpec`, for the separability analysis."""

# jax annotates many of its functions only partially, and modules of this project share names that begin with an underscore.
# pyright: reportUnknownMemberType=false, reportUnusedClass=false

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import jax
import numpy as np

from bridge._ir.classify import ELEMENTWISE
from bridge._ir.fingerprint import ShapeFreeText, aval_text, constant_text, params_text
from bridge._ir.jaxpr import backward_slice, inline_calls, make_slicer, trace_to_jaxpr, uniform_values
from bridge._ir.queries import properties_of
from bridge._ir.types import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, aval_of, open_jaxpr
from bridge._process import x64

from .apply_transform import UpdateArrays, evaluate, init_state
from .passes.flatten import FlatProgram
from .passes.hoist import Rest, known
from .spec import ById, ExtraArgsSpec, StateField, UpdateSpec, buffer_shape
from .state_layout import state_layout

_COUNT_DTYPES = ("int32", "int64", "uint32", "bool")
_BODIES = ("jaxpr", "call_jaxpr")  # parameters that hold the jaxpr of a called function
REAL_DTYPES = {"complex64": "float32", "complex128": "float64"}


_SEVERAL_LEAVES = -1
ValueName: TypeAlias = tuple[str, int | None]  # of an input or output, and the leaf that it belongs to (None: shared by all)


class TracedUpdate:
    """The traced `init` and `update` of some leaves, from which the equations of each leaf can be taken."""

    def __init__(self, update_spec: UpdateSpec, extra: ExtraArgsSpec) -> None:
        self.update_spec = update_spec
        layout, specs = state_layout(update_spec), update_spec.specs
        leaf = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
        fields = [[(f, spec.shape) for f in own] for own, spec in zip(layout.leaf_fields, specs, strict=True)] + [
            [(f, ()) for f in layout.shared_fields]
        ]
        state = [[jax.ShapeDtypeStruct(like if f.shape is None else f.shape, f.dtype) for f, like in part] for part in fields]
        arrays = UpdateArrays(leaf, leaf, state[:-1], state[-1])
        extra_arrays = [jax.ShapeDtypeStruct(*x) for x in extra.leaves if not isinstance(x, ById)]

        def run(
            arrays: UpdateArrays[jax.Array], values: jax.Array, multipliers: Sequence[jax.Array], further: list[jax.Array]
        ) -> tuple[UpdateArrays[jax.Array], UpdateArrays[jax.Array]]:
            after = evaluate(update_spec, arrays, values, multipliers, None, None, extra.unflatten(further))
            return after, init_state(update_spec, update_spec.as_hyperparams(values), arrays.params)

        scalars = (
            jax.ShapeDtypeStruct((update_spec.transform.num_scalars,), np.float64),
            [jax.ShapeDtypeStruct((), np.float64)] * len(specs),
        )
        with x64():
            closed, _ = trace_to_jaxpr(run, arrays, *scalars, extra_arrays)
        flat = [
            [jax.ShapeDtypeStruct(buffer_shape(f, spec), f.dtype) for f in own] for own, spec in zip(layout.leaf_fields, specs, strict=True)
        ]
        leaf = [jax.ShapeDtypeStruct((math.prod(spec.shape),), spec.dtype) for spec in specs]
        buffers = UpdateArrays(leaf, leaf, flat, [jax.ShapeDtypeStruct(buffer_shape(f), f.dtype) for f in layout.shared_fields])
        self._flat_inputs, self._flat_results = (buffers, scalars, extra_arrays), buffers._replace(grads=[])
        names = [f.name for own in layout.leaf_fields for f in own], [f.name for f in layout.shared_fields]
        each = range(len(specs))
        owners = [i for i, own in enumerate(layout.leaf_fields) for _ in own]
        self.jaxpr: Jaxpr = closed.jaxpr
        self._consts, self._shapes = closed.consts, [spec.shape for spec in specs]
        # For each leaf, the shape of each field by name; None for the leaf's own shape.
        self._fields = [{f.name: f.shape for f in (*own, *layout.shared_fields)} for own in layout.leaf_fields]
        # The name of each input and output in the text.
        states: list[ValueName] = [*zip(names[0], owners, strict=True), *((name, None) for name in names[1])]
        others: list[ValueName] = [
            ("values", None),
            *(("multiplier", i) for i in each),
            *((f"extra{i}", None) for i in range(len(extra_arrays))),
        ]
        self._inputs: list[ValueName] = [*(("param", i) for i in each), *(("grad", i) for i in each), *states, *others]
        init_outputs: list[ValueName] = [
            *((f.name, i) for i, own in enumerate(layout.leaf_fields) for f in own if f.state_index is not None),
            *((f.name, None) for f in layout.shared_fields),
        ]
        outputs: list[ValueName] = [*(("param", i) for i in each), *states, *((f"init {name}", i) for name, i in init_outputs)]
        results = list(zip(outputs, self.jaxpr.outvars, strict=True))
        self._update_outputs, self._init_outputs = results[: len(specs) + len(states)], results[len(specs) + len(states) :]
        self._results = sorted(results, key=lambda pair: pair[0][0])
        self._constants = {var: constant_text(value) for var, value in zip(self.jaxpr.constvars, closed.consts, strict=True)}
        self._find_dependencies()

    def _find_dependencies(self) -> None:
        """Find for each variable its equation and the leaf that it depends on: None for no leaf, `_SEVERAL_LEAVES` for more than one."""
        self._depends_on: dict[Var, int | None] = {}
        self._producers: dict[Var, Eqn] = {}
        for var, (_, owner) in zip(self.jaxpr.invars, self._inputs, strict=True):
            self._depends_on[var] = owner
        for eqn in self.jaxpr.eqns:
            owners = {self._depends_on.get(v) for v in eqn.invars if not isinstance(v, Literal)} - {None}
            owner = _SEVERAL_LEAVES if len(owners) > 1 else next(iter(owners), None)
            for var in eqn.outvars:
                self._depends_on[var], self._producers[var] = owner, eqn

    def leaf_text(self, index: int, marked: bool = True) -> str | None:
        """Return the equations of a leaf as text, one a line, with the leaf's shape as L if `marked`; None if they read another leaf."""
        like = self._shapes[index] if marked else None
        lines: list[str] = []
        self._names = dict(self._constants)
        for var, (name, owner) in zip(self.jaxpr.invars, self._inputs, strict=True):
            if owner is None or owner == index:
                self._names[var] = name
        results: list[str] = []
        for (name, owner), var in self._results:
            if owner is not None and owner != index:
                continue
            if not isinstance(var, Literal) and self._depends_on.get(var) not in (None, owner):
                return None
            results.append(f"{name} = {self._write_var(var, lines, like)}")
        return "\n".join([*lines, *results])

    def shape_free_text(self, index: int) -> str | None:
        """Return the equations of a leaf, which read no other leaf, as text without the leaf's shape; None if they depend on the shape."""
        shape, size = self._shapes[index], math.prod(self._shapes[index])
        if size < 2:
            return None  # a scalar and the whole leaf would have the same size
        inputs = [(var, name) for var, (name, owner) in zip(self.jaxpr.invars, self._inputs, strict=True) if owner in (None, index)]
        results = [(name, var) for (name, owner), var in self._results if owner in (None, index)]
        wanted = [var for _, var in results]
        own = self.jaxpr.replace(invars=[var for var, _ in inputs], outvars=wanted, eqns=backward_slice(self.jaxpr.eqns, wanted))
        with x64():
            closed = inline_calls(own, self._consts)
        named = {
            var: (name, self._depends_on[old] == index and aval_of(old).shape == shape)
            for var, (old, name) in zip(closed.jaxpr.invars, inputs, strict=True)
        }
        found = ShapeFreeText(closed, size, named).text([(name, var) for (name, _), var in zip(results, closed.jaxpr.outvars, strict=True)])
        return None if found is None else f"{found}\n{sorted(self._fields[index].items())}"

    @functools.cached_property
    def flat_program(self) -> FlatProgram | None:
        """The update without `init`, for flat arrays; None if it calls back into Python."""
        if properties_of(self.jaxpr).has_callback:
            return None
        update = self.jaxpr.replace(outvars=[var for _, var in self._update_outputs])
        with x64():
            return FlatProgram.from_jaxpr(ClosedJaxpr(update, self._consts), self._flat_inputs, self._flat_results)

    def initial_scalars(self) -> UpdateArrays[np.generic] | None:
        """Return the result of `bridge._compiler.separability.initial_scalars`."""
        number_of = uniform_values(self.jaxpr)
        columns: list[list[np.generic]] = [[] for _ in self._shapes]
        shared: list[np.generic] = []
        for (_, owner), var in self._init_outputs:
            number = number_of(var)
            if number is None:
                return None
            (shared if owner is None else columns[owner]).append(number)
        return UpdateArrays([], [], columns, shared)

    def bucket_classes(self) -> tuple[int | None, ...] | None:
        """Return the result of `bridge._compiler.separability.bucket_classes`; None if the update calls back into Python."""
        if self.flat_program is None:
            return None
        jaxpr: Jaxpr = self.flat_program.closed.jaxpr
        name_of = dict(zip(jaxpr.invars, self._inputs, strict=True))
        behind, is_known = make_slicer(jaxpr.eqns), set(known(jaxpr))

        # For each array, the inputs that it is computed from elementwise; None if it is not computed elementwise.
        inputs: dict[Var, frozenset[ValueName] | None] = {v: frozenset([name]) for v, name in name_of.items()}

        def read_from(rest: Rest | None) -> frozenset[ValueName] | None:
            found = [None] if rest is None else [inputs.get(v) for v in rest.arrays]
            return None if None in found else frozenset[ValueName]().union(*(each for each in found if each is not None))

        for v in (v for eqn in jaxpr.eqns for v in eqn.outvars if v in is_known and aval_of(v).size > 1):
            inputs[v] = read_from(Rest.of(behind, is_known - {v}, [(0, v)], aval_of(v).size))
        outputs: list[list[tuple[int, Atom]]] = [[] for _ in self._shapes]
        for at, ((name, owner), var) in enumerate(zip((pair for pair, _ in self._update_outputs), jaxpr.outvars, strict=True)):
            if owner is not None and self._fields[owner].get(name) is None:  # the parameter, or state of its shape
                outputs[owner].append((at, var))
        found: list[int | None] = []
        seen: dict[Hashable, int] = {}
        for i, (shape, own) in enumerate(zip(self._shapes, outputs, strict=True)):
            new = [(at, v) for at, v in own if isinstance(v, Literal) or name_of.get(v) != self._update_outputs[at][0]]  # others are inputs
            rest = Rest.of(behind, is_known, new, math.prod(shape))
            read = None if rest is None or len(rest.places) < len(new) else read_from(rest)
            if rest is None or read is None or any(owner != i for _, owner in read):
                found.append(None)
            else:
                fields = tuple(field._replace(state_index=None) for field in state_layout(self.update_spec).leaf_fields[i])
                found.append(seen.setdefault((rest.text((math.prod(shape),)), frozenset(name for name, _ in read), fields), len(seen)))
        return tuple(found)

    def _write_var(self, var: Atom, lines: list[str], like: tuple[int, ...] | None) -> str:
        """Return the variable's name in the text, and append the lines that compute it."""
        if isinstance(var, Literal):
            return f"{var.val}:{aval_text(var.aval, like)}"
        stack = [var]
        while stack:
            top = stack[-1]
            if top in self._names:
                stack.pop()
                continue
            eqn = self._producers[top]
            waiting = [v for v in eqn.invars if not isinstance(v, Literal) and v not in self._names]
            if waiting:
                stack.extend(waiting)
                continue
            operands = ", ".join(self._write_var(v, lines, like) for v in eqn.invars)
            line = f"{eqn.primitive.name}[{params_text(eqn.params, like)}] {operands} -> {[aval_text(v.aval, like) for v in eqn.outvars]}"
            for position, out in enumerate(eqn.outvars):
                self._names[out] = f"%{len(lines)}.{position}"
            lines.append(line)
        return self._names[var]

    def can_be_per_leaf(self, field: StateField) -> bool:
        """Return whether each leaf may have its own copy of a shared field.

        A count may be copied, and so may a small array that the update never changes. Another scalar may not: a user may change it by
        hand.
        """
        if field.shape == () or field.key_impl:
            return field.dtype in _COUNT_DTYPES and not field.key_impl
        before = next(var for var, name in zip(self.jaxpr.invars, self._inputs, strict=True) if name == (field.name, None))
        after = next(var for name, var in self._results if name == (field.name, None))
        return after is before and aval_of(before).size <= 64

    @property
    def is_elementwise(self) -> bool:
        """Whether each element of the only leaf is computed from that element of the leaf and of its state, and from scalars."""
        return _is_elementwise(self.jaxpr, self._shapes[0])


def _is_elementwise(jaxpr: Jaxpr, shape: tuple[int, ...]) -> bool:
    if any(aval_of(v).shape == shape for v in jaxpr.constvars):
        return False
    for eqn in jaxpr.eqns:
        shapes = {tuple(aval_of(v).shape) for v in (*eqn.invars, *eqn.outvars)}
        bodies = [open_jaxpr(eqn.params[name]) for name in _BODIES if name in eqn.params]
        if shapes <= {()}:
            continue
        if any(isinstance(v, Literal) and np.shape(v.val) != () for v in eqn.invars):
            return False  # a constant with a value for each element depends on the position in the leaf
        spread = eqn.primitive.name == "broadcast_in_dim" and tuple(aval_of(eqn.invars[0]).shape) == ()
        taken_apart = eqn.primitive.name in ("slice", "squeeze", "dynamic_slice", "gather") and shapes.isdisjoint({shape})
        if bodies and all(_is_elementwise(body, shape) for body in bodies) and eqn.primitive.name not in ("scan", "while", "cond"):
            continue
        if not (taken_apart or (shapes <= {(), shape} and (spread or eqn.primitive.name in ELEMENTWISE))):
            return False
    return True
