"""Many equal parameters of which each step trains a few: inactive ones cost no bytes, and no set of them needs its own program."""

import gc
import warnings

import jax
import numpy as np
import pytest
import torch
from sampling import sampled

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

SHAPE, COUNT = (192, 192), 72
SIZE = SHAPE[0] * SHAPE[1]


def experts():
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(0.1 * torch.randn(SHAPE, generator=generator)) for _ in range(COUNT)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    return ours, theirs, [p.detach().clone() for p in ours]


def optimizers(ours, theirs, **options):
    options = {"lr": 0.01, "weight_decay": 0.1} | options
    return torch_api.MaskedAdamW(ours, **options), torch.optim.AdamW(theirs, **options)


def step(pairs, active, rng):
    """Step all optimizers with equal gradients for the parameters in `active`."""
    grads = torch.from_numpy(rng.standard_normal((COUNT, *SHAPE), dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch_api.CompilationWarning)
        for optimizer, params in pairs:
            for p, grad, is_active in zip(params, grads, active, strict=True):
                p.grad = grad.clone() if is_active else None
            optimizer.step()


def error(ours, theirs, start):
    """Return the largest relative error of a parameter's movement."""
    moved = [(p.detach() - s, q.detach() - s) for p, q, s in zip(ours, theirs, start, strict=True)]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in moved)


def addresses(optimizer, params):
    state = [optimizer.state[p][name] for p in params if p in optimizer.state for name in ("exp_avg", "exp_avg_sq")]
    return [x.data_ptr() for x in (*params, *state)]


def held():
    """Return the bytes of all live arrays, counting each address once."""
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values())


@pytest.mark.fast_path
@pytest.mark.parametrize("absent", sampled([0.3, 0.7, 0.9]))
def test_random_subsets_move_as_in_torch_with_few_programs(absent):
    ours, theirs, start = experts()
    optimizer, other = optimizers(ours, theirs)
    rng, before = np.random.default_rng(0), bridge.compilations()
    active, where = np.ones(COUNT, bool), []
    for nth in range(20):
        kept = [p.detach().clone() for p in ours]
        step([(optimizer, ours), (other, theirs)], active, rng)
        assert [torch.equal(p, old) for p, old in zip(ours, kept, strict=True)] == [not x for x in active]
        moved = optimizer.bytes_accessed() / SIZE
        assert moved == pytest.approx(28 * (COUNT if nth == 0 or absent == 0.3 else active.sum()), rel=0.05)
        where.append(addresses(optimizer, ours))
        active = rng.permutation(COUNT) >= round(absent * COUNT)
    assert bridge.compilations() - before <= 4
    assert where[2:] == where[1:-1], "parameters moved after the first step with few gradients"
    assert error(ours, theirs, start) < 1e-5


def test_first_step_with_few_gradients_compiles_only_for_these():
    ours, theirs, start = experts()
    optimizer, other = optimizers(ours, theirs)
    rng = np.random.default_rng(0)
    for count in (8, 8, COUNT, 8):
        step([(optimizer, ours), (other, theirs)], rng.permutation(COUNT) < count, rng)
        assert optimizer.bytes_accessed() / SIZE == pytest.approx(28 * count, rel=0.05)
    assert error(ours, theirs, start) < 1e-5


def test_state_stays_in_its_tensors_and_memory_is_freed():
    ours, theirs, start = experts()
    optimizer, other = optimizers(ours, theirs)
    rng = np.random.default_rng(0)
    step([(optimizer, ours), (other, theirs)], np.ones(COUNT, bool), rng)
    tensors = [optimizer.state[p]["exp_avg"] for p in ours]
    tensors[3].fill_(0.25)
    other.state[theirs[3]]["exp_avg"].fill_(0.25)
    gc.collect()
    before = held()
    for _ in range(2):
        step([(optimizer, ours), (other, theirs)], rng.permutation(COUNT) < 8, rng)
    assert all(optimizer.state[p]["exp_avg"] is x for p, x in zip(ours, tensors, strict=True))
    gc.collect()
    assert held() <= before + (1 << 16)
    assert error(ours, theirs, start) < 1e-5
    again = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    loaded, _ = optimizers(again, theirs)
    loaded.load_state_dict(optimizer.state_dict())
    step([(optimizer, ours), (loaded, again), (other, theirs)], np.ones(COUNT, bool), rng)
    assert error(ours, theirs, start) < 1e-5
    assert error(again, theirs, start) < 1e-5


def test_norm_is_taken_over_the_present_gradients():
    ours, theirs, start = experts()
    optimizer = torch_api.MaskedAdamW(ours, lr=0.01, eps=1.0, max_grad_norm=0.5)
    other = torch.optim.AdamW(theirs, lr=0.01, eps=1.0)

    class Clipped:
        def step(self):
            torch.nn.utils.clip_grad_norm_(theirs, 0.5)
            other.step()

    rng = np.random.default_rng(0)
    for count in (COUNT, 8, 20, COUNT):
        step([(optimizer, ours), (Clipped(), theirs)], rng.permutation(COUNT) < count, rng)
    assert error(ours, theirs, start) < 1e-5
