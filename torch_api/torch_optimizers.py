"""Drop-in classes for torch.optim: torch's arguments in torch's order, then the options of `OptaxOptimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch

from bridge import matrix_rules

from ._rules import torch_rules
from ._rules.types import StateDict
from .optimizer import OptaxOptimizer
from .options import SharedArguments

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class MaskedAdam(OptaxOptimizer):
    """torch.optim.Adam with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      betas: the decay rates of the averages of the gradient and of its square.
      eps: the number added to the denominator, outside of the root.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      amsgrad: whether to divide by the maximum of all averages of the squared gradient so far.
      foreach, capturable, differentiable, fused: torch's switches, which change no result. `differentiable=True` is an error. With
        `fused=True`, GradScaler does not wait for the device.
      maximize: whether to ascend: the gradient is negated.
      decoupled_weight_decay: whether to decay as AdamW: p is multiplied by 1 - lr * weight_decay, and the gradient has no penalty.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.Adam and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adam.html; Kingma and Ba, arXiv:1412.6980.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedAdam([("w", w)], lr=0.1, max_grad_norm=1.0)
      >>> w.sum().backward()
      >>> opt.step()
      >>> w.data
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        torch_options = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        equation = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, torch_rules.ADAM, **equation, **torch_options, decoupled_weight_decay=decoupled_weight_decay, **engine)


class MaskedAdamW(MaskedAdam):
    """torch.optim.AdamW with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      betas: the decay rates of the averages of the gradient and of its square.
      eps: the number added to the denominator, outside of the root.
      weight_decay: the decoupled decay: p is multiplied by 1 - lr * weight_decay.
      amsgrad: whether to divide by the maximum of all averages of the squared gradient so far.
      maximize: whether to ascend: the gradient is negated.
      foreach, capturable, differentiable, fused: torch's switches, which change no result. `differentiable=True` is an error. With
        `fused=True`, GradScaler does not wait for the device.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.AdamW and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html; Loshchilov and Hutter, arXiv:1711.05101.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedAdamW([("w", w)], lr=0.1, weight_decay=0.5, decay_mask={"w": False})
      >>> w.sum().backward()
      >>> opt.step()
      >>> w.data
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **engine: Unpack[SharedArguments],
    ) -> None:
        torch_options = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, **torch_options, **engine
        )

    def __setstate__(self, state: StateDict) -> None:
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = True  # older versions of torch saved AdamW without it; torch.optim.AdamW sets it too
        super().__setstate__(state)


class MaskedSGD(OptaxOptimizer):
    """torch.optim.SGD with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      momentum: the factor of the momentum. 0 keeps no state.
      dampening: the gradient enters the momentum with 1 - dampening, the first one with 1.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      nesterov: whether to step along the gradient plus momentum times the new momentum. It needs a momentum and no dampening.
      maximize: whether to ascend: the gradient is negated.
      foreach, differentiable, fused: torch's switches, which change no result. `differentiable=True` is an error. With
        `fused=True`, GradScaler does not wait for the device.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.SGD and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.SGD.html.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedSGD([("w", w)], lr=0.1, momentum=0.9)
      >>> w.sum().backward()
      >>> opt.step()
      >>> w.data
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **engine: Unpack[SharedArguments],
    ) -> None:
        torch_options = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        equation = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, torch_rules.SGD, **equation, maximize=maximize, **torch_options, **engine)


class MaskedRMSprop(OptaxOptimizer):
    """torch.optim.RMSprop with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      alpha: the decay rate of the average of the squared gradient.
      eps: the number added to the denominator, outside of the root (`optax.rmsprop` adds it inside).
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      momentum: the factor of the momentum of scaled gradients. 0 keeps none.
      centered: whether to divide by an estimate of the gradient's variance, instead of by the mean of its square.
      capturable, foreach, differentiable: torch's switches, which change no result. `differentiable=True` is an error.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.RMSprop and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.RMSprop.html.

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedRMSprop([("w", w)], lr=0.01)
      >>> w.sum().backward()
      >>> opt.step()
      >>> w.data
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "centered": centered}
        switches = {"maximize": maximize}
        options = {"capturable": capturable, "foreach": foreach, "differentiable": differentiable}
        super().__init__(params, torch_rules.RMSPROP, **equation, **switches, **options, **engine)


class MaskedAdagrad(OptaxOptimizer):
    """torch.optim.Adagrad with masks: same arguments, results, errors and state_dict.

    Each trained parameter has its state from construction on, as in torch. Difference from torch: a group's own
    `initial_accumulator_value` takes effect.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      lr_decay: lr is divided by 1 + lr_decay * (steps before this one).
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      initial_accumulator_value: the initial sum of squared gradients.
      eps: the number added to the denominator, outside of the root.
      foreach, differentiable, fused: torch's switches, which change no result. `differentiable=True` is an error. With
        `fused=True`, GradScaler does not wait for the device.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.Adagrad and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adagrad.html; Duchi et al., JMLR 12 (2011).

    Example:
      >>> import torch, torch_api
      >>> w = torch.ones(2, requires_grad=True)
      >>> opt = torch_api.MaskedAdagrad([("w", w)], lr=0.1)
      >>> w.sum().backward()
      >>> opt.step()
      >>> w.data
      tensor([0.9000, 0.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "initial_accumulator_value": initial_accumulator_value}
        switches = {"eps": eps, "maximize": maximize}
        options = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, torch_rules.ADAGRAD, **equation, **switches, **options, **engine)

    def share_memory(self) -> None:
        """Move the state into shared memory, for other processes that receive this optimizer.

        Each step then copies the state in and out.
        """
        for fields in self.state.values():
            for value in fields.values():
                if isinstance(value, torch.Tensor):  # a wrapper may have added other values
                    value.share_memory_()


class MaskedAdadelta(OptaxOptimizer):
    """torch.optim.Adadelta with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the factor of the update.
      rho: the decay rate of the averages of the squared gradient and of the squared update.
      eps: the number added inside both roots.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      foreach, capturable, differentiable: torch's switches, which change no result. `differentiable=True` is an error.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.Adadelta and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adadelta.html; Zeiler, arXiv:1212.5701.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedAdadelta(model.named_parameters(), mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        options = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, torch_rules.ADADELTA, **equation, **options, **engine)


class MaskedAdamax(OptaxOptimizer):
    """torch.optim.Adamax with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      betas: the decay rates of the average of the gradient, and of the maximum of its absolute values.
      eps: the number added to each absolute value before the maximum.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      foreach, differentiable, capturable: torch's switches, which change no result. `differentiable=True` is an error.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.Adamax and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adamax.html; Kingma and Ba, arXiv:1412.6980.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedAdamax(model.named_parameters(), mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        options = {"foreach": foreach, "differentiable": differentiable, "capturable": capturable}
        super().__init__(params, torch_rules.ADAMAX, **equation, **options, **engine)


class MaskedNAdam(OptaxOptimizer):
    """torch.optim.NAdam with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      betas: the decay rates of the averages of the gradient and of its square.
      eps: the number added to the denominator, outside of the root.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      momentum_decay: the momentum of step t is betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay)).
      decoupled_weight_decay: whether to decay as AdamW: p is multiplied by 1 - lr * weight_decay, and the gradient has no penalty.
      foreach, capturable, differentiable: torch's switches, which change no result. `differentiable=True` is an error.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.NAdam and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.NAdam.html; Dozat (2016),
    https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedNAdam(model.named_parameters(), mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
        switches = {"decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize}
        options = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, torch_rules.NADAM, **equation, **switches, **options, **engine)


class MaskedRAdam(OptaxOptimizer):
    """torch.optim.RAdam with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      betas: the decay rates of the averages of the gradient and of its square.
      eps: the number added to the denominator, outside of the root.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      decoupled_weight_decay: whether to decay as AdamW: p is multiplied by 1 - lr * weight_decay, and the gradient has no penalty.
      foreach, capturable, differentiable: torch's switches, which change no result. `differentiable=True` is an error.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.RAdam and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.RAdam.html; Liu et al., arXiv:1908.03265.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedRAdam(model.named_parameters(), mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        switches = {"maximize": maximize}
        options = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, torch_rules.RADAM, **equation, **switches, **options, **engine)


class MaskedRprop(OptaxOptimizer):
    """torch.optim.Rprop with masks: same arguments, results, errors and state_dict.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the initial step size of each element.
      etas: the factors of an element's step size where the sign of the gradient has changed, and where it has not.
      step_sizes: the least and the greatest step size.
      capturable, foreach, differentiable: torch's switches, which change no result. `differentiable=True` is an error.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.Rprop and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Rprop.html.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedRprop(model.named_parameters(), mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "etas": etas, "step_sizes": step_sizes, "maximize": maximize}
        options = {"capturable": capturable, "foreach": foreach, "differentiable": differentiable}
        super().__init__(params, torch_rules.RPROP, **equation, **options, **engine)


class MaskedASGD(OptaxOptimizer):
    """torch.optim.ASGD with masks: same arguments, results, errors and state_dict.

    `state[p]["ax"]` has the average of the parameter.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the initial learning rate.
      lambd: the decay: p is multiplied by 1 - lambd * (the present learning rate).
      alpha: lr is divided by (1 + lambd * lr * step) ** alpha.
      t0: the step from which on the parameter is averaged.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      foreach, differentiable, capturable: torch's switches, which change no result. `differentiable=True` is an error.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.ASGD and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.ASGD.html; Polyak and Juditsky (1992).

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedASGD(model.named_parameters(), mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay, "maximize": maximize}
        options = {"foreach": foreach, "differentiable": differentiable, "capturable": capturable}
        super().__init__(params, torch_rules.ASGD, **equation, **options, **engine)


class MaskedMuon(OptaxOptimizer):
    """torch.optim.Muon with masks: same arguments, results, errors and state_dict.

    It trains matrices only. Freeze other parameters by the mask, or train them by AdamW in a `PartitionedOptimizer` with
    `muon_labels`. Difference from torch, which has Muon from 2.9 on: frozen parameters need not be matrices.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the learning rate.
      weight_decay: the decoupled decay: p is multiplied by 1 - lr * weight_decay.
      momentum: the decay rate of the average of the gradient.
      nesterov: whether to step along the average of the gradient and the new momentum.
      ns_coefficients: the coefficients a, b and c of the Newton-Schulz iteration.
      eps: the least norm by which the matrix is divided before the iteration.
      ns_steps: the number of iterations, below 100.
      adjust_lr_fn: "original" or None multiplies lr by sqrt(max(1, rows / columns)), "match_rms_adamw" by 0.2 * sqrt(max(rows,
        columns)), "spectral_unclamped" (torch 2.15) by sqrt(rows / columns).
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.Muon and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Muon.html; Jordan et al.,
    https://kellerjordan.github.io/posts/muon/.

    Example:
      >>> import torch, torch_api
      >>> w = torch.eye(2, requires_grad=True)
      >>> opt = torch_api.MaskedMuon([("w", w)], lr=0.1)
      >>> w.sum().backward()
      >>> opt.step()
      >>> bool((w < torch.eye(2)).all())
      True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = matrix_rules.NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients}
        switches = {"eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, torch_rules.MUON, **equation, **switches, **engine)


class MaskedAdafactor(OptaxOptimizer):
    """torch.optim.Adafactor with masks: same arguments, results, errors and state_dict.

    The update is torch's, not that of optax.adafactor.

    Args:
      params: tensors, (name, tensor) pairs, or dict groups of either, as in torch.optim. Patterns in selectors need names.
      lr: the greatest step relative to the parameter; step t uses min(lr, 1 / sqrt(t)).
      beta2_decay: the averages of squared gradients decay by 1 - t ** beta2_decay at step t.
      eps: the least squared gradient (None: the machine epsilon of the parameter's dtype), and the least root mean square of a
        parameter.
      d: the bound on the root mean square of the update.
      weight_decay: the decoupled decay: p is multiplied by 1 - lr * weight_decay.
      foreach: torch's switch, which changes no result.
      maximize: whether to ascend: the gradient is negated.
      **engine: mask, decay_mask, lr_scale, max_grad_norm and the other options of every class: see `OptaxOptimizer`.

    Raises:
      ValueError, TypeError, RuntimeError: as torch.optim.Adafactor and `OptaxOptimizer`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adafactor.html; Shazeer and Stern, arXiv:1804.04235.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedAdafactor(model.named_parameters(), mask="weight", max_grad_norm=1.0)
      >>> [row["status"] for row in opt.report().rows]
      ['trained', 'frozen']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **engine: Unpack[SharedArguments],
    ) -> None:
        equation = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay, "maximize": maximize}
        options = {"foreach": foreach}
        super().__init__(params, torch_rules.ADAFACTOR, **equation, **options, **engine)
