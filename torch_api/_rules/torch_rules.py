"""The `OptimizerSpec` of each torch.optim optimizer: its equation with torch's checks."""

from __future__ import annotations

import functools

from bridge.rules.elementwise import adadelta, adagrad, adam, adamax, asgd, nadam, radam, rmsprop, rprop, sgd
from bridge.rules.matrix import adafactor, muon

from .optimizer_spec import Rule
from .validators import (
    Check,
    adjustment_is_known,
    at_least_one,
    betas_fit_foreach,
    betas_of_one_kind,
    eps_not_negative,
    etas_lie_around_one,
    fused_is_alone,
    is_matrix,
    is_real,
    lr_fits_foreach,
    nesterov_has_momentum,
    not_negative,
    not_positive,
    proper_betas,
    rho_is_a_share,
    steps_are_few,
)

MUON = Rule(
    muon,
    static=frozenset({"ns_steps", "adjust_lr_fn"}),
    shaped=True,
    checks=(
        *not_negative(
            lr="Learning rate should be >= 0 but is: {lr}",
            momentum="momentum should be >= 0 but is: {momentum}",
            weight_decay="weight decay should be >= 0 but is: {weight_decay}",
        ),
        Check(
            adjustment_is_known,
            "Adjust learning rate function {adjust_lr_fn} is not supported; expected 'original', 'match_rms_adamw' or None",
            always=True,
        ),
        Check(
            steps_are_few,
            "Number of steps must be less than 100 for computational efficiency, but ns_steps is {ns_steps}",
            always=True,
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
ADAFACTOR = Rule(
    adafactor,
    static=frozenset({"eps"}),
    shaped=True,
    typed=True,
    checks=(
        *not_negative(lr="Learning rate should be >= 0 but is: {lr}"),
        Check(functools.partial(not_positive, "beta2_decay"), "beta2_decay should be <= 0 but is: {beta2_decay}"),
        Check(functools.partial(eps_not_negative, 0), "epsilon1 should be >= 0 but is: {eps[0]}"),
        Check(functools.partial(eps_not_negative, 1), "epsilon2 should be >= 0 but is: {eps[1]}"),
        Check(functools.partial(at_least_one, "d"), "Clipping threshold d should be >= 1 but is: {d}"),
        *not_negative(weight_decay="weight_decay should be >= 0 but is: {weight_decay}"),
    ),
    leaf_checks=(Check(is_real, "Adafactor does not support complex parameters ({name!r})", RuntimeError),),
)


# Parts of torch's error texts.
_TENSOR = "as a Tensor is not supported for capturable=False and foreach=True"
_LR = "Invalid learning rate: {lr}"
_EPS = "Invalid epsilon value: {eps}"
_DECAY = "Invalid weight_decay value: {weight_decay}"
_ADAM_LIKE = (*not_negative(lr=_LR, eps=_EPS), *proper_betas(), *not_negative(weight_decay=_DECAY))

ADAM = Rule(
    adam,
    checks=(
        Check(lr_fits_foreach, f"lr {_TENSOR}"),
        *_ADAM_LIKE,
        Check(betas_of_one_kind, "betas must be either both floats or both Tensors"),
        Check(betas_fit_foreach, f"betas[0] {_TENSOR}"),
        *fused_is_alone(),
    ),
)
SGD = Rule(
    sgd,
    structural=frozenset({"momentum", "dampening"}),
    hidden={"seen": 1.0},
    checks=(
        *not_negative(lr=_LR, momentum="Invalid momentum value: {momentum}", weight_decay=_DECAY),
        Check(nesterov_has_momentum, "Nesterov momentum requires a momentum and zero dampening"),
        *fused_is_alone(),
    ),
)
RMSPROP = Rule(
    rmsprop,
    structural=frozenset({"momentum"}),
    checks=not_negative(
        lr=_LR, eps=_EPS, momentum="Invalid momentum value: {momentum}", weight_decay=_DECAY, alpha="Invalid alpha value: {alpha}"
    ),
)
ADAGRAD = Rule(
    adagrad,
    eager=True,
    checks=(
        *not_negative(
            lr=_LR,
            lr_decay="Invalid lr_decay value: {lr_decay}",
            weight_decay=_DECAY,
            initial_accumulator_value="Invalid initial_accumulator_value value: {initial_accumulator_value}",
            eps=_EPS,
        ),
        *fused_is_alone(),
    ),
)
ADADELTA = Rule(
    adadelta,
    checks=(
        *not_negative(lr=_LR),
        Check(rho_is_a_share, "Invalid rho value: {rho}"),
        *not_negative(eps=_EPS, weight_decay=_DECAY),
    ),
)
ADAMAX = Rule(adamax, checks=_ADAM_LIKE)
NADAM = Rule(nadam, checks=(*_ADAM_LIKE, *not_negative(momentum_decay="Invalid momentum_decay value: {momentum_decay}")))
RADAM = Rule(radam, checks=_ADAM_LIKE)
RPROP = Rule(
    rprop,
    checks=(*not_negative(lr=_LR), Check(etas_lie_around_one, "Invalid eta values: {etas[0]}, {etas[1]}")),
)
ASGD = Rule(asgd, checks=not_negative(lr=_LR, weight_decay=_DECAY))
