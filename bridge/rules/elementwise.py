"""torch.optim's elementwise update equations as optax `GradientTransformation`s.

The equations follow torch 2.13, and each leaf has its own step count. optax's adam, adamw and sgd differ: they have one step count for
all leaves, apply amsgrad differently, and take other first steps with momentum. State fields have torch's names. Updates are added to
the parameters. `maximize` negates the gradient first. Leaves are real: a complex parameter is passed as its (..., 2) real view, which
torch.optim uses too.

Scalars are Python floats or traced float64 scalars. Bias corrections are computed before the cast to the leaf's dtype, because
1 - 0.999 loses digits in float32. Each function takes `lr` also under optax's name `learning_rate`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from bridge._names import accepts_learning_rate

from .per_leaf import (
    Scalar,
    State,
    Update,
    add_decay,
    bias_correction,
    cast_scalars,
    initial_count,
    lerp,
    per_leaf,
    scaled_update,
    widest_float,
)


@accepts_learning_rate
def adam(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.Adam, and with `decoupled_weight_decay=True` torch.optim.AdamW, per leaf.

    The update is -lr * (m_hat / (sqrt(v_hat) + eps)), for AdamW minus lr * weight_decay * params. eps is added outside the root, as in
    torch and in optax's default.

    Args:
      lr: the learning rate.
      betas: the decay rates of the averages of the gradient and of its square.
      eps: the number added to the denominator, outside of the root.
      weight_decay: the penalty or the decoupled decay.
      amsgrad: whether to divide by the maximum of all averages of the squared gradient so far.
      maximize: whether to ascend: the gradient is negated.
      decoupled_weight_decay: whether to decay as AdamW: p is multiplied by 1 - lr * weight_decay, and the gradient has no penalty.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py; Kingma and Ba, arXiv:1412.6980;
    Loshchilov and Hutter, arXiv:1711.05101; amsgrad: Reddi et al., arXiv:1904.09237 (torch takes the maximum before the
    bias correction, optax's amsgrad after it).

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.adam(lr=0.5)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
        return {"step": initial_count()} | {name: jnp.zeros_like(p) for name in moments}

    def update_leaf(
        g: jax.Array, p: jax.Array, step: jax.Array, exp_avg: jax.Array, exp_avg_sq: jax.Array, max_exp_avg_sq: jax.Array | None = None
    ) -> Update:
        cast, step = cast_scalars(g), step + 1
        g = -g if maximize else g
        g = g if decoupled_weight_decay else add_decay(g, p, weight_decay)
        m = lerp(exp_avg, g, 1 - betas[0])
        v = exp_avg_sq * cast(betas[1]) + g * g * cast(1 - betas[1])
        v_max = v if max_exp_avg_sq is None else jnp.maximum(max_exp_avg_sq, v)
        denominator = jnp.sqrt(v_max) * cast(1 / jnp.sqrt(bias_correction(betas[1], step))) + cast(eps)
        update = -cast(widest_float(lr) / bias_correction(betas[0], step)) * m / denominator
        if decoupled_weight_decay:
            update = scaled_update(p, 1 - widest_float(lr) * widest_float(weight_decay), update)
        return update, {"step": step, "exp_avg": m, "exp_avg_sq": v, "max_exp_avg_sq": v_max}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def sgd(
    lr: Scalar = 1e-3,
    momentum: Scalar | None = None,
    dampening: Scalar | None = None,
    weight_decay: Scalar = 0.0,
    *,
    nesterov: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.SGD, per leaf. With `momentum` or `dampening` None, the leaf has no state for it.

    The first gradient enters the buffer undampened, and lr is applied after the momentum, both as in torch and unlike
    Sutskever et al. (2013).

    Args:
      lr: the learning rate.
      momentum: the factor of the momentum; None keeps no state for it.
      dampening: the gradient enters the momentum with 1 - dampening, the first one with 1; None for none.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      nesterov: whether to step along the gradient plus momentum times the new momentum.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.sgd(lr=0.5, momentum=0.9)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        # `seen` is 0 before the first gradient, which enters the buffer undampened.
        buffer = {} if momentum is None else {"momentum_buffer": jnp.zeros_like(p)}
        return buffer if momentum is None or dampening is None else buffer | {"seen": jnp.zeros((), jnp.float32)}

    def update_leaf(g: jax.Array, p: jax.Array, momentum_buffer: jax.Array | None = None, seen: jax.Array | None = None) -> Update:
        cast = cast_scalars(g)
        g = add_decay(-g if maximize else g, p, weight_decay)
        if momentum is None:
            return -cast(lr) * g, {}
        assert momentum_buffer is not None
        share = cast(1.0) if seen is None or dampening is None else cast(1 - widest_float(dampening) * widest_float(seen))
        buffer = momentum_buffer * cast(momentum) + g * share
        g = g + cast(momentum) * buffer if nesterov else buffer
        return -cast(lr) * g, {"momentum_buffer": buffer, "seen": jnp.ones((), jnp.float32)}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def rmsprop(
    lr: Scalar = 1e-2,
    alpha: Scalar = 0.99,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    momentum: Scalar | None = None,
    *,
    centered: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.RMSprop, per leaf. With `momentum` None, the leaf has no state for it.

    eps is added outside the root, and the average begins at 0 without bias correction, as in torch. optax's rmsprop adds eps inside and
    has the decay 0.9.

    Args:
      lr: the learning rate.
      alpha: the decay rate of the average of the squared gradient.
      eps: the number added to the denominator, outside of the root.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      momentum: the factor of the momentum; None keeps no state for it.
      centered: whether to divide by an estimate of the gradient's variance, instead of by the mean of its square.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/rmsprop.py; Tieleman and Hinton, lecture 6.5
    (2012); centered: Graves, arXiv:1308.0850.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.rmsprop(lr=0.05)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        buffers = ["square_avg"] + ["momentum_buffer"] * (momentum is not None) + ["grad_avg"] * centered
        return {"step": initial_count()} | {name: jnp.zeros_like(p) for name in buffers}

    def update_leaf(
        g: jax.Array,
        p: jax.Array,
        step: jax.Array,
        square_avg: jax.Array,
        momentum_buffer: jax.Array | None = None,
        grad_avg: jax.Array | None = None,
    ) -> Update:
        cast = cast_scalars(g)
        g = add_decay(-g if maximize else g, p, weight_decay)
        v = square_avg * cast(alpha) + g * g * cast(1 - alpha)
        mean = None if grad_avg is None else lerp(grad_avg, g, 1 - alpha)
        direction = g / (jnp.sqrt(v if mean is None else v - mean * mean) + cast(eps))
        if momentum is not None:
            assert momentum_buffer is not None
            direction = momentum_buffer * cast(momentum) + direction
        return -cast(lr) * direction, {"step": step + 1, "square_avg": v, "momentum_buffer": direction, "grad_avg": mean}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def adagrad(
    lr: Scalar = 1e-2,
    lr_decay: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    initial_accumulator_value: Scalar = 0.0,
    eps: Scalar = 1e-10,
    *,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.Adagrad, per leaf. Both parts of a complex leaf begin at `initial_accumulator_value`.

    Args:
      lr: the learning rate.
      lr_decay: lr is divided by 1 + lr_decay * (steps before this one).
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      initial_accumulator_value: the initial sum of squared gradients.
      eps: the number added to the denominator, outside of the root.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adagrad.py; Duchi et al., JMLR 12 (2011).

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.adagrad(lr=0.5)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        return {"step": initial_count(), "sum": jnp.broadcast_to(cast_scalars(p)(initial_accumulator_value), p.shape)}

    def update_leaf(g: jax.Array, p: jax.Array, step: jax.Array, sum: jax.Array) -> Update:  # noqa: A002 - torch's name
        cast = cast_scalars(g)
        g = add_decay(-g if maximize else g, p, weight_decay)
        total = sum + g * g
        rate = widest_float(lr) / (1 + widest_float(step) * widest_float(lr_decay))
        return -cast(rate) * g / (jnp.sqrt(total) + cast(eps)), {"step": step + 1, "sum": total}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def adadelta(
    lr: Scalar = 1.0, rho: Scalar = 0.9, eps: Scalar = 1e-6, weight_decay: Scalar = 0.0, *, maximize: bool = False
) -> optax.GradientTransformation:
    """torch.optim.Adadelta, per leaf. eps is added inside both roots, and lr is not part of the accumulated updates.

    Args:
      lr: the factor of the update.
      rho: the decay rate of the averages of the squared gradient and of the squared update.
      eps: the number added inside both roots.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adadelta.py; Zeiler, arXiv:1212.5701.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.adadelta(lr=100.0)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.3, -0.3], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        return {"step": initial_count(), "square_avg": jnp.zeros_like(p), "acc_delta": jnp.zeros_like(p)}

    def update_leaf(g: jax.Array, p: jax.Array, step: jax.Array, square_avg: jax.Array, acc_delta: jax.Array) -> Update:
        cast = cast_scalars(g)
        g = add_decay(-g if maximize else g, p, weight_decay)
        v = square_avg * cast(rho) + g * g * cast(1 - rho)
        delta = jnp.sqrt(acc_delta + cast(eps)) / jnp.sqrt(v + cast(eps)) * g
        return -cast(lr) * delta, {
            "step": step + 1,
            "square_avg": v,
            "acc_delta": acc_delta * cast(rho) + delta * delta * cast(1 - rho),
        }

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def adamax(
    lr: Scalar = 2e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.Adamax, per leaf. eps is added to the absolute gradient inside the maximum, as in torch.

    Args:
      lr: the learning rate.
      betas: the decay rates of the average of the gradient, and of the maximum of its absolute values.
      eps: the number added to each absolute value.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adamax.py; Kingma and Ba, arXiv:1412.6980,
    algorithm 2 (which has no eps).

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.adamax(lr=0.5)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        return {"step": initial_count(), "exp_avg": jnp.zeros_like(p), "exp_inf": jnp.zeros_like(p)}

    def update_leaf(g: jax.Array, p: jax.Array, step: jax.Array, exp_avg: jax.Array, exp_inf: jax.Array) -> Update:
        cast, step = cast_scalars(g), step + 1
        g = add_decay(-g if maximize else g, p, weight_decay)
        m = lerp(exp_avg, g, 1 - betas[0])
        u = jnp.maximum(exp_inf * cast(betas[1]), jnp.abs(g) + cast(eps))
        return -cast(widest_float(lr) / bias_correction(betas[0], step)) * m / u, {"step": step, "exp_avg": m, "exp_inf": u}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def nadam(
    lr: Scalar = 2e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    momentum_decay: Scalar = 4e-3,
    *,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.NAdam, per leaf, with the momentum schedule of its paper; optax's nadam has none.

    The product of the momenta is a float32 scalar, as in torch.

    Args:
      lr: the learning rate.
      betas: the decay rates of the averages of the gradient and of its square.
      eps: the number added to the denominator, outside of the root.
      weight_decay: the penalty or the decoupled decay.
      momentum_decay: the momentum of step t is betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay)).
      decoupled_weight_decay: whether to decay as AdamW: p is multiplied by 1 - lr * weight_decay, and the gradient has no penalty.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/nadam.py; Dozat, "Incorporating Nesterov
    Momentum into Adam" (2016).

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.nadam(lr=0.5)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        return {"step": initial_count(), "mu_product": initial_count() + 1, "exp_avg": jnp.zeros_like(p), "exp_avg_sq": jnp.zeros_like(p)}

    def momentum_at(step: jax.Array) -> jax.Array:
        return widest_float(betas[0]) * (1 - 0.5 * 0.96 ** (widest_float(step) * widest_float(momentum_decay)))

    def update_leaf(
        g: jax.Array, p: jax.Array, step: jax.Array, mu_product: jax.Array, exp_avg: jax.Array, exp_avg_sq: jax.Array
    ) -> Update:
        cast, step = cast_scalars(g), step + 1
        g = -g if maximize else g
        g = g if decoupled_weight_decay else add_decay(g, p, weight_decay)
        mu, mu_next = momentum_at(step), momentum_at(step + 1)
        product = mu_product * mu.astype(mu_product.dtype)
        m = lerp(exp_avg, g, 1 - betas[0])
        v = exp_avg_sq * cast(betas[1]) + g * g * cast(1 - betas[1])
        denominator = jnp.sqrt(v * cast(1 / bias_correction(betas[1], step))) + cast(eps)
        share_g = widest_float(lr) * (1 - mu) / (1 - widest_float(product))
        share_m = widest_float(lr) * mu_next / (1 - widest_float(product) * mu_next)
        factor = 1 - widest_float(lr) * widest_float(weight_decay) if decoupled_weight_decay else 1.0
        update = scaled_update(p, factor, -cast(share_g) * g / denominator, -cast(share_m) * m / denominator)  # two roundings, as in torch
        return update, {"step": step, "mu_product": product, "exp_avg": m, "exp_avg_sq": v}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def radam(
    lr: Scalar = 1e-3,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.RAdam, per leaf: momentum alone until the average of squares is long enough (rho > 5).

    eps is added to the root before its bias correction, as in torch. The paper has no eps.

    Args:
      lr: the learning rate.
      betas: the decay rates of the averages of the gradient and of its square.
      eps: the number added to the denominator, outside of the root.
      weight_decay: the penalty or the decoupled decay.
      decoupled_weight_decay: whether to decay as AdamW: p is multiplied by 1 - lr * weight_decay, and the gradient has no penalty.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/radam.py; Liu et al., arXiv:1908.03265.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.radam(lr=0.5)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        return {"step": initial_count(), "exp_avg": jnp.zeros_like(p), "exp_avg_sq": jnp.zeros_like(p)}

    def update_leaf(g: jax.Array, p: jax.Array, step: jax.Array, exp_avg: jax.Array, exp_avg_sq: jax.Array) -> Update:
        cast, step = cast_scalars(g), step + 1
        g = -g if maximize else g
        g = g if decoupled_weight_decay else add_decay(g, p, weight_decay)
        m = lerp(exp_avg, g, 1 - betas[0])
        v = exp_avg_sq * cast(betas[1]) + g * g * cast(1 - betas[1])
        corrected = bias_correction(betas[1], step)
        longest = 2 / (1 - widest_float(betas[1])) - 1
        rho = longest - 2 * widest_float(step) * (1 - corrected) / corrected
        rectified = jnp.sqrt(corrected * (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
        adaptive = cast(rectified) / (jnp.sqrt(v) + cast(eps))
        update = -cast(widest_float(lr) / bias_correction(betas[0], step)) * m * jnp.where(rho > 5, adaptive, 1)
        if decoupled_weight_decay:
            update = scaled_update(p, 1 - widest_float(lr) * widest_float(weight_decay), update)
        return update, {"step": step, "exp_avg": m, "exp_avg_sq": v}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def rprop(
    lr: Scalar = 1e-2,
    etas: tuple[Scalar, Scalar] = (0.5, 1.2),
    step_sizes: tuple[Scalar, Scalar] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.Rprop, per leaf. `lr` is the initial step size of all elements, and is not read later.

    Where the gradient changes its sign, the step size shrinks and the element does not move in that step (iRprop-). An element with a
    NaN gradient does not move either, as in torch.

    Args:
      lr: the initial step size of each element.
      etas: the factors of an element's step size where the sign of the gradient has changed, and where it has not.
      step_sizes: the least and the greatest step size.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/rprop.py; Riedmiller and Braun, ICNN 1993; Igel
    and Huesken, NC 2000.

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.rprop(lr=0.5)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        return {"step": initial_count(), "prev": jnp.zeros_like(p), "step_size": jnp.broadcast_to(cast_scalars(p)(lr), p.shape)}

    def update_leaf(g: jax.Array, p: jax.Array, step: jax.Array, prev: jax.Array, step_size: jax.Array) -> Update:
        cast = cast_scalars(g)
        g = -g if maximize else g
        agreement = g * prev
        factor = jnp.where(agreement > 0, cast(etas[1]), jnp.where(agreement < 0, cast(etas[0]), cast(1.0)))
        size = jnp.clip(step_size * factor, cast(step_sizes[0]), cast(step_sizes[1]))
        g = jnp.where(agreement < 0, 0, g)
        sign = jnp.where(jnp.isnan(g), 0, jnp.sign(g))
        return -sign * size, {"step": step + 1, "prev": g, "step_size": size}

    return per_leaf(init_leaf, update_leaf)


@accepts_learning_rate
def asgd(
    lr: Scalar = 1e-2,
    lambd: Scalar = 1e-4,
    alpha: Scalar = 0.75,
    t0: Scalar = 1e6,
    weight_decay: Scalar = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformation:
    """torch.optim.ASGD, per leaf: decay by lambd, a decreasing rate `eta`, and in `ax` the average of parameters from step t0 on.

    `eta` and `mu` are the values for the next step, float32 scalars, as in torch.

    Args:
      lr: the initial learning rate.
      lambd: the decay: p is multiplied by 1 - lambd * eta.
      alpha: lr is divided by (1 + lambd * lr * step) ** alpha.
      t0: the step from which on the parameter is averaged.
      weight_decay: an L2 penalty: weight_decay * p is added to the gradient.
      maximize: whether to ascend: the gradient is negated.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/asgd.py; Polyak and Juditsky, SIAM J. Control
    Optim. 30 (1992).

    Example:
      >>> import bridge, jax.numpy as jnp
      >>> tx = bridge.rules.asgd(lr=0.5, lambd=0.0)
      >>> params = grads = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> updates["w"].round(1)
      Array([-0.5, -0.5], dtype=float32)
    """

    def init_leaf(p: jax.Array) -> State:
        return {"step": initial_count(), "eta": cast_scalars(initial_count())(lr), "mu": initial_count() + 1, "ax": jnp.zeros_like(p)}

    def update_leaf(g: jax.Array, p: jax.Array, step: jax.Array, eta: jax.Array, mu: jax.Array, ax: jax.Array) -> Update:
        cast, step = cast_scalars(g), step + 1
        g = add_decay(-g if maximize else g, p, weight_decay)
        update = scaled_update(p, 1 - widest_float(lambd) * widest_float(eta), -cast(eta) * g)
        new_p = p + update
        new_eta = widest_float(lr) / (1 + widest_float(lambd) * widest_float(lr) * widest_float(step)) ** widest_float(alpha)
        new_mu = 1 / jnp.maximum(1, widest_float(step) - widest_float(t0))
        return update, {
            "step": step,
            "eta": new_eta.astype(eta.dtype),
            "mu": new_mu.astype(mu.dtype),
            "ax": jnp.where(mu == 1, new_p, ax + (new_p - ax) * cast(mu)),
        }

    return per_leaf(init_leaf, update_leaf)
