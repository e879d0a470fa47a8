"""torch's recurrent layers: a `lax.scan` over time for each layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from .torch_calls import OPS, Op
from .torch_layers import dropout


def lstm_cell(gates: Any, state: tuple[Any, Any], weights: Sequence[Any]) -> tuple[Any, Any]:
    """One step: gates of the input are given, those of the hidden state are added."""
    h, c = state
    i, f, g, o = jnp.split(gates + _hidden(h, weights), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h if weights[4] is None else h @ weights[4].T), c


def gru_cell(gates: Any, state: tuple[Any], weights: Sequence[Any]) -> tuple[Any]:
    """One step; the reset gate acts on the hidden state's own share, as in cuDNN."""
    (h,) = state
    ir, iz, inew = jnp.split(gates, 3, axis=-1)
    hr, hz, hnew = jnp.split(_hidden(h, weights), 3, axis=-1)
    new = jnp.tanh(inew + jax.nn.sigmoid(ir + hr) * hnew)
    z = jax.nn.sigmoid(iz + hz)
    return ((1 - z) * new + z * h,)


def rnn_cell(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    """One step of a plain network."""
    return lambda gates, state, weights: (activation(gates + _hidden(state[0], weights)),)


def _hidden(h: Any, weights: Sequence[Any]) -> Any:
    out = h @ weights[1].T
    return out if weights[3] is None else out + weights[3]


def _direction(cell: Any, x: Any, state: tuple[Any, ...], weights: Sequence[Any], reverse: bool) -> tuple[Any, tuple[Any, ...]]:
    gates = x @ weights[0].T
    gates = gates if weights[2] is None else gates + weights[2]

    def step(state: tuple[Any, ...], g: Any) -> tuple[Any, Any]:
        state = cell(g, state, weights)
        return state, state[0]

    last, out = lax.scan(step, state, gates, reverse=reverse)
    return out, last


def _layers(
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
) -> tuple[Any, ...]:
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
            out, last = _direction(cell, x, tuple(s[k] for s in states), weights, d == 1)
            outs.append(out)
            lasts.append(last)
        x = jnp.concatenate(outs, -1) if both else outs[0]
        if layer < num_layers - 1:
            x = dropout(x, p, train)
    return jnp.swapaxes(x, 0, 1) if first else x, *(jnp.stack(s) for s in zip(*lasts, strict=True))


def _network(name: str, cell: Any) -> None:
    def run(input: Any, hx: Any, params: Any, has_biases: bool, layers: int, p: float, train: bool, both: bool, first: bool = False) -> Any:
        states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        return _layers(cell, input, states, params, has_biases, layers, p, train, both, first)

    OPS[getattr(torch, name)] = Op(run, None)


def _cell(name: str, cell: Any) -> None:
    def run(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        gates = input @ w_ih.T
        state = cell(
            gates if b_ih is None else gates + b_ih, tuple(hx) if isinstance(hx, tuple | list) else (hx,), [w_ih, w_hh, b_ih, b_hh, None]
        )
        return state if len(state) > 1 else state[0]

    OPS[getattr(torch, name)] = Op(run, None)


for _name, _one in {"lstm": lstm_cell, "gru": gru_cell, "rnn_tanh": rnn_cell(jnp.tanh), "rnn_relu": rnn_cell(jax.nn.relu)}.items():
    _network(_name, _one)
    _cell(f"{_name}_cell", _one)
