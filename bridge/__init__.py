"""The JAX side of maskbridge: update rules, masks, traced torch code, and conversion between torch and jax."""

from ._own_packages import refuse_foreign as _refuse_foreign

_refuse_foreign("torch_api")

from . import _logs, matrix_rules, rules
from ._autograd.jax_function import jax_function
from ._compiler.update import traces
from ._flax_optim.definitions import LAMB, LARS, Adafactor, Adagrad, Adam, GradientDescent, Momentum, RMSProp, WeightNorm
from ._flax_optim.optimizer import ModelParamTraversal, MultiOptimizer, Optimizer, OptimizerDef, OptimizerState
from ._interop.trees import load_module_tree, module_buffers, module_tree, to_jax, to_torch, write_buffers
from ._names import tied_names
from ._runtime.cache import compilations
from ._tracing.module_function import module_function
from ._transforms.lookahead import lookahead
from ._transforms.masking import (
    EmptyState,
    GradientTransformation,
    GradientTransformationExtraArgs,
    MaskedNode,
    MaskedState,
    PartitionState,
    ResolvedState,
    StatefulSchedule,
    freeze,
    identity,
    masked,
    partition,
    select,
    set_to_zero,
    stateless,
    stateless_with_tree_map,
    tree_map_params,
    with_extra_args_support,
)
from ._transforms.selectors import Selector, resolve_labels, resolve_mask
from ._version import __version__ as __version__
from ._xla import multi_output_fusion as _multi_output_fusion
from .doctor import doctor

__all__ = [
    "LAMB",
    "LARS",
    "Adafactor",
    "Adagrad",
    "Adam",
    "EmptyState",
    "GradientDescent",
    "GradientTransformation",
    "GradientTransformationExtraArgs",
    "MaskedNode",
    "MaskedState",
    "ModelParamTraversal",
    "Momentum",
    "MultiOptimizer",
    "Optimizer",
    "OptimizerDef",
    "OptimizerState",
    "PartitionState",
    "RMSProp",
    "ResolvedState",
    "Selector",
    "StatefulSchedule",
    "WeightNorm",
    "compilations",
    "doctor",
    "freeze",
    "identity",
    "jax_function",
    "load_module_tree",
    "lookahead",
    "masked",
    "matrix_rules",
    "module_buffers",
    "module_function",
    "module_tree",
    "partition",
    "resolve_labels",
    "resolve_mask",
    "rules",
    "select",
    "set_to_zero",
    "stateless",
    "stateless_with_tree_map",
    "tied_names",
    "to_jax",
    "to_torch",
    "traces",
    "tree_map_params",
    "with_extra_args_support",
    "write_buffers",
]

_logs.configure()
_multi_output_fusion.set_process_flag()  # before jax starts a client, which reads the flag


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"])
