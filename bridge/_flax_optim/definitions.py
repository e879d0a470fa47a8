"""flax.optim's own optimizer definitions, as thin wrappers of optax's transformations.

Hyper params, defaults and state fields have flax's names, so a `state_dict` that flax 0.3 has saved can be restored. Bias corrections
and schedules use `OptimizerState.step`, one count for all parameters, as in flax. A hyper param may be a schedule, a function of that
step. The learning rate is called `learning_rate` or `lr`.

Source: https://github.com/google/flax/tree/v0.3.6/flax/optim
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from bridge._compat.types import PyTreeDef
from bridge._ir.types import PyTree
from bridge._names import path_name

from .fields import (
    HyperParam,
    cast_hyper_params,
    check_gradients,
    compute_dtype_of,
    field_values,
    flatten_like_params,
    resolve_learning_rate,
)
from .optimizer import OptimizerDef, OptimizerState


def _static_field(default: bool | int) -> Any:
    """Declare a field that decides the structure: it is part of the pytree's type and never traced."""
    return dataclasses.field(default=default, metadata={"static": True})


class HyperParams:
    replace = dataclasses.replace


class OptaxDef(OptimizerDef):
    """An `OptimizerDef` that updates each parameter with an optax transformation.

    A subclass defines `transformation(hp)`, where hp is its hyper params, and a NamedTuple as `state_type`. `names` maps the fields of
    the NamedTuple to optax's names, and `absent` maps fields that optax does not have to their values. optax's counts are not stored:
    they equal `step`.
    """

    state_type: ClassVar[Callable[..., PyTree]]
    names: ClassVar[dict[str, str]] = {}
    absent: ClassVar[dict[str, np.ndarray]] = {}

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        raise NotImplementedError(f"{type(self).__name__} does not define transformation(hp).")

    def init_param_state(self, param: ArrayLike) -> PyTree:
        tx = self._transformation(self.hyper_params.replace(learning_rate=0.0), 0)  # the real one may be given at each call only
        return self._from_optax_state(tx.init(jnp.asarray(param)), self.absent)

    def apply_param_gradient(
        self, step: ArrayLike, hyper_params: Any, param: ArrayLike, state: PyTree, grad: ArrayLike
    ) -> tuple[jax.Array, PyTree]:
        param, grad = jnp.asarray(param), jnp.asarray(grad)
        # optax adds counts to floats of another dtype, which is an error under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            tx = self._transformation(hyper_params, step)
            old = self._to_optax_state(jax.eval_shape(tx.init, param), state, step)
            updates, new = tx.update(grad, old, param)
            return cast(jax.Array, optax.apply_updates(param, updates)), self._from_optax_state(new, state._asdict())

    def _transformation(self, hyper_params: Any, step: ArrayLike) -> optax.GradientTransformation:
        if hyper_params.learning_rate is None:
            name = type(self).__name__
            raise ValueError(f"{name} was given no learning rate. Pass learning_rate= to {name}(...) or to apply_gradient(...).")
        now = {name: value(step) for name, value in field_values(hyper_params).items() if callable(value)}
        return self.transformation(dataclasses.replace(hyper_params, **now))

    def _to_optax_state(self, structure: PyTree, state: PyTree, step: ArrayLike) -> PyTree:
        """Return optax's state, built from a state of `state_type` and the step."""
        ours = {theirs: name for name, theirs in self.names.items()}

        def value(path: KeyPath, like: jax.ShapeDtypeStruct) -> ArrayLike:
            name = path_name(path[-1:])
            if name == "count":
                return step
            held = getattr(state, ours[name])
            if getattr(held, "shape", None) != like.shape:
                missing = f"{type(self).__name__}: the state has no {ours[name]!r} of shape {like.shape}"
                raise ValueError(f"{missing}. What decides its structure must be the same at create and at apply_gradient.")
            return held

        return jax.tree_util.tree_map_with_path(value, structure)

    def _from_optax_state(self, state: optax.OptState, absent: Mapping[str, PyTree]) -> PyTree:
        """Return a state of `state_type`, built from optax's. Fields that optax does not have are taken from `absent`."""
        found = {path_name(path[-1:]): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
        return self.state_type(**{name: found.get(theirs, absent.get(name)) for name, theirs in self.names.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientDescentHyperParams(HyperParams):
    learning_rate: HyperParam | None


class GradientDescent(OptaxDef):
    """p - learning_rate * g: `optax.sgd`. Does not differ from flax.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> optimizer = bridge.GradientDescent(learning_rate=0.5).create({"w": jnp.ones(2)})
      >>> optimizer.apply_gradient({"w": jnp.ones(2)}).target["w"].round(3)
      Array([0.5, 0.5], dtype=float32)
    """

    state_type = optax.EmptyState

    def __init__(self, learning_rate: HyperParam | None = None, *, lr: HyperParam | None = None) -> None:
        super().__init__(GradientDescentHyperParams(resolve_learning_rate("GradientDescent", learning_rate, lr)))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        return optax.sgd(hp.learning_rate)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MomentumHyperParams(HyperParams):
    learning_rate: HyperParam | None
    beta: HyperParam = 0.9
    weight_decay: HyperParam = 0.0
    nesterov: bool = _static_field(False)


class MomentumParamState(NamedTuple):
    momentum: jax.Array


class Momentum(OptaxDef):
    """m = beta * m + g + weight_decay * p; p - learning_rate * m: `optax.sgd` after `add_decayed_weights`. Does not differ from flax.

    With `nesterov`, beta * m plus the decayed gradient takes the place of m. The decay is an L2 penalty, as in torch.optim.SGD.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.
      beta: the factor of the momentum.
      weight_decay: the L2 penalty: weight_decay * p is added to the gradient.
      nesterov: a bool: whether to step along the gradient plus beta times the new momentum.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> optimizer = bridge.Momentum(learning_rate=0.5).create({"w": jnp.ones(2)})
      >>> optimizer.apply_gradient({"w": jnp.ones(2)}).target["w"].round(3)
      Array([0.5, 0.5], dtype=float32)
    """

    state_type, names = MomentumParamState, {"momentum": "trace"}

    def __init__(
        self,
        learning_rate: HyperParam | None = None,
        beta: HyperParam = 0.9,
        weight_decay: HyperParam = 0.0,
        nesterov: bool = False,
        *,
        lr: HyperParam | None = None,
    ) -> None:
        super().__init__(MomentumHyperParams(resolve_learning_rate("Momentum", learning_rate, lr), beta, weight_decay, nesterov))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        descent = optax.sgd(hp.learning_rate, momentum=hp.beta, nesterov=hp.nesterov)
        return optax.chain(optax.add_decayed_weights(hp.weight_decay), descent)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdamHyperParams(HyperParams):
    learning_rate: HyperParam | None
    beta1: HyperParam = 0.9
    beta2: HyperParam = 0.999
    eps: HyperParam = 1e-8
    weight_decay: HyperParam = 0.0


class AdamParamState(NamedTuple):
    grad_ema: jax.Array
    grad_sq_ema: jax.Array


class Adam(OptaxDef):
    """Kingma and Ba, arXiv:1412.6980: `optax.adamw`. Does not differ from flax.

    `weight_decay` is decoupled: learning_rate * weight_decay * p is subtracted, as in torch.optim.AdamW and unlike torch.optim.Adam.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.
      beta1: the decay rate of the average of the gradient.
      beta2: the decay rate of the average of the squared gradient.
      eps: the number added to the denominator, outside of the root.
      weight_decay: the decoupled decay.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> optimizer = bridge.Adam(learning_rate=0.5).create({"w": jnp.ones(2)})
      >>> optimizer.apply_gradient({"w": jnp.ones(2)}).target["w"].round(3)
      Array([0.5, 0.5], dtype=float32)
    """

    state_type, names = AdamParamState, {"grad_ema": "mu", "grad_sq_ema": "nu"}

    def __init__(
        self,
        learning_rate: HyperParam | None = None,
        beta1: HyperParam = 0.9,
        beta2: HyperParam = 0.999,
        eps: HyperParam = 1e-8,
        weight_decay: HyperParam = 0.0,
        *,
        lr: HyperParam | None = None,
    ) -> None:
        super().__init__(AdamHyperParams(resolve_learning_rate("Adam", learning_rate, lr), beta1, beta2, eps, weight_decay))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        return optax.adamw(hp.learning_rate, hp.beta1, hp.beta2, hp.eps, weight_decay=hp.weight_decay)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdagradHyperParams(HyperParams):
    learning_rate: HyperParam | None
    eps: HyperParam = 1e-8


class AdagradParamState(NamedTuple):
    G: jax.Array


class Adagrad(OptaxDef):
    """G = G + g**2; p - learning_rate * g / sqrt(G + eps**2): `optax.adagrad` with an initial accumulator of 0.

    Differs from flax, whose denominator is sqrt(G) + eps, by less than eps in the denominator: optax adds eps under the root.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.
      eps: the least denominator.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> optimizer = bridge.Adagrad(learning_rate=0.5).create({"w": jnp.ones(2)})
      >>> optimizer.apply_gradient({"w": jnp.ones(2)}).target["w"].round(3)
      Array([0.5, 0.5], dtype=float32)
    """

    state_type, names = AdagradParamState, {"G": "sum_of_squares"}

    def __init__(self, learning_rate: HyperParam | None = None, eps: HyperParam = 1e-8, *, lr: HyperParam | None = None) -> None:
        super().__init__(AdagradHyperParams(resolve_learning_rate("Adagrad", learning_rate, lr), eps))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        return optax.adagrad(hp.learning_rate, initial_accumulator_value=0.0, eps=hp.eps**2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RMSPropHyperParams(HyperParams):
    learning_rate: HyperParam | None
    beta2: HyperParam = 0.9
    eps: HyperParam = 1e-8
    centered: bool = _static_field(False)


class RMSPropParamState(NamedTuple):
    v: jax.Array
    mg: jax.Array | None  # None unless centered


class RMSProp(OptaxDef):
    """v = beta2 * v + (1 - beta2) * g**2; p - learning_rate * g / (sqrt(v) + eps): `optax.rmsprop`. Does not differ from flax.

    With `centered`, the square of the average gradient is subtracted from v under the root.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.
      beta2: the decay rate of the average of the squared gradient.
      eps: the number added to the denominator, outside of the root.
      centered: a bool: whether to subtract the square of the average gradient.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> optimizer = bridge.RMSProp(learning_rate=0.25, beta2=0.75).create({"w": jnp.ones(2)})
      >>> optimizer.apply_gradient({"w": jnp.ones(2)}).target["w"].round(3)
      Array([0.5, 0.5], dtype=float32)
    """

    state_type, names = RMSPropParamState, {"v": "nu", "mg": "mu"}

    def __init__(
        self,
        learning_rate: HyperParam | None = None,
        beta2: HyperParam = 0.9,
        eps: HyperParam = 1e-8,
        centered: bool = False,
        *,
        lr: HyperParam | None = None,
    ) -> None:
        super().__init__(RMSPropHyperParams(resolve_learning_rate("RMSProp", learning_rate, lr), beta2, eps, centered))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        return optax.rmsprop(hp.learning_rate, hp.beta2, hp.eps, eps_in_sqrt=False, centered=hp.centered)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LAMBHyperParams(HyperParams):
    learning_rate: HyperParam | None
    beta1: HyperParam = 0.9
    beta2: HyperParam = 0.999
    weight_decay: HyperParam = 0.0
    eps: HyperParam = 1e-6


class LAMB(OptaxDef):
    """You et al., arXiv:1904.00962: `optax.lamb`.

    Differs from flax for a parameter of norm 0: flax never moves it, and optax takes 1 as its trust ratio.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.
      beta1: the decay rate of the average of the gradient.
      beta2: the decay rate of the average of the squared gradient.
      weight_decay: the decay, part of the update whose norm gives the trust ratio.
      eps: the number added to the denominator, outside of the root.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge
      >>> bridge.LAMB(learning_rate=0.5, weight_decay=0.1)
      LAMB(learning_rate=0.5, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-06)
    """

    state_type, names = AdamParamState, {"grad_ema": "mu", "grad_sq_ema": "nu"}

    def __init__(
        self,
        learning_rate: HyperParam | None = None,
        beta1: HyperParam = 0.9,
        beta2: HyperParam = 0.999,
        weight_decay: HyperParam = 0.0,
        eps: HyperParam = 1e-6,
        *,
        lr: HyperParam | None = None,
    ) -> None:
        super().__init__(LAMBHyperParams(resolve_learning_rate("LAMB", learning_rate, lr), beta1, beta2, weight_decay, eps))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        return optax.lamb(hp.learning_rate, hp.beta1, hp.beta2, hp.eps, weight_decay=hp.weight_decay)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LARSHyperParams(HyperParams):
    learning_rate: HyperParam | None
    beta: HyperParam = 0.9
    weight_decay: HyperParam = 0.0
    trust_coefficient: HyperParam = 0.001
    eps: HyperParam = 0.0
    nesterov: bool = _static_field(False)


class LARS(OptaxDef):
    """You et al., arXiv:1708.03888: `optax.lars`.

    Differs from flax with weight decay: the trust ratio divides by |g + weight_decay * p|, in flax by |g| + weight_decay * |p|.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.
      beta: the factor of the momentum.
      weight_decay: the L2 penalty, part of the gradient whose norm gives the trust ratio.
      trust_coefficient: the factor of the trust ratio.
      eps: the number added to the denominator of the trust ratio.
      nesterov: a bool: whether to step along the update plus beta times the new momentum.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge
      >>> bridge.LARS(learning_rate=0.5, weight_decay=0.1)
      LARS(learning_rate=0.5, beta=0.9, weight_decay=0.1, trust_coefficient=0.001, eps=0.0, nesterov=False)
    """

    state_type, names = MomentumParamState, {"momentum": "trace"}

    def __init__(
        self, learning_rate: HyperParam | None = None, beta: HyperParam = 0.9, weight_decay: HyperParam = 0.0,
        trust_coefficient: HyperParam = 0.001, eps: HyperParam = 0.0, nesterov: bool = False, *, lr: HyperParam | None = None,
    ) -> None:  # fmt: skip
        learning_rate = resolve_learning_rate("LARS", learning_rate, lr)
        super().__init__(LARSHyperParams(learning_rate, beta, weight_decay, trust_coefficient, eps, nesterov))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        momentum = {"momentum": hp.beta, "nesterov": hp.nesterov}
        return optax.lars(hp.learning_rate, hp.weight_decay, trust_coefficient=hp.trust_coefficient, eps=hp.eps, **momentum)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdafactorHyperParams(HyperParams):
    learning_rate: HyperParam | None
    factored: bool = _static_field(True)
    multiply_by_parameter_scale: bool = _static_field(True)
    beta1: HyperParam | None = None
    decay_rate: HyperParam = 0.8
    step_offset: int = _static_field(0)
    clipping_threshold: HyperParam | None = 1.0
    weight_decay_rate: HyperParam | None = None
    min_dim_size_to_factor: int = _static_field(128)
    epsilon1: HyperParam = 1e-30
    epsilon2: HyperParam = 1e-3


class AdafactorParamState(NamedTuple):  # fields that are not used have shape (1,)
    v_row: jax.Array
    v_col: jax.Array
    v: jax.Array
    m: jax.Array | np.ndarray


class Adafactor(OptaxDef):
    """Shazeer and Stern, arXiv:1804.04235: the parts of `optax.adafactor`, which has no argument for `epsilon2`.

    `beta1`, `clipping_threshold` and `weight_decay_rate` are None or a number. weight_decay_rate * p is subtracted at each step,
    without the learning rate. Differs from flax only for float64 parameters, whose state is float64.

    Args:
      learning_rate, lr: the learning rate, by either name; None if each `apply_gradient` gives it.
      factored: whether a large matrix has row and column means as state, in place of all squares.
      multiply_by_parameter_scale: whether the step is relative to the root mean square of the parameter.
      beta1: the decay rate of an average of the update; None keeps none.
      decay_rate: the averages of squared gradients decay by 1 - t ** -decay_rate at step t.
      step_offset: the number of steps to add to t, for a second training.
      clipping_threshold: the bound on the root mean square of the update; None for no bound.
      weight_decay_rate: the decay per step; None for none.
      min_dim_size_to_factor: the least size of both dimensions of a matrix that is factored.
      epsilon1: the number added to the squared gradient.
      epsilon2: the least root mean square of a parameter.
      dtype_momentum: the dtype of the average of the update.

    Each number may be an array or a schedule, a function of the step.

    Raises:
      TypeError: both learning_rate and lr are given.
      ValueError: from `apply_gradient`, without a learning rate.

    Example:
      >>> import bridge
      >>> bridge.Adafactor(learning_rate=0.5).with_hyper_params(beta1=0.9).hyper_params.beta1
      0.9
    """

    state_type, names = AdafactorParamState, {"v_row": "v_row", "v_col": "v_col", "v": "v", "m": "ema"}
    absent: ClassVar[dict[str, np.ndarray]] = {"m": np.zeros((1,), np.float32)}

    def __init__(
        self, learning_rate: HyperParam | None = None, factored: bool = True, multiply_by_parameter_scale: bool = True,
        beta1: HyperParam | None = None, decay_rate: HyperParam = 0.8, step_offset: int = 0,
        clipping_threshold: HyperParam | None = 1.0, weight_decay_rate: HyperParam | None = None, min_dim_size_to_factor: int = 128,
        epsilon1: HyperParam = 1e-30, epsilon2: HyperParam = 1e-3, dtype_momentum: DTypeLike = jnp.float32,
        *, lr: HyperParam | None = None,
    ) -> None:  # fmt: skip
        self.dtype_momentum = dtype_momentum
        learning_rate = resolve_learning_rate("Adafactor", learning_rate, lr)
        scales = learning_rate, factored, multiply_by_parameter_scale, beta1, decay_rate, step_offset
        super().__init__(AdafactorHyperParams(*scales, clipping_threshold, weight_decay_rate, min_dim_size_to_factor, epsilon1, epsilon2))

    def init_param_state(self, param: ArrayLike) -> PyTree:
        return super().init_param_state(jnp.asarray(param, compute_dtype_of(jnp.result_type(param))))

    def transformation(self, hp: Any) -> optax.GradientTransformation:
        factored = hp.factored, hp.decay_rate, hp.step_offset, hp.min_dim_size_to_factor, hp.epsilon1
        links: list[optax.GradientTransformation] = [optax.scale_by_factored_rms(*factored)]
        if hp.clipping_threshold is not None:
            links.append(optax.clip_by_block_rms(hp.clipping_threshold))
        links.append(optax.scale_by_learning_rate(hp.learning_rate, flip_sign=False))
        if hp.multiply_by_parameter_scale:
            links.append(optax.scale_by_param_block_rms(hp.epsilon2))
        if hp.beta1 is not None:
            links.append(optax.ema(hp.beta1, debias=False, accumulator_dtype=self.dtype_momentum))
        if hp.weight_decay_rate is not None:
            links.append(optax.add_decayed_weights(hp.weight_decay_rate))
        return optax.chain(*links, optax.scale(-1.0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightNormHyperParams(HyperParams):
    inner: object
    wn_decay: HyperParam = 0.0
    wn_eps: HyperParam = 1e-8


class WeightNormParamState(NamedTuple):
    direction_state: PyTree
    scale_state: PyTree
    direction: jax.Array  # v, or the parameter itself if it is not split
    scale: jax.Array | tuple[()]  # g, or () if the parameter is not split


class WeightNorm(OptimizerDef):
    """Salimans and Kingma, arXiv:1602.07868: apply a definition to v and g of w = g * v / |v| instead of w.

    The last axis of a parameter is the axis of outputs: |v| = sqrt(sum(v**2) + wn_eps) is taken over all other axes, and g has one
    element for each output. A parameter with one row (a bias) is not split. `wn_decay` * v is added to the gradient of v. The hyper
    params of both definitions have one namespace. The wrapped definition receives its leaves below `direction` and `scale`.

    Args:
      wrapped_optimizer: the definition that updates v and g.
      wn_decay: the factor of v that is added to the gradient of v.
      wn_eps: the number added inside of the root of |v|.

    The state holds v and g, as in flax 0.4 (flax 0.3 recomputed them from w, inexactly). So the next update overwrites values that
    are written into the target by hand.

    Raises:
      ValueError: from `apply_gradient`, for gradients or a state of another structure, as `OptimizerDef.apply_gradient`.

    Source: https://github.com/google/flax/blob/v0.5.2/flax/optim/weight_norm.py

    Example:
      >>> import bridge
      >>> bridge.WeightNorm(bridge.Momentum(learning_rate=0.1), wn_decay=0.01)
      WeightNorm(learning_rate=0.1, beta=0.9, weight_decay=0.0, nesterov=False, wn_decay=0.01, wn_eps=1e-08)
    """

    def __init__(self, wrapped_optimizer: OptimizerDef, wn_decay: HyperParam = 0.0, wn_eps: HyperParam = 1e-8) -> None:
        super().__init__(WeightNormHyperParams(wrapped_optimizer.hyper_params, wn_decay, wn_eps))
        self.wrapped_optimizer = wrapped_optimizer

    def init_state(self, params: PyTree) -> OptimizerState:
        leaves, treedef = jax.tree.flatten(params)
        parts = _direction_and_scale(treedef, [_split_param(jnp.asarray(leaf), self.hyper_params.wn_eps) for leaf in leaves])
        return _weight_norm_state(treedef, self.wrapped_optimizer.init_state(parts), parts)

    def apply_gradient(self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree) -> tuple[PyTree, OptimizerState]:
        leaves, treedef = jax.tree.flatten(params)
        check_gradients("WeightNorm", params, grads)
        states = flatten_like_params(treedef, state.param_states, "the state")
        pulled = [_split_gradient(hyper_params, *each) for each in zip(states, treedef.flatten_up_to(grads), strict=True)]
        before = _direction_and_scale(treedef, [(own.direction, own.scale) for own in states])
        inner = OptimizerState(state.step, _direction_and_scale(treedef, [(own.direction_state, own.scale_state) for own in states]))
        after, inner = self.wrapped_optimizer.apply_gradient(hyper_params.inner, before, inner, _direction_and_scale(treedef, pulled))
        new_state = _weight_norm_state(treedef, inner, after)
        merged = [_merge_param(hyper_params, own.direction, own.scale) for own in treedef.flatten_up_to(new_state.param_states)]
        new_leaves = [new.astype(jnp.asarray(old).dtype) for new, old in zip(merged, leaves, strict=True)]
        return treedef.unflatten(new_leaves), new_state

    def update_hyper_params(self, **overrides: Any) -> Any:
        given = overrides.pop("hyper_params", None) or self.hyper_params
        own = {name: overrides.pop(name) for name in ("wn_decay", "wn_eps") if name in overrides}
        return given.replace(inner=self.wrapped_optimizer.update_hyper_params(hyper_params=given.inner, **overrides), **own)

    def with_hyper_params(self, **overrides: Any) -> WeightNorm:
        new = super().with_hyper_params(**overrides)
        new.wrapped_optimizer = self.wrapped_optimizer.with_hyper_params(hyper_params=new.hyper_params.inner)
        return new

    def hyper_param_values(self) -> dict[str, Any]:
        hp = self.hyper_params
        return self.wrapped_optimizer.hyper_param_values() | {"wn_decay": hp.wn_decay, "wn_eps": hp.wn_eps}


def _split_param(param: jax.Array, eps: ArrayLike) -> tuple[jax.Array, jax.Array | tuple[()]]:
    """Split a parameter into (direction, scale), in float32 at least. Without anything to normalize, scale is ()."""
    if param.ndim < 2 or param.size <= param.shape[-1]:
        return param, ()
    wide = param.astype(compute_dtype_of(param.dtype))
    scale = jnp.sqrt(_sum_of_squares(wide) + eps)
    return wide / scale, scale


def _merge_param(hyper_params: Any, direction: jax.Array, scale: jax.Array | tuple[()]) -> jax.Array:
    """Return the parameter of a direction and a scale."""
    if isinstance(scale, tuple):
        return direction
    return direction * (scale * jax.lax.rsqrt(_sum_of_squares(direction) + cast_hyper_params(hyper_params, direction.dtype).wn_eps))


def _split_gradient(hyper_params: Any, state: WeightNormParamState, grad: ArrayLike) -> tuple[ArrayLike, jax.Array | tuple[()]]:
    """Return the gradients of direction and scale, from the gradient of the parameter."""
    if isinstance(state.scale, tuple):
        return grad, ()
    dtype = state.direction.dtype
    _, pull = jax.vjp(lambda direction, scale: _merge_param(hyper_params, direction, scale), state.direction, state.scale)
    direction, scale = pull(jnp.asarray(grad).astype(dtype))
    return direction + cast_hyper_params(hyper_params, dtype).wn_decay * state.direction, scale


def _sum_of_squares(direction: jax.Array) -> jax.Array:
    return jnp.square(direction).sum(tuple(range(direction.ndim - 1)), keepdims=True)


def _direction_and_scale(treedef: PyTreeDef, pairs: Sequence[tuple[PyTree, PyTree]]) -> dict[str, PyTree]:
    """Return the tree that the wrapped definition receives."""
    return {"direction": treedef.unflatten([d for d, _ in pairs]), "scale": treedef.unflatten([s for _, s in pairs])}


def _weight_norm_state(treedef: PyTreeDef, inner: OptimizerState, parts: dict[str, PyTree]) -> OptimizerState:
    """Return the state of each parameter: the wrapped definition's state, with direction and scale."""
    columns = [treedef.flatten_up_to(tree[part]) for tree in (inner.param_states, parts) for part in ("direction", "scale")]
    return OptimizerState(inner.step, treedef.unflatten([WeightNormParamState(*each) for each in zip(*columns, strict=True)]))
