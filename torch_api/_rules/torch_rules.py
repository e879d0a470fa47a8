"""The `OptimizerSpec` of each torch.optim optimizer: its equation with torch's checks."""

from __future__ import annotations

import functools

from bridge.rules.elementwise import adadelta, adagrad, adam, adamax, asgd, nadam, radam, rmsprop, rprop, sgd
from bridge.rules.matrix import adafactor, muon

from .optimizer_spec import OptimizerSpec
from .validators import (
    Check,
    adjust_lr_fn_is_known,
    at_least_one,
    beta_checks,
    betas_fit_foreach,
    betas_have_one_type,
    eps_not_negative,
    etas_enclose_one,
    fused_checks,
    is_matrix,
    is_real,
    lr_fits_foreach,
    nesterov_has_momentum,
    non_negative_checks,
    not_positive,
    ns_steps_in_range,
    rho_in_unit_interval,
)

MUON = OptimizerSpec(
    muon,
    static_hyperparams=frozenset({"ns_steps", "adjust_lr_fn"}),
    needs_shape=True,
    checks=(
        *non_negative_checks(
            lr="Learning rate should be >= 0 but is: {lr}",
            momentum="momentum should be >= 0 but is: {momentum}",
            weight_decay="weight decay should be >= 0 but is: {weight_decay}",
        ),
        Check(
            adjust_lr_fn_is_known,
            "Adjust learning rate function {adjust_lr_fn} is not supported; expected 'original', 'match_rms_adamw', 'spectral_unclamped' "
            "or None",
            at_every_step=True,
        ),
        Check(
            ns_steps_in_range,
            "Number of steps must be less than 100 for computational efficiency, but ns_steps is {ns_steps}",
            at_every_step=True,
        ),
    ),
    leaf_checks=(
        Check(
            is_matrix,
            "Muon only supports 2D parameters whereas we found a parameter with size: {size} ({name!r}). Freeze it by the mask, or give "
            "it another update: PartitionedOptimizer with labels=torch_api.muon_labels.",
        ),
        Check(is_real, "Muon does not support complex parameters ({name!r})", RuntimeError),
    ),
)
ADAFACTOR = OptimizerSpec(
    adafactor,
    static_hyperparams=frozenset({"eps"}),
    needs_shape=True,
    takes_dtype=True,
    checks=(
        *non_negative_checks(lr="Learning rate should be >= 0 but is: {lr}"),
        Check(functools.partial(not_positive, "beta2_decay"), "beta2_decay should be <= 0 but is: {beta2_decay}"),
        Check(functools.partial(eps_not_negative, 0), "epsilon1 should be >= 0 but is: {eps[0]}"),
        Check(functools.partial(eps_not_negative, 1), "epsilon2 should be >= 0 but is: {eps[1]}"),
        Check(functools.partial(at_least_one, "d"), "Clipping threshold d should be >= 1 but is: {d}"),
        *non_negative_checks(weight_decay="weight_decay should be >= 0 but is: {weight_decay}"),
    ),
    leaf_checks=(Check(is_real, "Adafactor does not support complex parameters ({name!r})", RuntimeError),),
)


# Parts of torch's error texts.
_TENSOR = "as a Tensor is not supported for capturable=False and foreach=True"
_LR = "Invalid learning rate: {lr}"
_EPS = "Invalid epsilon value: {eps}"
_DECAY = "Invalid weight_decay value: {weight_decay}"
_ADAM_LIKE = (*non_negative_checks(lr=_LR, eps=_EPS), *beta_checks(), *non_negative_checks(weight_decay=_DECAY))

ADAM = OptimizerSpec(
    adam,
    checks=(
        Check(lr_fits_foreach, f"lr {_TENSOR}"),
        *_ADAM_LIKE,
        Check(betas_have_one_type, "betas must be either both floats or both Tensors"),
        Check(betas_fit_foreach, f"betas[0] {_TENSOR}"),
        *fused_checks(),
    ),
)
SGD = OptimizerSpec(
    sgd,
    optional_hyperparams=frozenset({"momentum", "dampening"}),
    hidden_state={"seen": 1.0},
    checks=(
        *non_negative_checks(lr=_LR, momentum="Invalid momentum value: {momentum}", weight_decay=_DECAY),
        Check(nesterov_has_momentum, "Nesterov momentum requires a momentum and zero dampening"),
        *fused_checks(),
    ),
)
RMSPROP = OptimizerSpec(
    rmsprop,
    optional_hyperparams=frozenset({"momentum"}),
    checks=non_negative_checks(
        lr=_LR, eps=_EPS, momentum="Invalid momentum value: {momentum}", weight_decay=_DECAY, alpha="Invalid alpha value: {alpha}"
    ),
)
ADAGRAD = OptimizerSpec(
    adagrad,
    eager_state=True,
    checks=(
        *non_negative_checks(
            lr=_LR,
            lr_decay="Invalid lr_decay value: {lr_decay}",
            weight_decay=_DECAY,
            initial_accumulator_value="Invalid initial_accumulator_value value: {initial_accumulator_value}",
            eps=_EPS,
        ),
        *fused_checks(),
    ),
)
ADADELTA = OptimizerSpec(
    adadelta,
    checks=(
        *non_negative_checks(lr=_LR),
        Check(rho_in_unit_interval, "Invalid rho value: {rho}"),
        *non_negative_checks(eps=_EPS, weight_decay=_DECAY),
    ),
)
ADAMAX = OptimizerSpec(adamax, checks=_ADAM_LIKE)
NADAM = OptimizerSpec(nadam, checks=(*_ADAM_LIKE, *non_negative_checks(momentum_decay="Invalid momentum_decay value: {momentum_decay}")))
RADAM = OptimizerSpec(radam, checks=_ADAM_LIKE)
RPROP = OptimizerSpec(
    rprop,
    checks=(*non_negative_checks(lr=_LR), Check(etas_enclose_one, "Invalid eta values: {etas[0]}, {etas[1]}")),
)
ASGD = OptimizerSpec(
    asgd,
    checks=non_negative_checks(lr=_LR, lambd="Invalid lambd value: {lambd}", alpha="Invalid alpha value: {alpha}", weight_decay=_DECAY),
)

# By the name of the class of torch.optim. The classes of `torch_api` have the same names after "Masked".
SPECS_BY_CLASS: dict[str, OptimizerSpec] = {
    "Adam": ADAM, "AdamW": ADAM, "SGD": SGD, "RMSprop": RMSPROP, "Adagrad": ADAGRAD, "Adadelta": ADADELTA, "Adamax": ADAMAX,
    "NAdam": NADAM, "RAdam": RADAM, "Rprop": RPROP, "ASGD": ASGD, "Muon": MUON, "Adafactor": ADAFACTOR,
}  # fmt: skip
