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
    """torch.optim.Adam with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adam.html
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
    """torch.optim.AdamW with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html
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
    """torch.optim.SGD with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.SGD.html
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
    """torch.optim.RMSprop with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.RMSprop.html
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
    """torch.optim.Adagrad with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Each trained parameter has its state from construction on, as in torch. Difference from torch: a group's own
    `initial_accumulator_value` takes effect.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adagrad.html
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
    """torch.optim.Adadelta with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adadelta.html
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
    """torch.optim.Adamax with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adamax.html
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
    """torch.optim.NAdam with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.NAdam.html
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
    """torch.optim.RAdam with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.RAdam.html
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
    """torch.optim.Rprop with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    `lr` is the initial step size.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Rprop.html
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
    """torch.optim.ASGD with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.ASGD.html
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
    """torch.optim.Muon with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    It trains matrices only. Freeze other parameters by the mask, or train them by AdamW in a `PartitionedOptimizer` with
    `muon_labels`. Difference from torch, which has Muon from 2.9 on: frozen parameters need not be matrices.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Muon.html
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
    """torch.optim.Adafactor with masks: same arguments, results and state_dict. See `OptaxOptimizer` for `**engine`.

    The update is torch's, not that of optax.adafactor.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adafactor.html
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
