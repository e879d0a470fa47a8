"""`optax.lookahead` for plain parameters instead of pairs of fast and slow ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax
from optax import GradientTransformation

from bridge._ir.types import PyTree


class SlowState(NamedTuple):
    """optax's own state, and the slow parameters, which optax leaves to the caller."""

    inner_state: optax.OptState
    slow: optax.Params


def lookahead(
    fast_optimizer: GradientTransformation, sync_period: int, slow_step_size: jax.typing.ArrayLike, reset_state: bool = False
) -> GradientTransformation:
    """`optax.lookahead` over plain parameters: these are the fast ones, and the state holds the slow ones as `slow`.

    `optax.lookahead` itself takes `LookaheadParams(fast, slow)`, which torch parameters are not. Arguments and numbers are optax's.

    Args:
      fast_optimizer: the transformation of the fast parameters.
      sync_period: the number of updates after which fast and slow parameters are synchronized.
      slow_step_size: the step of the slow parameters towards the fast ones.
      reset_state: whether synchronization resets the state of `fast_optimizer`.

    Returns:
      A transformation whose `update` needs `params`, and raises a ValueError without them.

    Source: https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/lookahead.py; Zhang et al., arXiv:1907.08610.

    Example:
      >>> import bridge, jax.numpy as jnp, optax
      >>> tx = bridge.lookahead(optax.sgd(0.5), sync_period=1, slow_step_size=0.5)
      >>> params = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["w"]
      Array([-0.25, -0.25], dtype=float32)
    """
    return over_plain_params(optax.lookahead(fast_optimizer, sync_period, slow_step_size, reset_state))


def over_plain_params(paired: GradientTransformation) -> GradientTransformation:
    """Turn a transformation over `LookaheadParams` into one over plain parameters."""

    def init(params: optax.Params) -> SlowState:
        return SlowState(paired.init(optax.LookaheadParams.init_synced(params)), params)

    def update(updates: optax.Updates, state: PyTree, params: optax.Params | None = None) -> tuple[optax.Updates, SlowState]:
        if params is None:
            raise ValueError("lookahead reads the parameters: call update(grads, state, params) with params, not None.")
        moves: Any
        moves, inner = paired.update(updates, state.inner_state, optax.LookaheadParams(params, state.slow))
        return moves.fast, SlowState(inner, optax.apply_updates(state.slow, moves.slow))

    return GradientTransformation(init, update)
