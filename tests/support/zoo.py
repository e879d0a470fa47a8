"""Every transformation of the installed optax and optax.contrib, ready to run, and the data of the table in docs/."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import torch_api

SHAPES = {"body.weight": (6, 5), "body.bias": (6,), "norm.scale": (5,), "head.weight": (3, 6)}
SCHEDULE = optax.cosine_decay_schedule(0.02, 30)
STEPS = 20


def key():
    return jax.random.key(7)


def value(step, params):
    """Return a loss that falls for some steps and then stays constant."""
    return {"value": np.float32(2.0 * 0.8 ** min(step, 12))}


def curvature(params):
    """A JAX function of the parameters, for transformations that need a Hessian."""
    return sum(jnp.sum(jnp.cos(p)) for p in jax.tree.leaves(params))


class Entry(NamedTuple):
    """A ready transformation, its factory with hyperparams (or None), and the extra arguments of its update."""

    make: Any
    factory: Any = None
    hyperparams: Any = None
    extra: Any = None
    kind: str = "optimizer"
    dtype: Any = torch.float32


def of(factory, extra=None, kind="optimizer", fixed=None, **hyperparams):
    """Return an entry that can be made ready or by its factory."""
    given = (
        {"learning_rate": hyperparams["lr"], **{k: v for k, v in hyperparams.items() if k != "lr"}} if "lr" in hyperparams else hyperparams
    )
    return Entry(
        lambda: factory(**given, **(fixed() if fixed else {})), factory, {**hyperparams, **(fixed() if fixed else {})}, extra, kind
    )


def scaled(make, lr=-0.02, **kw):
    """Return an entry for a bare `scale_by_...` times a step size."""
    return Entry(lambda: optax.chain(make(), optax.scale(lr)), kind="direction", **kw)


def wrapper(make, **kw):
    return Entry(make, kind="wrapper", **kw)


def entries():
    contrib = optax.contrib
    with_lr = (
        "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw novograd optimistic_adam"
    )
    with_lr += " optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sign_sgd signum sm3 yogi"
    zoo = {f"optax.{name}": of(getattr(optax, name), lr=0.02) for name in with_lr.split() if hasattr(optax, name)}
    zoo["optax.adafactor"] = of(optax.adafactor, lr=0.02, min_dim_size_to_factor=4)
    zoo["optax.sgd"] = of(optax.sgd, lr=0.02, momentum=0.9, nesterov=True)
    zoo["optax.noisy_sgd"] = of(optax.noisy_sgd, lr=0.02, fixed=lambda: {"key": key()})
    zoo["optax.polyak_sgd"] = of(optax.polyak_sgd, max_learning_rate=0.1, extra=value)
    zoo["optax.lbfgs"] = of(optax.lbfgs, lr=0.02, memory_size=4, fixed=lambda: {"linesearch": None})
    for name in [
        "acprop",
        "ademamix",
        "adopt",
        "cocob",
        "dadapt_adamw",
        "dog",
        "dowg",
        "madgrad",
        "muon",
        "prodigy",
        "schedule_free_adamw",
        "schedule_free_sgd",
        "simplified_ademamix",
    ]:
        if hasattr(contrib, name):
            zoo[f"optax.contrib.{name}"] = of(getattr(contrib, name), lr={"cocob": 1.0, "simplified_ademamix": 1e-4}.get(name, 0.02))
    zoo["optax.contrib.momo"] = of(contrib.momo, lr=0.1, extra=value)
    zoo["optax.contrib.momo_adam"] = of(contrib.momo_adam, lr=0.02, extra=value)
    zoo["optax.contrib.sophia"] = of(contrib.sophia, lr=0.02, update_interval=3, extra=lambda step, params: {"obj_fn": curvature})
    if hasattr(contrib, "galore"):
        zoo["optax.contrib.galore"] = of(contrib.galore, lr=0.02, rank=2, update_proj_gap=7)
    return zoo | directions(contrib) | wrappers(contrib)


def matrices_by_muon():
    dimensions = getattr(optax.contrib, "MuonDimensionNumbers", None)  # an older optax has none and updates every matrix
    numbers = lambda tree: jax.tree.map(lambda p: dimensions() if p.ndim == 2 else None, tree)  # noqa: E731
    matrices = lambda tree: jax.tree.map(lambda p: p.ndim == 2, tree)  # noqa: E731
    return optax.masked(optax.contrib.scale_by_muon(**({"weight_dimension_numbers": numbers} if dimensions else {})), matrices)


def directions(contrib):
    names = ["adadelta", "adam", "adamax", "adan", "amsgrad", "belief", "lion", "novograd", "radam", "rms", "rprop", "rss"]
    names += ["sign", "sm3", "stddev", "trust_ratio", "yogi"]
    zoo = {f"optax.scale_by_{name}": scaled(getattr(optax, f"scale_by_{name}")) for name in names if hasattr(optax, f"scale_by_{name}")}
    zoo["optax.scale_by_rprop"] = scaled(lambda: optax.scale_by_rprop(0.01))
    zoo["optax.scale_by_distance_over_gradients"] = scaled(optax.scale_by_distance_over_gradients, lr=-1.0)
    zoo["optax.scale_by_lbfgs"] = scaled(lambda: optax.scale_by_lbfgs(3))
    zoo["optax.scale_by_learning_rate"] = wrapper(lambda: optax.scale_by_learning_rate(SCHEDULE))
    zoo["optax.scale_by_optimistic_gradient"] = scaled(optax.scale_by_optimistic_gradient)
    zoo["optax.scale_by_param_block_norm"] = scaled(optax.scale_by_param_block_norm)
    zoo["optax.scale_by_param_block_rms"] = scaled(optax.scale_by_param_block_rms)
    zoo["optax.scale_by_polyak"] = scaled(optax.scale_by_polyak, lr=-0.1, extra=value)
    zoo["optax.scale_by_schedule"] = wrapper(lambda: optax.scale_by_schedule(lambda count: -SCHEDULE(count)))
    zoo["optax.scale_by_factored_rms"] = scaled(lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4))
    for name in ["acprop", "ademamix", "adopt", "cocob", "galore", "madgrad", "muon", "simplified_ademamix"]:
        make = getattr(contrib, f"scale_by_{name}", None)
        if make is not None:
            if name == "muon":
                make = matrices_by_muon
            fixed = {"galore": {"rank": 2}, "madgrad": {"learning_rate": 0.02}}.get(name, {})
            zoo[f"optax.contrib.scale_by_{name}"] = scaled(
                lambda make=make, fixed=fixed: make(**fixed), lr=-1e-3 if "simplified" in name else -0.02
            )
    return zoo


def wrappers(contrib):
    adam = lambda: optax.adam(0.02)  # noqa: E731
    zoo = {
        "optax.chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(SCHEDULE)),
        "optax.named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", adam())),
        "optax.inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=0.1),
        "optax.inject_stateful_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(Halving()),
        "optax.MultiSteps": lambda: optax.MultiSteps(adam(), 3),
        "optax.apply_if_finite": lambda: optax.apply_if_finite(adam(), 2),
        "optax.lookahead": lambda: optax.lookahead(adam(), 3, 0.5),
        "optax.conditionally_transform": lambda: optax.chain(
            adam(), optax.conditionally_transform(optax.scale(0.5), lambda count, **_: count > 5)
        ),
        "optax.conditionally_mask": lambda: optax.conditionally_mask(adam(), lambda count, **_: count % 2 == 0),
        "optax.flatten": lambda: optax.flatten(adam()),
        "optax.ema": lambda: optax.chain(optax.ema(0.8), optax.scale(-0.02)),
        "optax.trace": lambda: optax.chain(optax.trace(0.9, nesterov=True), optax.scale(-0.02)),
        "optax.clip": lambda: optax.chain(optax.clip(0.3), optax.sgd(0.02)),
        "optax.clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.3), optax.sgd(0.02)),
        "optax.clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.02)),
        "optax.adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.2)),
        "optax.add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, key()), optax.sgd(0.02)),
        "optax.add_decayed_weights": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.02)),
        "optax.apply_every": lambda: optax.chain(optax.apply_every(4), optax.sgd(0.02)),
        "optax.centralize": lambda: optax.chain(optax.centralize(), optax.sgd(0.02)),
        "optax.keep_params_nonnegative": lambda: optax.chain(optax.sgd(0.05), optax.keep_params_nonnegative()),
        "optax.normalize_by_update_norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.scale(-0.05)),
        "optax.zero_nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.02)),
        "optax.masked": lambda: optax.masked(optax.adam(0.02), lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
        "optax.partition": lambda: optax.partition({"a": adam(), "b": optax.sgd(0.02)}, {"body": "a", "norm": "b", "head": "a"}),
        "optax.multi_transform": lambda: optax.multi_transform(
            {"a": adam(), "b": optax.sgd(0.02)}, {"body": "a", "norm": "b", "head": "a"}
        ),
        "optax.set_to_zero": lambda: optax.chain(adam(), optax.masked(optax.set_to_zero(), {"body": True, "norm": False, "head": False})),
        "optax.identity": lambda: optax.chain(optax.identity(), optax.sgd(0.02)),
        "optax.scale": lambda: optax.scale(-0.02),
        "optax.stateless": lambda: optax.stateless(lambda g, p: jax.tree.map(lambda g: -0.02 * jnp.tanh(g), g)),
        "optax.stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -0.02 * (g + p)),
        "optax.with_extra_args_support": lambda: optax.with_extra_args_support(adam()),
        "optax.freeze": lambda: optax.chain(adam(), optax.freeze({"body": True, "norm": False, "head": False})),
        "optax.selective_transform": lambda: optax.selective_transform(adam(), freeze_mask={"body": True, "norm": False, "head": False}),
        "optax.snapshot": lambda: optax.chain(optax.snapshot("norm", optax.global_norm), adam()),
        "optax.contrib.sam": lambda: contrib.sam(optax.sgd(0.05), optax.chain(contrib.normalize(), optax.sgd(0.01)), sync_period=2),
        "optax.contrib.mechanize": lambda: contrib.mechanize(optax.sgd(0.02)),
        "optax.contrib.normalize": lambda: optax.chain(contrib.normalize(), optax.sgd(0.05)),
        "optax.contrib.schedule_free": lambda: contrib.schedule_free(optax.sgd(0.05), 0.05, b1=0.9),
    }
    made = {name: wrapper(make) for name, make in zoo.items() if reachable(name)}
    made["optax.contrib.reduce_on_plateau"] = wrapper(lambda: optax.chain(adam(), contrib.reduce_on_plateau(0.5, patience=2)), extra=value)
    made["optax.contrib.split_real_and_imaginary"] = wrapper(lambda: contrib.split_real_and_imaginary(adam()))._replace(
        dtype=torch.complex64
    )
    skipping = lambda: optax.MultiSteps(adam(), 1, should_skip_update_fn=optax.skip_not_finite)  # noqa: E731
    return made | {"optax.skip_not_finite": wrapper(skipping)}


class Halving(optax.StatefulSchedule if hasattr(optax, "StatefulSchedule") else object):
    """A schedule with its own state."""

    def init(self):
        return jnp.asarray(0.04)

    def update(self, state, **_):
        return state * 0.9

    def __call__(self, state, **_):
        return state


def reachable(name):
    place = optax
    for part in name.split(".")[1:]:
        place = getattr(place, part, None)
    return place is not None


# Public functions that return a transformation which cannot be used -> the reason.
REFUSED = {
    "optax.contrib.differentially_private_aggregate": "needs a gradient for every example; a parameter has one",
    "optax.monitor": "its state has another structure after the first update than `init` gives, so it cannot be put into fixed memory",
    "optax.measure_with_ema": "is a measure for optax.monitor, no transformation of gradients",
    "optax.contrib.dpsgd": "as differentially_private_aggregate",
}
# Line searches call the loss; tests of their own run them with a closure.
WITH_CLOSURE = ("optax.lbfgs", "optax.scale_by_backtracking_linesearch", "optax.scale_by_zoom_linesearch")


def start(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(0.3 * torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in SHAPES.items()}


def gradients(dtype=torch.float32, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()} for _ in range(steps)]


def nested(flat):
    tree = {}
    for name, leaf in flat.items():
        first, second = name.split(".")
        tree.setdefault(first, {})[second] = jnp.asarray(leaf.detach().numpy())
    return tree


def in_pure_jax(tx, entry, params, grads):
    """Return the parameters by name after the steps, computed by optax."""
    tree = nested(params)
    pairs = optax.LookaheadParams(tree, tree) if entry is ENTRIES.get("optax.lookahead") else tree
    state = tx.init(pairs)
    functions = entry.extra is not None and any(callable(v) for v in entry.extra(0, params).values())
    further = entry.extra(0, params) if functions else {}

    @jax.jit
    def advance(params, state, g, extra):
        updates, state = tx.update(g, state, params, **extra, **further)
        return optax.apply_updates(params, updates), state

    for step, g in enumerate(grads):
        extra = {} if entry.extra is None or functions else entry.extra(step, params)
        pairs, state = advance(pairs, state, nested(g), extra)
    tree = pairs.fast if isinstance(pairs, optax.LookaheadParams) else pairs
    return {name: np.asarray(tree[name.split(".")[0]][name.split(".")[1]]) for name in params}


def advance(optimizer, entry, params, grads, first=0):
    for step, g in enumerate(grads, first):
        for name, p in params.items():
            p.grad = g[name].clone()
        optimizer.step(**({} if entry.extra is None else entry.extra(step, params)))


def by_maskbridge(tx, entry, params, grads, **hyperparams):
    optimizer = torch_api.OptaxOptimizer(params.items(), tx, **hyperparams)
    advance(optimizer, entry, params, grads)
    return optimizer


def movement_error(ours, reference, begun):
    """Return the largest difference of the movements over the largest movement."""
    moved = max(float(np.abs(reference[name] - begun[name]).max()) for name in reference)
    worst = max(float(np.abs(ours[name] - reference[name]).max()) for name in reference)
    return worst / moved if math.isfinite(worst) and moved else math.inf


ENTRIES = entries()


def traced(optimizer):
    """Return the hyperparams that are inputs of the compiled program."""
    return [name for name, _ in optimizer._hyperparam_table.transforms[0].traced_hyperparams]


def form(optimizer):
    """Return whether parameters are updated jointly or separately, and flattened or not, for the docs table."""
    rows = optimizer._hyperparam_table
    if any(row.joint_set is not None for row in rows.transforms):
        return "together"
    return " / ".join(
        sorted(
            {"alone, flat" if leaf.spec.is_flat and len(leaf.shape) > 1 else "alone" for leaf in optimizer._records if len(leaf.shape) > 1}
        )
    )
