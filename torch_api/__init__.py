"""The torch side of maskbridge: `torch.optim.Optimizer` classes whose update runs in JAX and writes into the parameters in place."""

from ._own_packages import refuse_foreign as _refuse_foreign

_refuse_foreign("bridge")

from bridge._transforms.selectors import Selector
from bridge._version import __version__ as __version__
from bridge._warnings import CompilationWarning

from ._step.recompile_reasons import CacheInfo
from ._train.step import JaxTrainStep
from .optax_optimizers import MaskedAdaBelief, MaskedLamb, MaskedLars, MaskedLion, MaskedScheduleFreeAdamW, MaskedYogi
from .optax_state import load_optax_state, to_optax_state
from .optimizer import OptaxOptimizer
from .partitioned import MultiOptimizer, PartitionedOptimizer
from .presets import layer_decay, muon_labels, no_decay, no_decay_on_bias_and_norm
from .torch_optimizers import (
    MaskedAdadelta,
    MaskedAdafactor,
    MaskedAdagrad,
    MaskedAdam,
    MaskedAdamax,
    MaskedAdamW,
    MaskedASGD,
    MaskedMuon,
    MaskedNAdam,
    MaskedRAdam,
    MaskedRMSprop,
    MaskedRprop,
    MaskedSGD,
)

__all__ = [
    "CacheInfo",
    "CompilationWarning",
    "JaxTrainStep",
    "MaskedASGD",
    "MaskedAdaBelief",
    "MaskedAdadelta",
    "MaskedAdafactor",
    "MaskedAdagrad",
    "MaskedAdam",
    "MaskedAdamW",
    "MaskedAdamax",
    "MaskedLamb",
    "MaskedLars",
    "MaskedLion",
    "MaskedMuon",
    "MaskedNAdam",
    "MaskedRAdam",
    "MaskedRMSprop",
    "MaskedRprop",
    "MaskedSGD",
    "MaskedScheduleFreeAdamW",
    "MaskedYogi",
    "MultiOptimizer",
    "OptaxOptimizer",
    "PartitionedOptimizer",
    "Selector",
    "layer_decay",
    "load_optax_state",
    "muon_labels",
    "no_decay",
    "no_decay_on_bias_and_norm",
    "to_optax_state",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"])
