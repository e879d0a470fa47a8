"""Classes for optax's optimizers: optax's arguments in optax's order, with `lr` for `learning_rate`, then the options of `OptaxOptimizer`.

`mask` selects which parameters are optimized. For optax's `mask`, which selects the parameters that decay, give `decay_mask`.
`betas=(b1, b2)` may replace b1 and b2, as in torch's optimizers; it has as many numbers as the class has betas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Unpack

import jax
import optax
import optax.contrib
import torch

from bridge._compiler.spec import MASTER_PARAM
from bridge._ir.types import PyTree

from ._params.record import ParamDecision
from ._params.swap import EVALUATION, write_values
from ._rules.betas import expand_betas
from ._rules.types import MutableParamGroup, ParamState, StateDict
from .optimizer import OptaxOptimizer
from .options import BetasArguments, OptaxArguments

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_MODE_KEY = "train_mode"  # in a group, False between `eval` and `train`: the key of the schedulefree package


class MaskedLion(OptaxOptimizer):
    """optax.lion with masks: the same results in one compiled step, in place.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: optax's `learning_rate`, a number. Schedule it by torch's schedulers.
      b1: the share of the average, against that of the gradient, in the step.
      b2: the decay rate of the average of the gradient.
      mu_dtype: the dtype of the average; None: the parameter's.
      weight_decay: the decoupled decay, which is multiplied by lr.
      **engine: betas=(b1, b2) in place of b1 and b2; foreach, fused, capturable and differentiable of torch.optim; mask,
        max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError: as `OptaxOptimizer`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.lion; Chen et al., arXiv:2302.06675.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedLion([("w", w)], lr=0.1, weight_decay=0.0)
      >>> w.sum().backward()
      >>> opt.step()
      >>> w.data
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.99,
        mu_dtype: jax.typing.DTypeLike | None = None,
        weight_decay: float = 1e-3,
        **engine: Unpack[BetasArguments],
    ) -> None:
        b1, b2 = _read_betas(MaskedLion, engine, b1, b2)
        super().__init__(params, optax.lion, lr=lr, b1=b1, b2=b2, weight_decay=weight_decay, **_without_none(mu_dtype=mu_dtype), **engine)


class MaskedLamb(OptaxOptimizer):
    """optax.lamb with masks: the same results in one compiled step, in place.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: optax's `learning_rate`, a number. Schedule it by torch's schedulers.
      b1: the decay rate of the average of the gradient.
      b2: the decay rate of the average of the squared gradient.
      eps: the number added to the denominator, outside of the root.
      eps_root: the number added inside of the root.
      weight_decay: the decay, part of the update whose norm gives the trust ratio.
      **engine: betas=(b1, b2) in place of b1 and b2; foreach, fused, capturable and differentiable of torch.optim; mask,
        max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError: as `OptaxOptimizer`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.lamb; You et al., arXiv:1904.00962.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedLamb([("w", w)], lr=0.1)
      >>> w.sum().backward()
      >>> opt.step()
      >>> w.data
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-6,
        eps_root: float = 0.0,
        weight_decay: float = 0.0,
        **engine: Unpack[BetasArguments],
    ) -> None:
        b1, b2 = _read_betas(MaskedLamb, engine, b1, b2)
        super().__init__(params, optax.lamb, lr=lr, b1=b1, b2=b2, eps=eps, eps_root=eps_root, weight_decay=weight_decay, **engine)


class MaskedLars(OptaxOptimizer):
    """optax.lars with masks: the same results in one compiled step, in place.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: optax's `learning_rate`, a number. Schedule it by torch's schedulers.
      weight_decay: an L2 penalty, part of the gradient whose norm gives the trust ratio.
      weight_decay_mask: optax's: a bool, a pytree of bools, or a function to one: which parameters decay.
      trust_coefficient: the factor of the trust ratio.
      eps: the number added to the denominator of the trust ratio.
      trust_ratio_mask: optax's: a bool, a pytree of bools, or a function to one: which updates are scaled by their trust ratio.
      momentum: the factor of the momentum.
      nesterov: whether to step along the update plus momentum times the new momentum.
      **engine: foreach, fused, capturable and differentiable of torch.optim; mask, max_grad_norm and the other options of every
        class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError: as `OptaxOptimizer`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.lars; You et al., arXiv:1708.03888.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedLars(model.named_parameters(), lr=0.1, mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        weight_decay: float = 0.0,
        weight_decay_mask: PyTree | Callable[[PyTree], PyTree] = True,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        trust_ratio_mask: PyTree | Callable[[PyTree], PyTree] = True,
        momentum: float = 0.9,
        nesterov: bool = False,
        **engine: Unpack[OptaxArguments],
    ) -> None:
        masks = {"weight_decay_mask": weight_decay_mask, "trust_ratio_mask": trust_ratio_mask}
        numbers = {"weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "eps": eps, "momentum": momentum}
        super().__init__(params, optax.lars, lr=lr, **numbers, **masks, nesterov=nesterov, **engine)


class MaskedAdaBelief(OptaxOptimizer):
    """optax.adabelief with masks: the same results in one compiled step, in place.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: optax's `learning_rate`, a number. Schedule it by torch's schedulers.
      b1: the decay rate of the average of the gradient.
      b2: the decay rate of the average of the squared difference between gradient and average.
      eps: the number added to the denominator, outside of the root.
      eps_root: the number added to the second average, inside of the root.
      nesterov: whether to take the first average with Nesterov's momentum.
      **engine: betas=(b1, b2) in place of b1 and b2; foreach, fused, capturable and differentiable of torch.optim; mask,
        max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError: as `OptaxOptimizer`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.adabelief; Zhuang et al., arXiv:2010.07468.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedAdaBelief(model.named_parameters(), lr=0.1, mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-16,
        eps_root: float = 1e-16,
        *,
        nesterov: bool = False,
        **engine: Unpack[BetasArguments],
    ) -> None:
        b1, b2 = _read_betas(MaskedAdaBelief, engine, b1, b2)
        super().__init__(params, optax.adabelief, lr=lr, b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov, **engine)


class MaskedYogi(OptaxOptimizer):
    """optax.yogi with masks: the same results in one compiled step, in place.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: optax's `learning_rate`, a number. Schedule it by torch's schedulers.
      b1: the decay rate of the average of the gradient.
      b2: the rate at which the second average follows the squared gradient, 1 - b2 in each step.
      eps: the number added to the denominator, outside of the root.
      **engine: betas=(b1, b2) in place of b1 and b2; foreach, fused, capturable and differentiable of torch.optim; mask,
        max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError: as `OptaxOptimizer`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.yogi; Zaheer et al., NeurIPS 2018.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedYogi(model.named_parameters(), lr=0.1, mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-3,
        **engine: Unpack[BetasArguments],
    ) -> None:
        b1, b2 = _read_betas(MaskedYogi, engine, b1, b2)
        super().__init__(params, optax.yogi, lr=lr, b1=b1, b2=b2, eps=eps, **engine)


class MaskedScheduleFreeAdamW(OptaxOptimizer):
    """optax.contrib.schedule_free_adamw with masks: the same results in one compiled step, in place.

    The parameters are the points at which gradients are taken. Evaluate and save a model inside `eval_params()`, or between
    `eval()` and `train()`, which trainers call. `state_dtype` is a torch.dtype for all state of the parameter's shape; optax's
    is for z alone.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: optax's `learning_rate`, a number. Schedule it by torch's schedulers.
      warmup_steps: the number of steps in which lr rises linearly from 0; None: no warmup.
      b1: the share of the average x, against that of z, in the weights at which gradients are taken.
      b2: the decay rate of the average of the squared gradient.
      eps: the number added to the denominator, outside of the root.
      weight_decay: the decoupled decay, which is multiplied by lr.
      weight_lr_power: the weight of a step in the average is its greatest lr so far to this power.
      **engine: betas=(b1, b2) in place of b1 and b2; foreach, fused, capturable and differentiable of torch.optim; mask,
        max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError: as `OptaxOptimizer`.

    Source: https://optax.readthedocs.io/en/latest/api/contrib.html#optax.contrib.schedule_free_adamw; Defazio et al.,
    arXiv:2405.15682.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedScheduleFreeAdamW([("w", w)], lr=0.1)
      >>> w.sum().backward()
      >>> opt.step()
      >>> with opt.eval_params():
      ...     print(w.data)
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.0025,
        warmup_steps: int | None = None,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_lr_power: float = 2.0,
        **engine: Unpack[BetasArguments],
    ) -> None:
        b1, b2 = _read_betas(MaskedScheduleFreeAdamW, engine, b1, b2)
        numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
        super().__init__(params, optax.contrib.schedule_free_adamw, **numbers, **_without_none(warmup_steps=warmup_steps), **engine)

    def eval_params(self) -> AbstractContextManager[None]:
        """Swap the averaged weights x into the parameters while the context is open; afterwards the training weights y return, bit for bit.

        x = (y - (1 - b1) z) / b1, as in `optax.contrib.schedule_free_eval_params`, written in place: parameters stay the same
        objects at the same addresses. The average of a parameter without state (frozen, or before the first step) is its own value.

        After `eval()` the context changes nothing.

        Raises:
          RuntimeError: `step`, or `eval_params` again, is called inside the context.
        """
        if self._swap.swapped_by == EVALUATION:
            return nullcontext()
        return self._swap.swap_in(type(self).__name__, "eval_params", self._eval_weights, self._transaction)

    def eval(self) -> None:
        """Swap the averaged weights x into the parameters until `train()`, as inside `eval_params()`. A second call does nothing.

        `step` raises an error until `train()`. `state_dict` records the mode as `train_mode` in its groups: after loading it, with a model
        that has the averaged weights, call `train()` before the next step.

        Raises:
          RuntimeError: the call is inside `eval_params()` or `ema_params()`.
        """
        if self._swap.swapped_by == EVALUATION:
            return
        with self._transaction():
            if self._swap.swapped_by:
                self._swap.raise_swapped_error(f"{type(self).__name__}.eval")
            pairs = self._eval_weights()
            numbers = {id(p): b1 for p, b1, _ in self._params_with_b1_and_state()}
            self._training_weights = {id(p): (p.detach().clone(memory_format=torch.preserve_format), numbers[id(p)]) for p, _ in pairs}
            self._swap.swapped_by = EVALUATION
            for group in self.param_groups:
                group[_MODE_KEY] = False
            write_values([p for p, _ in pairs], [x for _, x in pairs])

    def train(self) -> None:
        """Swap the training weights y back into the parameters. Without `eval()` before, it does nothing.

        They are the weights before `eval()`, bit for bit; in an optimizer that was loaded or copied since, only with master weights.
        For a parameter that user code has written to, and for a loaded or copied one without master weights, y = b1 x + (1 - b1) z.

        Raises:
          RuntimeError: the call is inside `eval_params()` or `ema_params()`.
        """
        if not self._swap.swapped_by:
            return
        with self._transaction():
            if self._swap.swapped_by != EVALUATION:
                self._swap.raise_swapped_error(f"{type(self).__name__}.train")
            pairs = [(p, self._training_weight(p, b1, state)) for p, b1, state in self._params_with_b1_and_state() if "z" in state]
            write_values([p for p, _ in pairs], [y for _, y in pairs])
            for group in self.param_groups:
                group.pop(_MODE_KEY, None)
            self._swap.swapped_by, self._training_weights = "", {}

    def _training_weight(self, p: torch.Tensor, b1: float, state: ParamState) -> torch.Tensor:
        master = state[MASTER_PARAM].to(p.dtype) if MASTER_PARAM in state else None  # y in a loaded optimizer
        y, b1_before = self._training_weights.get(id(p), (master, b1))
        if y is not None and torch.equal(p.detach(), _eval_weight(y, b1_before, state["z"]).to(p.dtype)):
            return y
        return b1 * p.detach() + (1.0 - b1) * state["z"]

    def _params_with_b1_and_state(self) -> list[tuple[torch.Tensor, float, ParamState]]:
        """Return each parameter with its b1 and its state."""
        return [(p, float(group["b1"]), self.state.get(p, {})) for group in self.param_groups for p in group["params"]]

    def _eval_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, _eval_weight(p.detach(), b1, state["z"])) for p, b1, state in self._params_with_b1_and_state() if "z" in state]

    def _init_uncopied(self) -> None:
        super()._init_uncopied()
        self._training_weights: dict[int, tuple[torch.Tensor, float]] = {}  # y and b1 at `eval()`, by id of the parameter

    def _set_state(self, state: StateDict, decisions: Sequence[tuple[str, int, ParamDecision]] | None) -> None:
        super()._set_state(state, decisions)
        self._training_weights = {}
        if self._swap.swapped_by in ("", EVALUATION):
            evaluates = any(not group.get(_MODE_KEY, True) for group in self.param_groups)
            self._swap.swapped_by = EVALUATION if evaluates else ""


def _eval_weight(y: torch.Tensor, b1: float, z: torch.Tensor) -> torch.Tensor:
    return (y - (1.0 - b1) * z) / b1


def _read_betas(owner: type[OptaxOptimizer], engine: BetasArguments, *values: float) -> tuple[float, ...]:
    """Return b1, b2 and so on of the keyword arguments. `betas` is removed from `engine`; `values` must be the defaults then."""
    if "betas" not in engine:
        return values
    names = tuple(f"b{i}" for i in range(1, len(values) + 1))
    defaults = inspect.signature(owner.__init__).parameters
    given = {name: value for name, value in zip(names, values, strict=True) if value is not defaults[name].default}
    expanded = expand_betas(owner.__name__, {"betas": engine.pop("betas")} | given, names)
    return tuple(expanded[name] for name in names)


def _without_none(**options: object) -> MutableParamGroup:
    """Return the options that are not None; None means optax's default."""
    return {name: value for name, value in options.items() if value is not None}
