"""Shared helpers for tests of buckets: small parameters, optimizers with and without buckets, runs of several with equal gradients."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from oracles import clones, movement_error, random_grads, set_grads
from policies import change_policy

from bridge._memory import address_space

# Eight fit into rows of 64 bytes: shapes with different sizes share one padded row length. Five need longer rows.
SHAPES = [(10,), (4, 4), (16,), (2, 5), (3, 5), (3,), (1, 6), (7,), (33,), (6, 7), (40,), (5, 9), (2, 4, 2, 3)]


def parameters(dtype=torch.float32, shapes=SHAPES):
    return [torch.nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in shapes]


@contextmanager
def without_buckets():
    """Give every parameter its own buffer in optimizers that are made in this context."""
    with pytest.MonkeyPatch.context() as patch:
        change_policy(patch, "BUCKETING", max_gathered_row_bytes=0)
        yield


def bucket_rows(optimizer):
    return [leaf.bucket_row for leaf in optimizer._trainable]


def bucketed(optimizer, least=5):
    """Return the optimizer after checking that at least `least` parameters lie in buckets."""
    assert sum(slot is not None for slot in bucket_rows(optimizer)) >= least
    return optimizer


def unbucketed_twin(make, params):
    """Return an optimizer of copies in which every parameter has its own buffer, and the copies."""
    other = clones(params)
    with without_buckets():
        optimizer = make(other)
    assert set(bucket_rows(optimizer)) == {None}
    return optimizer, other


def random_subset(params, share=0.7):
    """Return gradients for a random part of the parameters."""
    return [torch.randn_like(p) if torch.rand(()) < share else None for p in params]


def alternating_grads():
    """Return gradients of two thirds and of all parameters in turn; without buckets each set has its own executable."""
    turn = itertools.count()

    def grads(params):
        every = next(turn) % 2
        return [torch.randn_like(p) if every or i % 3 != 1 else None for i, p in enumerate(params)]

    return grads


def step_all(pairs, grads):
    for optimizer, params in pairs:
        set_grads(params, grads)
        optimizer.step()


def run(pairs, steps=5, grads=random_grads):
    for _ in range(steps):
        step_all(pairs, grads(pairs[0][1]))


def assert_near(params, others, start, bound=1e-6):
    for p, q, s in zip(params, others, start, strict=True):
        assert movement_error(p, q, s) <= bound


def states(optimizer, params):
    return [tensor for p in params for _, tensor in sorted(optimizer.state[p].items())]


def same_states(one, params, other, others):
    for p, q in zip(params, others, strict=True):
        assert one.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(tensor, other.state[q][name]) for name, tensor in one.state[p].items())


def separate_twin(make, params):
    """Return an optimizer of copies in which every parameter has its own buffer and no gradient is read by address, and the copies."""
    with pytest.MonkeyPatch.context() as patch:
        change_policy(patch, "BUCKETING", max_addressed_row_bytes=0)
        return unbucketed_twin(make, params)


def streaming_of(optimizer):
    """Return what streams over the gradients of a step on one device; None where nothing does."""
    (device_step,) = optimizer._launch_cache.last_steps
    return None if device_step.stats_stage is None else device_step.stats_stage.streaming


def programs(optimizer):
    return [launch.executable for launch in optimizer._launch_cache.last_used]


def misaligned(g):
    space = torch.zeros(g.numel() * 4 + 64, dtype=torch.uint8).numpy()
    start = -space.ctypes.data % 64 + 2
    view = np.frombuffer(space, np.float32, g.numel(), start).reshape(g.shape)
    view[:] = g.numpy()
    return torch.from_numpy(view)


# Gradients of matrices that are not dense or not aligned, in the order of their parameters.
ODD = {
    "transposed": lambda g: g.t().contiguous().t(),
    "negated": lambda g: torch._neg_view(-g),
    "misaligned": misaligned,
    "strided": lambda g: torch.stack([g, g], -1)[..., 0],
    "expanded": lambda g: g[:1, :1].expand_as(g),
    "of zeros": lambda g: torch._efficientzerotensor(g.shape),
}


def read_wrong_rows(shift):
    """Return a broken `address_space.RowAddresses.__call__`: it reads the next row's gradient, or starts `shift` elements later."""
    call = address_space.RowAddresses.__call__

    def wrong(self, tensors, held):
        memory, order = call(self, tensors, held)
        rows = order[: len(self._gradient_of_row)]
        rows[:] = np.roll(rows, 1) if shift > 1 else rows + shift
        return [memory, order]

    return wrong


def lower_addressing_thresholds(monkeypatch, fewest):
    """Lower the thresholds so that `fewest` equal leaves of middle size are a bucket whose gradients are read by address."""
    change_policy(
        monkeypatch,
        "BUCKETING",
        min_addressed_rows=fewest,
        min_large_addressed_rows=fewest,
        max_gathered_bucket_bytes=1,
        max_gathered_elements=0,
    )
