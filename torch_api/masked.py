"""Drop-in classes for torch.optim: torch's arguments in torch's order, and the engine's own behind them."""

from __future__ import annotations

from typing import Any

from bridge import rules

from .optimizer import OptaxOptimizer


class MaskedAdam(OptaxOptimizer):
    """torch.optim.Adam with masks: same arguments, numbers and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.Adam.html
    """

    def __init__(
        self,
        params: Any,
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
        **engine: Any,
    ) -> None:
        torch_options = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        equation = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, rules.ADAM, **equation, **torch_options, decoupled_weight_decay=decoupled_weight_decay, **engine)


class MaskedAdamW(MaskedAdam):
    """torch.optim.AdamW with masks: same arguments, numbers and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.AdamW.html
    """

    def __init__(
        self,
        params: Any,
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
        **engine: Any,
    ) -> None:
        torch_options = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, **torch_options, **engine
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = True  # older torch saved AdamW without it; as torch.optim.AdamW does
        super().__setstate__(state)


class MaskedSGD(OptaxOptimizer):
    """torch.optim.SGD with masks: same arguments, numbers and state_dict. See `OptaxOptimizer` for `**engine`.

    Source: https://pytorch.org/docs/stable/generated/torch.optim.SGD.html
    """

    def __init__(
        self,
        params: Any,
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
        **engine: Any,
    ) -> None:
        torch_options = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        equation = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, rules.SGD, **equation, maximize=maximize, **torch_options, **engine)
