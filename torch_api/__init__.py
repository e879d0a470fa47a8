"""The torch side of maskbridge: torch.optim.Optimizer classes whose update runs in JAX, in place."""

from .masked import MaskedAdam, MaskedAdamW, MaskedSGD
from .optimizer import OptaxOptimizer
from .presets import no_decay_on_bias_and_norm

__all__ = ["MaskedAdam", "MaskedAdamW", "MaskedSGD", "OptaxOptimizer", "no_decay_on_bias_and_norm"]
