"""Torch's recurrent layers: one `lax.scan` over time for each layer and direction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from bridge._tracing.materialize import materialize, on_cpu
from bridge._tracing.op_registry import Op, add_ops, op

from .layers import dropout


class Cell(NamedTuple):
    """The elementwise part of one time step. `gates` and `hidden` are what input and hidden state contribute to the gates.

    new: `(gates, hidden, state, stored)` to the new state, whose first array is the hidden state. `stored`: store each gate before it is
      read, which is faster on a CPU.
    slopes: `(gates, hidden, state)` to the derivatives that `change` needs, for all steps at once.
    change: `(slopes, d_gates, d_hidden, d_state)` to the tangent of the new state, linear in the last three.
    """

    new: Callable[[Any, Any, tuple[Any, ...], bool], tuple[Any, ...]]
    slopes: Callable[[Any, Any, tuple[Any, ...]], Any]
    change: Callable[[Any, Any, Any, tuple[Any, ...]], tuple[Any, ...]]


def _lstm_gates(gates: Any, hidden: Any) -> list[Any]:
    i, f, g, o = jnp.split(gates + hidden, 4, axis=-1)
    return [jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)]


def _lstm(gates: Any, hidden: Any, state: tuple[Any, ...], stored: bool) -> tuple[Any, ...]:
    i, f, g, o = (materialize(x, stored) for x in _lstm_gates(gates, hidden))
    c = f * state[1] + i * g
    return o * jnp.tanh(c), c


def _lstm_slopes(gates: Any, hidden: Any, state: tuple[Any, ...]) -> Any:
    """Return the derivatives by the gates, of the new cell state by the old one, and of the hidden state by the new cell state."""
    (i, f, g, o), c = _lstm_gates(gates, hidden), state[1]
    top = jnp.tanh(f * c + i * g)
    of_gates = jnp.concatenate([g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), top * o * (1 - o)], -1)
    return of_gates, f, o * (1 - top * top)


def _lstm_change(slopes: Any, d_gates: Any, d_hidden: Any, d_state: tuple[Any, ...]) -> tuple[Any, ...]:
    of_gates, of_c, of_new = slopes
    i, f, g, o = jnp.split(of_gates * (d_gates + d_hidden), 4, axis=-1)
    c = of_c * d_state[1] + i + f + g
    return o + of_new * c, c


def _gru_gates(gates: Any, hidden: Any) -> list[Any]:
    """Return the gates. The reset gate multiplies what the hidden state contributes, bias included, as in cuDNN."""
    (ir, iz, inew), (hr, hz, hnew) = (jnp.split(x, 3, axis=-1) for x in (gates, hidden))
    r = jax.nn.sigmoid(ir + hr)
    return [r, jax.nn.sigmoid(iz + hz), jnp.tanh(inew + r * hnew), hnew]


def _gru(gates: Any, hidden: Any, state: tuple[Any, ...], stored: bool) -> tuple[Any, ...]:
    _, z, new, _ = (materialize(x, stored) for x in _gru_gates(gates, hidden))
    return ((1 - z) * new + z * state[0],)


def _gru_slopes(gates: Any, hidden: Any, state: tuple[Any, ...]) -> Any:
    r, z, new, hnew = _gru_gates(gates, hidden)
    of_new = (1 - z) * (1 - new * new)
    of_gates = jnp.concatenate([of_new * hnew * r * (1 - r), (state[0] - new) * z * (1 - z), of_new], -1)
    return of_gates, r, z


def _gru_change(slopes: Any, d_gates: Any, d_hidden: Any, d_state: tuple[Any, ...]) -> tuple[Any, ...]:
    of_gates, r, z = slopes
    (ir, iz, inew), (hr, hz, hnew) = (jnp.split(of_gates * x, 3, axis=-1) for x in (d_gates, d_hidden))
    return (ir + hr + iz + hz + inew + r * hnew + z * d_state[0],)


def _rnn_cell(activation: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Cell:
    """Return the cell of a plain network. `slope`: the derivative of the activation, as a function of its result."""
    new = lambda gates, hidden, state, stored=False: (activation(gates + hidden),)  # noqa: E731
    return Cell(new, lambda *given: slope(*new(*given)), lambda slope, d_gates, d_hidden, _: (slope * (d_gates + d_hidden),))


_CELLS = {
    "lstm": Cell(_lstm, _lstm_slopes, _lstm_change),
    "gru": Cell(_gru, _gru_slopes, _gru_change),
    "rnn_tanh": _rnn_cell(jnp.tanh, lambda h: 1 - h * h),
    "rnn_relu": _rnn_cell(jax.nn.relu, lambda h: (h > 0).astype(h.dtype)),
}


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    out = x @ weight.T
    return out if bias is None else out + bias


def _run_direction(
    cell: Cell, x: Any, state: tuple[Any, ...], weights: Sequence[Any], reverse: bool, there: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Run one direction of a layer over (T, N, F). `there`: mask (T, N) of the steps that a sequence has; None for all."""
    w_ih, w_hh, b_ih, b_hh, projection = weights
    gates = _affine(x, w_ih, b_ih)
    if projection is None and there is None:
        bias = jnp.zeros(w_hh.shape[0], w_hh.dtype) if b_hh is None else b_hh
        return _recurrence(cell, reverse, on_cpu(), gates, state, w_hh, bias)

    def step(state: tuple[Any, ...], given: Any) -> tuple[Any, Any]:
        g, here = given
        h, *rest = cell.new(g, _affine(state[0], w_hh, b_hh), state, on_cpu())
        new = h if projection is None else h @ projection.T, *rest
        state = new if here is None else tuple(jnp.where(here[:, None], now, before) for now, before in zip(new, state, strict=True))
        return state, state[0]

    last, out = lax.scan(step, state, (gates, there), reverse=reverse)
    return out, last


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _recurrence(
    cell: Cell, reverse: bool, stored: bool, gates: Any, state: tuple[Any, ...], weight: Any, bias: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Run all steps from the gates (T, N, G) of the input. Return the hidden states (T, N, H) and the last state."""

    def step(state: tuple[Any, ...], g: Any) -> tuple[Any, Any]:
        state = cell.new(g, _affine(state[0], weight, bias), state, stored)
        return state, state[0]

    last, out = lax.scan(step, state, gates, reverse=reverse)
    return out, last


@functools.partial(_recurrence.defjvp, symbolic_zeros=True)
def _(cell: Cell, reverse: bool, stored: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the tangent. The gradient of the weight is one product after the loop, not a sum of one product for each step."""
    (gates, state, weight, bias), (d_gates, d_state, d_weight, d_bias) = primals, tangents
    d_gates, d_state, d_bias = jax.tree.map(_instantiate_zeros, (d_gates, d_state, d_bias), is_leaf=_is_zero)

    def step(state: tuple[Any, ...], g: Any) -> tuple[Any, Any]:
        hidden = _affine(state[0], weight, bias)
        new = cell.new(g, hidden, state, stored)
        return new, (state, hidden, new[0])

    def change(d_state: tuple[Any, ...], given: Any) -> tuple[Any, Any]:
        d_g, d_hidden, slopes = given
        # Not weight.T: the transposed product would read it across its rows, which is slower on a CPU for a few rows.
        d_hidden += lax.dot_general(d_state[0], weight, (((1,), (1,)), ((), ())))
        d_new = cell.change(slopes, d_g, d_hidden, d_state)
        return d_new, d_new[0]

    last, (before, hidden, out) = lax.scan(step, state, gates, reverse=reverse)
    slopes = cell.slopes(gates, hidden, before)
    d_hidden = jnp.broadcast_to(d_bias, hidden.shape) if _is_zero(d_weight) else _affine(before[0], d_weight, d_bias)
    linear = d_state, d_gates, d_hidden

    def changes(linear: tuple[Any, ...]) -> Any:
        d_state, d_gates, d_hidden = linear
        return lax.scan(change, d_state, (d_gates, d_hidden, slopes), reverse=reverse)

    # jax 0.8 transposes only loops that it has differentiated.
    d_last, d_out = jax.jvp(changes, (jax.tree.map(jnp.zeros_like, linear),), (linear,))[1]
    return (out, last), (d_out, d_last)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _instantiate_zeros(tangent: Any) -> Any:
    return jnp.zeros(tangent.shape, tangent.dtype) if _is_zero(tangent) else tangent


def _run_layers(
    cell: Any,
    input: Any,
    states: tuple[Any, ...],
    params: Any,
    has_biases: bool,
    num_layers: int,
    p: float,
    train: bool,
    both: bool,
    first: bool,
    there: Any = None,
) -> tuple[Any, ...]:
    """Run all layers and directions. Return the outputs of the last layer, and the last states of all.

    `both`: in both directions. `first`: the batch is the first dim. `there`: mask (T, N) of the steps that a sequence has.
    """
    x = jnp.swapaxes(input, 0, 1) if first else input
    directions = 2 if both else 1
    width = len(params) // (num_layers * directions)
    lasts = []
    for layer in range(num_layers):
        outs = []
        for d in range(directions):
            k = layer * directions + d
            own = list(params[k * width : (k + 1) * width])
            weights = own[:4] if has_biases else [*own[:2], None, None]
            weights.append(own[-1] if width in (3, 5) else None)
            out, last = _run_direction(cell, x, tuple(s[k] for s in states), weights, d == 1, there)
            outs.append(out)
            lasts.append(last)
        x = jnp.concatenate(outs, -1) if both else outs[0]
        if layer < num_layers - 1:
            x = dropout(x, p, train)
    return jnp.swapaxes(x, 0, 1) if first else x, *(jnp.stack(s) for s in zip(*lasts, strict=True))


def _as_state_tuple(hx: Any) -> tuple[Any, ...]:
    return tuple(hx) if isinstance(hx, tuple | list) else (hx,)


def _concrete_lengths(lengths: Any) -> np.ndarray[Any, Any]:
    """Return lengths or batch sizes, whose values decide shapes. Raise an error if they are traced."""
    if isinstance(lengths, Tracer):
        raise jax.errors.ConcretizationTypeError(lengths, "lengths decide shapes")
    return np.asarray(lengths)


def _run_packed(
    cell: Any, data: Any, sizes: Any, hx: Any, params: Any, has_biases: bool, layers: int, p: float, train: bool, both: bool
) -> tuple[Any, ...]:
    """Run a network over a PackedSequence, as a padded batch in which a sequence that has ended keeps its state."""
    there, places = _packed_positions(_concrete_lengths(sizes))
    out, *lasts = _run_layers(
        cell, data[places], _as_state_tuple(hx), params, has_biases, layers, p, train, both, False, jnp.asarray(there)
    )
    return out[there.nonzero()], *lasts


def _packed_positions(sizes: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the mask (T, N) of the steps that the sequences have, and their positions in the packed data (0 for other steps)."""
    there = np.arange(sizes[0]) < sizes[:, None]
    return there, np.where(there, (np.cumsum(sizes) - sizes)[:, None] + np.arange(sizes[0]), 0)


@op("_pack_padded_sequence")
def pack_padded_sequence(input: Any, lengths: Any, batch_first: bool) -> tuple[Any, torch.Tensor]:
    """Return the steps that the sequences of a padded batch have, in order of time, and the number of sequences at each time."""
    known, x = _concrete_lengths(lengths), jnp.swapaxes(input, 0, 1) if batch_first else input
    if not known.size or known[-1] < 1 or (np.diff(known) > 0).any() or known[0] > x.shape[0] or known.size != x.shape[1]:
        raise RuntimeError(
            f"pack_padded_sequence is given lengths {known.tolist()} for {x.shape[1]} sequences of at most {x.shape[0]} steps; expected "
            "one length of 1 or more for each sequence, in decreasing order. Pass enforce_sorted=False to have them sorted."
        )
    there = np.arange(known[0])[:, None] < known
    return x[there.nonzero()], _lengths_tensor(there.sum(1))


@op("_pad_packed_sequence")
def pad_packed_sequence(
    data: jax.Array, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Any, torch.Tensor]:
    """Return the padded batch of a PackedSequence, and the lengths of its sequences."""
    there, places = _packed_positions(_concrete_lengths(batch_sizes))
    more = [(0, int(total_length) - len(there)), (0, 0)]
    there, places = np.pad(there, more), np.pad(places, more)
    out = jnp.where(there.reshape(*there.shape, *[1] * (data.ndim - 1)), data[places], jnp.asarray(padding_value, data.dtype))
    return jnp.swapaxes(out, 0, 1) if batch_first else out, _lengths_tensor(there.sum(0))


def _lengths_tensor(counts: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return lengths as a plain torch tensor on the CPU, as torch does: code may branch on them."""
    with torch.DisableTorchFunction():
        return torch.from_numpy(counts.astype(np.int64))


def _register_network(name: str, cell: Any) -> None:
    """Register a torch function that runs all layers of a network."""

    def run(input: Any, hx: Any, params: Any, has_biases: Any, layers: Any, p: Any, train: Any, both: Any, first: Any = False) -> Any:
        if isinstance(has_biases, tuple | list):  # torch's overload for a PackedSequence: input, batch sizes, hx, weights, ...
            return _run_packed(cell, input, hx, params, has_biases, layers, p, train, both, first)
        return _run_layers(cell, input, _as_state_tuple(hx), params, has_biases, layers, p, train, both, first)

    add_ops({getattr(torch, name): Op(run, None)})


def _register_cell(name: str, cell: Any) -> None:
    """Register a torch function that runs one time step."""

    def run(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = _as_state_tuple(hx)
        state = cell.new(_affine(input, w_ih, b_ih), _affine(state[0], w_hh, b_hh), state, on_cpu())
        return state if len(state) > 1 else state[0]

    add_ops({getattr(torch, name): Op(run, None)})


for _name, _one in _CELLS.items():
    _register_network(_name, _one)
    _register_cell(f"{_name}_cell", _one)
