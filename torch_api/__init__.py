"""The torch side of maskbridge: torch.optim.Optimizer classes whose update runs in JAX, in place."""

from .masked import MaskedAdam, MaskedAdamW, MaskedSGD
from .optimizer import OptaxOptimizer
from .partitioned import MultiOptimizer, PartitionedOptimizer
from .presets import layer_decay, muon_labels, no_decay, no_decay_on_bias_and_norm

__all__ = [
    "MaskedAdam",
    "MaskedAdamW",
    "MaskedSGD",
    "MultiOptimizer",
    "OptaxOptimizer",
    "PartitionedOptimizer",
    "layer_decay",
    "muon_labels",
    "no_decay",
    "no_decay_on_bias_and_norm",
]
