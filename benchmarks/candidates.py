"""The optimizers to compare: torch.optim, optax in pure JAX, maskbridge, and packages by others.

A maker takes parameters that already have gradients, and returns the function that makes one step. Packages that are not installed
are left out, and the tables say so.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from typing import Any

import jax
import optax
import torch
from common import PEERS, Maker, Params, Settings, Step, installed

import bridge
import torch_api

HYPERPARAMS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
EMA_DECAY = 0.999
MAX_NORM = 1.0
FUSED, OURS, OPTAX = "torch fused", "maskbridge", "optax in pure JAX"
OPTAX_CHAIN = "maskbridge, optax.chain"
DEFAULT, FOREACH, COMPILED = "torch default", "torch foreach", "torch compiled"
NOT_ASKED, NO_COMPILER, NOT_INSTALLED = "needs --compiled", "no C++ compiler here", "not installed"


def stepping(factory: Callable[..., Any], **arguments: Any) -> Maker:
    """Return the maker of an optimizer that has torch's interface."""
    return lambda params: factory(params, **arguments).step


def of_peer(package: str, name: str, **arguments: Any) -> Maker:
    """Like `stepping`, for a class of an optional package, which is imported only when the maker is called."""
    return lambda params: getattr(importlib.import_module(PEERS[package]), name)(params, **arguments).step


def compiled(factory: Callable[..., Any], **arguments: Any) -> Maker:
    """`torch.compile` of the step of torch's foreach implementation, as in torch's own recipe."""
    return lambda params: torch.compile(factory(params, foreach=True, **arguments).step)


def adamw_in_jax(clip: bool = False) -> optax.GradientTransformation:
    b1, b2 = HYPERPARAMS["betas"]
    adamw = optax.adamw(HYPERPARAMS["lr"], b1, b2, eps=HYPERPARAMS["eps"], weight_decay=HYPERPARAMS["weight_decay"])
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw) if clip else adamw


def in_jax(tx: optax.GradientTransformation, average: bool = False) -> Maker:
    """What a user would write with optax alone: one jitted update that donates parameters and state."""

    def make(params: Params) -> Step:
        grads = bridge.to_jax([p.grad for p in params])
        values = [jax.numpy.array(x, copy=True) for x in bridge.to_jax([p.detach() for p in params])]
        means = [jax.numpy.array(x, copy=True) for x in values] if average else []
        current = [values, jax.jit(tx.init)(values), means]

        def update(values: Any, state: Any, means: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, values)
            values = optax.apply_updates(values, updates)
            return values, state, optax.incremental_update(values, means, 1 - EMA_DECAY) if average else means

        program = jax.jit(update, donate_argnums=(0, 1, 2))

        def step() -> None:
            current[:] = jax.block_until_ready(program(*current, grads))

        return step

    return make


def adamw(settings: Settings) -> tuple[dict[str, Maker], dict[str, str]]:
    """All candidates for AdamW, and for each missing one the reason."""
    torch_adamw = torch.optim.AdamW
    makers: dict[str, Maker] = {
        DEFAULT: stepping(torch_adamw, **HYPERPARAMS),
        FOREACH: stepping(torch_adamw, foreach=True, **HYPERPARAMS),
        FUSED: stepping(torch_adamw, fused=True, **HYPERPARAMS),
        OPTAX: in_jax(adamw_in_jax()),
        OURS: stepping(torch_api.MaskedAdamW, **HYPERPARAMS),
        "maskbridge, copying": stepping(torch_api.MaskedAdamW, writeback="copy", **HYPERPARAMS),
    }
    optional = {
        "TorchOpt": ("TorchOpt", of_peer("TorchOpt", "AdamW", **HYPERPARAMS)),
        # Its AdamW is torch's class; this is the closest optimizer of its own.
        "pytorch_optimizer StableAdamW": ("pytorch_optimizer", of_peer("pytorch_optimizer", "StableAdamW", **HYPERPARAMS)),
        "HeavyBall": ("HeavyBall", of_peer("HeavyBall", "AdamW", consume_grad=False, **HYPERPARAMS)),
        COMPILED: (None, compiled(torch_adamw, **HYPERPARAMS)),
    }
    missing: dict[str, str] = {}
    for name, (package, maker) in optional.items():
        reason = absent(package, name in (COMPILED, "HeavyBall"), settings)
        if reason is None:
            makers[name] = maker
        else:
            missing[name] = reason
    return makers, missing


def absent(package: str | None, builds: bool, settings: Settings) -> str | None:
    """Why a candidate cannot take part; None if it can. `builds`: torch.compile builds it when it first runs."""
    if package is not None and not installed(package):
        return NOT_INSTALLED
    if builds and not settings.compiled:
        return NOT_ASKED
    compilers = ("g++", "clang++", os.environ.get("CXX", ""))
    return NO_COMPILER if builds and not any(map(shutil.which, compilers)) else None


# ------------------------------------------------------------------ optimizers for which torch has no fused kernel

# Names of the classes: in torch.optim (None if it has none), ours, in pytorch_optimizer (None unless it has its own); optax's maker.
UNFUSED: dict[str, tuple[str | None, str, str | None, Callable[[], optax.GradientTransformation] | None]] = {
    "NAdam": ("NAdam", "MaskedNAdam", None, lambda: optax.nadam(2e-3)),
    "RAdam": ("RAdam", "MaskedRAdam", "RAdam", lambda: optax.radam(1e-3)),
    "RMSprop": ("RMSprop", "MaskedRMSprop", None, lambda: optax.rmsprop(1e-2, 0.99)),
    "Adagrad": ("Adagrad", "MaskedAdagrad", None, lambda: optax.adagrad(1e-2)),
    "Adamax": ("Adamax", "MaskedAdamax", "AdaMax", lambda: optax.adamax(2e-3)),
    "Lion": (None, "MaskedLion", "Lion", lambda: optax.lion(1e-4)),
    "LAMB": (None, "MaskedLamb", "Lamb", lambda: optax.lamb(1e-3)),
    "Adafactor": ("Adafactor", "MaskedAdafactor", "AdaFactor", None),
    "Muon": ("Muon", "MaskedMuon", None, None),
}
NO_FOREACH = {"Muon", "Adafactor"}  # Muon has no foreach implementation in torch; for Adafactor it is the default
LEARNING_RATE = {"Lion": 1e-4, "LAMB": 1e-3}  # our classes have no default, like optax's
# The time a fused kernel would take: that of a fused optimizer of torch which reads and writes as many bytes, 28 or 20 per parameter.
YARDSTICK = "torch fused, as many bytes"
OF_28: Maker = stepping(torch.optim.AdamW, fused=True)
OF_20: Maker = stepping(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)
AS_MANY_BYTES = {"NAdam": OF_28, "RAdam": OF_28, "Adamax": OF_28, "RMSprop": OF_20, "Adagrad": OF_20, "Lion": OF_20}


def unfused(name: str, bound: bool = False) -> tuple[dict[str, Maker], str | None, dict[str, str]]:
    """For one entry of `UNFUSED`: the candidates, the name of the baseline if there is one, and what is missing with the reason.

    `bound`: for the speed bound, which always needs a candidate of torch: a ratio within a round varies less than milliseconds do.
    """
    theirs, ours, other, in_optax = UNFUSED[name]
    lr = {"lr": LEARNING_RATE[name]} if name in LEARNING_RATE else {}
    makers: dict[str, Maker] = {}
    missing: dict[str, str] = {}
    if theirs is not None and not hasattr(torch.optim, theirs):
        missing[DEFAULT] = f"torch {torch.__version__} has no {theirs}"
    elif theirs is not None:
        makers[DEFAULT] = stepping(getattr(torch.optim, theirs))
        if name not in NO_FOREACH:
            makers[FOREACH] = stepping(getattr(torch.optim, theirs), foreach=True)
    if other is not None:
        if installed("pytorch_optimizer"):
            makers["pytorch_optimizer"] = of_peer("pytorch_optimizer", other, **lr)
        else:
            missing["pytorch_optimizer"] = NOT_INSTALLED
    if in_optax is not None:
        makers[OPTAX] = in_jax(in_optax())
    if name in AS_MANY_BYTES:
        makers[YARDSTICK] = AS_MANY_BYTES[name]
    if bound and not any(maker.startswith("torch") for maker in makers):
        makers[f"{FUSED}, AdamW"] = OF_28
    makers[OURS] = stepping(getattr(torch_api, ours), **lr)
    return makers, next((name for name in (DEFAULT, "pytorch_optimizer") if name in makers), None), missing


# ------------------------------------------------------------------ other dtypes, and odd lengths

# For each table: title, set, dtype of the parameters, torch.optim's class, its arguments, and further variants of ours by name.
TYPES: list[tuple[str, str, torch.dtype, str, dict[str, Any], dict[str, dict[str, Any]]]] = [
    ("AdamW, an odd length", "odd", torch.float32, "AdamW", HYPERPARAMS, {}),
    ("AdamW", "large", torch.float32, "AdamW", HYPERPARAMS, {"state in bfloat16": {"state_dtype": torch.bfloat16}}),
    (
        "AdamW, bfloat16",
        "large",
        torch.bfloat16,
        "AdamW",
        HYPERPARAMS,
        {
            "state in float32": {"state_dtype": torch.float32},
            "master weights": {"master_weights": True},
            "stochastic rounding": {"stochastic_rounding": True},
        },
    ),
    ("AdamW, float16", "large", torch.float16, "AdamW", HYPERPARAMS, {}),
    ("AdamW, float64", "large", torch.float64, "AdamW", HYPERPARAMS, {}),
    ("SGD, momentum, bfloat16", "large", torch.bfloat16, "SGD", {"lr": 1e-3, "momentum": 0.9}, {}),
]


def of_types() -> list[tuple[str, str, torch.dtype, dict[str, Maker]]]:
    """Title, set, dtype and candidates of each table."""
    tables = []
    for title, shapes, dtype, rule, arguments, besides in TYPES:
        theirs, ours = getattr(torch.optim, rule), getattr(torch_api, f"Masked{rule}")
        makers = {
            DEFAULT: stepping(theirs, **arguments),
            FUSED: stepping(theirs, fused=True, **arguments),
            OURS: stepping(ours, **arguments),
        }
        makers |= {f"{OURS}, {how}": stepping(ours, **arguments, **options) for how, options in besides.items()}
        tables.append((title, shapes, dtype, makers))
    return tables


# ------------------------------------------------------------------ the end of a training step


class Holder(torch.nn.Module):
    """A module that holds given parameters, because torch's AveragedModel takes only modules."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList(params)


def torch_tail(average: dict[str, Any] | None) -> Maker:
    """Clip, step by fused AdamW, and average the weights as `torch.optim.swa_utils` does; `average` None: no average.

    Clipping changes the gradients, which all candidates share: from the second time on, their norm is at the limit and stays there.
    """

    def make(params: Params) -> Step:
        optimizer = torch.optim.AdamW(params, fused=True, **HYPERPARAMS)
        averaged = None if average is None else torch.optim.swa_utils.AveragedModel(Holder(params), **average)
        module = Holder(params)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            optimizer.step()
            if averaged is not None:
                averaged.update_parameters(module)

        return step

    return make


def tail() -> dict[str, tuple[dict[str, Maker], str]]:
    """For each table of this section: its candidates, and which of them is the baseline."""
    swa = torch.optim.swa_utils
    norm = {"max_grad_norm": MAX_NORM, **HYPERPARAMS}
    clipped = "torch clip_grad_norm_, fused"
    averaged, plain = f"{clipped}, AveragedModel (multi_avg_fn)", f"{clipped}, AveragedModel (avg_fn)"
    return {
        "clip, AdamW": (
            {
                clipped: torch_tail(None),
                OPTAX: in_jax(adamw_in_jax(clip=True)),
                OURS: stepping(torch_api.MaskedAdamW, **norm),
                OPTAX_CHAIN: stepping(torch_api.OptaxOptimizer, tx=adamw_in_jax(clip=True)),
            },
            clipped,
        ),
        "clip, AdamW, average of the weights": (
            {
                averaged: torch_tail({"multi_avg_fn": swa.get_ema_multi_avg_fn(EMA_DECAY)}),
                plain: torch_tail({"avg_fn": swa.get_ema_avg_fn(EMA_DECAY)}),
                OPTAX: in_jax(adamw_in_jax(clip=True), average=True),
                OURS: stepping(torch_api.MaskedAdamW, ema_decay=EMA_DECAY, **norm),
            },
            averaged,
        ),
        "unscale, finite check, AdamW": (
            {
                "torch GradScaler, fused": scaled(torch.optim.AdamW),
                OURS: scaled(torch_api.MaskedAdamW),
            },
            "torch GradScaler, fused",
        ),
    }


def scaled(factory: Callable[..., Any]) -> Maker:
    """A step by GradScaler that leaves unscaling to the optimizer, as `fused=True` requests.

    The scale is 1, because torch's kernel writes the unscaled gradients back, and the candidates share them.
    """

    def make(params: Params) -> Step:
        device = params[0].device.type
        optimizer = factory(params, fused=True, **HYPERPARAMS)
        scaler = torch.amp.GradScaler(device, init_scale=1.0, growth_interval=1 << 30)
        scaler.scale(torch.zeros((), device=device))  # the first call creates the scaler's tensor for the scale

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        return step

    return make
