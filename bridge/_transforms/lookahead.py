"""optax's look-ahead over parameters that are no pairs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax
from optax import GradientTransformation

from bridge._ir.types import PyTree


class SlowState(NamedTuple):
    """optax's own state, and the slow parameters that it leaves to the caller."""

    inner_state: optax.OptState
    slow: optax.Params


def lookahead(
    fast_optimizer: GradientTransformation, sync_period: int, slow_step_size: jax.typing.ArrayLike, reset_state: bool = False
) -> GradientTransformation:
    """`optax.lookahead` over plain parameters, the fast ones: the slow ones are kept in the state as `slow`.

    optax's own works on `LookaheadParams(fast, slow)`, which no torch parameter is. Arguments and numbers are optax's.

    Source: https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/lookahead.py; Zhang et al., arXiv:1907.08610.
    """
    return unpaired(optax.lookahead(fast_optimizer, sync_period, slow_step_size, reset_state))


def unpaired(paired: GradientTransformation) -> GradientTransformation:
    """An `optax.lookahead` transformation as one over plain parameters."""

    def init(params: optax.Params) -> SlowState:
        return SlowState(paired.init(optax.LookaheadParams.init_synced(params)), params)

    def update(updates: optax.Updates, state: PyTree, params: optax.Params | None = None) -> tuple[optax.Updates, SlowState]:
        if params is None:
            raise ValueError("lookahead reads the parameters: call update(grads, state, params) with params, not None.")
        moves: Any
        moves, inner = paired.update(updates, state.inner_state, optax.LookaheadParams(params, state.slow))
        return moves.fast, SlowState(inner, optax.apply_updates(state.slow, moves.slow))

    return GradientTransformation(init, update)
