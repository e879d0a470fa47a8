"""Classes for optax's optimizers: optax's arguments in optax's order, with `lr` for `learning_rate`, then the options of `OptaxOptimizer`.

`mask` selects which parameters are optimized. For optax's `mask`, which selects the parameters that decay, give `decay_mask`.
`betas=(b1, b2)` may replace b1 and b2, as in torch's optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
import optax
import optax.contrib
import torch

from bridge._compiler.spec import MASTER
from bridge._ir.types import PyTree

from ._params.record import Decided
from ._params.swap import EVALUATION, write
from ._rules.betas import spread
from ._rules.types import MutableParamGroup, ParamState, StateDict
from .optimizer import OptaxOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_MODE = "train_mode"  # in a group, False between `eval` and `train`: the key of the schedulefree package


class MaskedLion(OptaxOptimizer):
    """optax.lion with masks: the same results in one compiled step, in place. See `OptaxOptimizer` for `**engine`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.lion; Chen et al., arXiv:2302.06675.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.99,
        mu_dtype: jax.typing.DTypeLike | None = None,
        weight_decay: float = 1e-3,
        **engine: Any,
    ) -> None:
        b1, b2 = _momenta(MaskedLion, engine, b1, b2)
        super().__init__(params, optax.lion, lr=lr, b1=b1, b2=b2, weight_decay=weight_decay, **_given(mu_dtype=mu_dtype), **engine)


class MaskedLamb(OptaxOptimizer):
    """optax.lamb with masks: the same results in one compiled step, in place. See `OptaxOptimizer` for `**engine`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.lamb; You et al., arXiv:1904.00962.
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
        **engine: Any,
    ) -> None:
        b1, b2 = _momenta(MaskedLamb, engine, b1, b2)
        super().__init__(params, optax.lamb, lr=lr, b1=b1, b2=b2, eps=eps, eps_root=eps_root, weight_decay=weight_decay, **engine)


class MaskedLars(OptaxOptimizer):
    """optax.lars with masks: the same results in one compiled step, in place. See `OptaxOptimizer` for `**engine`.

    `weight_decay_mask` and `trust_ratio_mask` are optax's: a bool, a pytree of bools or a function to one.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.lars; You et al., arXiv:1708.03888.
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
        **engine: Any,
    ) -> None:
        masks = {"weight_decay_mask": weight_decay_mask, "trust_ratio_mask": trust_ratio_mask}
        numbers = {"weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "eps": eps, "momentum": momentum}
        super().__init__(params, optax.lars, lr=lr, **numbers, **masks, nesterov=nesterov, **engine)


class MaskedAdaBelief(OptaxOptimizer):
    """optax.adabelief with masks: the same results in one compiled step, in place. See `OptaxOptimizer` for `**engine`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.adabelief; Zhuang et al., arXiv:2010.07468.
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
        **engine: Any,
    ) -> None:
        b1, b2 = _momenta(MaskedAdaBelief, engine, b1, b2)
        super().__init__(params, optax.adabelief, lr=lr, b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov, **engine)


class MaskedYogi(OptaxOptimizer):
    """optax.yogi with masks: the same results in one compiled step, in place. See `OptaxOptimizer` for `**engine`.

    Source: https://optax.readthedocs.io/en/latest/api/optimizers.html#optax.yogi; Zaheer et al., NeurIPS 2018.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-3,
        **engine: Any,
    ) -> None:
        b1, b2 = _momenta(MaskedYogi, engine, b1, b2)
        super().__init__(params, optax.yogi, lr=lr, b1=b1, b2=b2, eps=eps, **engine)


class MaskedScheduleFreeAdamW(OptaxOptimizer):
    """optax.contrib.schedule_free_adamw with masks: the same results, in place. See `OptaxOptimizer` for `**engine`.

    The parameters are the points at which gradients are taken. Evaluate and save a model inside `eval_params()`, or between
    `eval()` and `train()`, which trainers call. `state_dtype` is a torch.dtype for all state of the parameter's shape; optax's
    is for z alone.

    Source: https://optax.readthedocs.io/en/latest/api/contrib.html#optax.contrib.schedule_free_adamw; Defazio et al.,
    arXiv:2405.15682.
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
        **engine: Any,
    ) -> None:
        b1, b2 = _momenta(MaskedScheduleFreeAdamW, engine, b1, b2)
        numbers = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "weight_lr_power": weight_lr_power}
        super().__init__(params, optax.contrib.schedule_free_adamw, **numbers, **_given(warmup_steps=warmup_steps), **engine)

    def eval_params(self) -> AbstractContextManager[None]:
        """Swap the averaged weights x into the parameters while the context is open; afterwards the training weights y return, bit for bit.

        x = (y - (1 - b1) z) / b1, as in `optax.contrib.schedule_free_eval_params`, written in place: parameters stay the same
        objects at the same addresses. The average of a parameter without state (frozen, or before the first step) is its own value.

        After `eval()` the context changes nothing.

        Raises:
          RuntimeError: `step`, or `eval_params` again, is called inside the context.
        """
        if self._exchange.inside == EVALUATION:
            return nullcontext()
        return self._exchange.hold(type(self).__name__, "eval_params", self._evaluated, self._transaction)

    def eval(self) -> None:
        """Swap the averaged weights x into the parameters until `train()`, as inside `eval_params()`. A second call does nothing.

        `step` raises an error until `train()`. `state_dict` records the mode as `train_mode` in its groups: after loading it, with a model
        that has the averaged weights, call `train()` before the next step.

        Raises:
          RuntimeError: the call is inside `eval_params()` or `ema_params()`.
        """
        if self._exchange.inside == EVALUATION:
            return
        with self._transaction():
            if self._exchange.inside:
                self._exchange.refuse(f"{type(self).__name__}.eval")
            pairs = self._evaluated()
            numbers = {id(p): b1 for p, b1, _ in self._members()}
            self._points = {id(p): (p.detach().clone(memory_format=torch.preserve_format), numbers[id(p)]) for p, _ in pairs}
            self._exchange.inside = EVALUATION
            for group in self.param_groups:
                group[_MODE] = False
            write([p for p, _ in pairs], [x for _, x in pairs])

    def train(self) -> None:
        """Swap the training weights y back into the parameters. Without `eval()` before, it does nothing.

        They are the weights before `eval()`, bit for bit; in an optimizer that was loaded or copied since, only with master weights.
        For a parameter that user code has written to, and for a loaded or copied one without master weights, y = b1 x + (1 - b1) z.

        Raises:
          RuntimeError: the call is inside `eval_params()` or `ema_params()`.
        """
        if not self._exchange.inside:
            return
        with self._transaction():
            if self._exchange.inside != EVALUATION:
                self._exchange.refuse(f"{type(self).__name__}.train")
            pairs = [(p, self._training_point(p, b1, state)) for p, b1, state in self._members() if "z" in state]
            write([p for p, _ in pairs], [y for _, y in pairs])
            for group in self.param_groups:
                group.pop(_MODE, None)
            self._exchange.inside, self._points = "", {}

    def _training_point(self, p: torch.Tensor, b1: float, state: ParamState) -> torch.Tensor:
        master = state[MASTER].to(p.dtype) if MASTER in state else None  # y in a loaded optimizer
        y, b1_before = self._points.get(id(p), (master, b1))
        if y is not None and torch.equal(p.detach(), _average(y, b1_before, state["z"]).to(p.dtype)):
            return y
        return b1 * p.detach() + (1.0 - b1) * state["z"]

    def _members(self) -> list[tuple[torch.Tensor, float, ParamState]]:
        """Return each parameter with its b1 and its state."""
        return [(p, float(group["b1"]), self.state.get(p, {})) for group in self.param_groups for p in group["params"]]

    def _evaluated(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, _average(p.detach(), b1, state["z"])) for p, b1, state in self._members() if "z" in state]

    def _begin(self) -> None:
        super()._begin()
        self._points: dict[int, tuple[torch.Tensor, float]] = {}  # y and b1 at `eval()`, by id of the parameter

    def _set_state(self, state: StateDict, decided: Sequence[tuple[str, int, Decided]] | None) -> None:
        super()._set_state(state, decided)
        self._points = {}
        if self._exchange.inside in ("", EVALUATION):
            evaluates = any(not group.get(_MODE, True) for group in self.param_groups)
            self._exchange.inside = EVALUATION if evaluates else ""


def _average(y: torch.Tensor, b1: float, z: torch.Tensor) -> torch.Tensor:
    return (y - (1.0 - b1) * z) / b1


def _momenta(owner: type, engine: MutableParamGroup, b1: float, b2: float) -> tuple[float, float]:
    """Return b1 and b2 of the keyword arguments. `betas` is removed from `engine`; b1 and b2 must have their defaults then."""
    if "betas" not in engine:
        return b1, b2
    defaults = inspect.signature(owner.__init__).parameters
    given = {name: value for name, value in (("b1", b1), ("b2", b2)) if value is not defaults[name].default}
    both = spread(owner.__name__, {"betas": engine.pop("betas")} | given, ("b1", "b2"))
    return both["b1"], both["b2"]


def _given(**options: object) -> MutableParamGroup:
    """Return the options that are not None; None means optax's default."""
    return {name: value for name, value in options.items() if value is not None}
