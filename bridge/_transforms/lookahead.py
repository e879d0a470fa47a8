"""optax's look-ahead over parameters that are no pairs."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax
from optax import GradientTransformation


class SlowState(NamedTuple):
    """optax's own state, and the slow parameters that it leaves to the caller."""

    inner_state: Any
    slow: Any


def lookahead(
    fast_optimizer: GradientTransformation, sync_period: int, slow_step_size: Any, reset_state: bool = False
) -> GradientTransformation:
    """`optax.lookahead` over plain parameters, the fast ones: the slow ones are kept in the state as `slow`.

    optax's own works on `LookaheadParams(fast, slow)`, which no torch parameter is. Arguments and numbers are optax's.

    Source: https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/lookahead.py; Zhang et al., arXiv:1907.08610.
    """
    return unpaired(optax.lookahead(fast_optimizer, sync_period, slow_step_size, reset_state))


def unpaired(paired: Any) -> GradientTransformation:
    """An `optax.lookahead` transformation as one over plain parameters."""

    def init(params: Any) -> SlowState:
        return SlowState(paired.init(optax.LookaheadParams.init_synced(params)), params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SlowState]:
        if params is None:
            raise ValueError("lookahead reads the parameters: call update(grads, state, params) with params, not None.")
        moves: Any
        moves, inner = paired.update(updates, state.inner_state, optax.LookaheadParams(params, state.slow))
        return moves.fast, SlowState(inner, optax.apply_updates(state.slow, moves.slow))

    return GradientTransformation(init, update)
