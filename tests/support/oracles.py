"""Reference updates in float64 NumPy, written from the papers, and measures for comparing runs."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from unoptimized import options

from bridge._xla.multi_output_fusion import is_fusion_enabled


class NumpyAdam:
    """Kingma and Ba, algorithm 1 (L2 penalty added to the gradient) or Loshchilov and Hutter, algorithm 2 (decoupled)."""

    def __init__(self, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False, decoupled=False):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.amsgrad, self.maximize, self.decoupled = amsgrad, maximize, decoupled
        self.t, self.m, self.v, self.v_max = 0, 0.0, 0.0, 0.0

    def step(self, p, g):
        g = -g if self.maximize else g
        if self.weight_decay and not self.decoupled:
            g = g + self.weight_decay * p
        self.t += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * g
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g * g
        self.v_max = np.maximum(self.v_max, self.v)
        m_hat = self.m / (1 - self.betas[0] ** self.t)
        v_hat = (self.v_max if self.amsgrad else self.v) / (1 - self.betas[1] ** self.t)
        decay = self.lr * self.weight_decay * p if self.decoupled else 0.0
        return p - self.lr * m_hat / (np.sqrt(v_hat) + self.eps) - decay


class NumpySGD:
    """Gradient descent with torch's momentum: the first gradient is not dampened, and lr multiplies the buffer."""

    def __init__(self, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False):
        self.lr, self.momentum, self.dampening = lr, momentum, dampening
        self.weight_decay, self.nesterov, self.maximize = weight_decay, nesterov, maximize
        self.buffer = None

    def step(self, p, g):
        g = (-g if self.maximize else g) + self.weight_decay * p
        if self.momentum:
            self.buffer = g if self.buffer is None else self.momentum * self.buffer + (1 - self.dampening) * g
            g = g + self.momentum * self.buffer if self.nesterov else self.buffer
        return p - self.lr * g


def movement_error(ours: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> float:
    """Return the norm of the difference of two end points over the reference's movement; a run that never moved has error 1."""
    ours, theirs, start = (x.detach().to(torch.complex128 if x.is_complex() else torch.float64) for x in (ours, theirs, start))
    moved = torch.linalg.vector_norm(theirs - start)
    assert moved > 0, "the reference did not move: this comparison could not fail"
    return float(torch.linalg.vector_norm(ours - theirs) / moved)


def same(ours, theirs):
    """Return whether two lists of tensors are bitwise equal."""
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


SHAPES = [(7, 5), (5,), (), (3, 4, 2, 2), (1, 6), (33,)]


def random_params(dtype=torch.float32, shapes=SHAPES, scale=0.1):
    return [torch.nn.Parameter((torch.randn(shape, dtype=torch.float32) * scale).to(dtype)) for shape in shapes]


def clones(params):
    return [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


def random_grads(params):
    return [torch.randn_like(p) for p in params]


def set_grads(params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone(memory_format=torch.preserve_format)


def run_pair(ours, our_params, theirs, their_params, steps, grads=random_grads, after=lambda: None):
    """Run two optimizers with the same gradients."""
    for _ in range(steps):
        given = grads(our_params)
        set_grads(our_params, given)
        set_grads(their_params, given)
        ours.step()
        theirs.step()
        after()


def jitted(function):
    """Return `jax.jit` of a function without LLVM's optimizations, which take longer than its few values need.

    It cannot be called within another trace: `jitted(jax.grad(f))`, not `jax.grad(jitted(f))`.
    """
    return jax.jit(function, compiler_options=options())


# How near the movement is to the same transformation in pure JAX. The oldest supported jaxlib adds a long sum in another order in pure JAX
# than in our update, and its result is further from the float64 sum.
CLOSE = 1e-6 if jax.__version_info__ >= (0, 10) else 1e-5


# For tests that count bytes. The oldest supported jaxlib fuses the results of a separate leaf into one loop (test_execute.py), but not all
# results of joint leaves, sums or mixed dtypes, and it counts other bytes for a barrier of several arrays.
FUSES = pytest.mark.skipif(
    not is_fusion_enabled() or jax.__version_info__ < (0, 10),
    reason="this XLA does not fuse all results into one loop, or counts otherwise",
)


def project_frames(call):
    """Return (file, function) for each call into this project's packages that `call()` makes."""
    root = Path(__file__).parents[2]
    packages = str(root / "bridge"), str(root / "torch_api")
    frames = []

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(packages):
            frames.append((Path(frame.f_code.co_filename).relative_to(root), frame.f_code.co_qualname))

    gc.collect()  # else callbacks of what earlier tests have left may run during the call
    gc.disable()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return frames
