"""Parameters with an odd number of elements on a few cores: each is updated in its own padded row, and so is its gradient."""

import copy
import ctypes
import io
import mmap
import pickle

import numpy as np
import optax
import pytest
import torch
from oracles import FUSES, clones, movement_error, random_grads, run_pair, same, set_grads
from packing import streaming_of
from policies import change_policy
from sampling import sampled_tuples

import torch_api
from bridge import _process
from bridge._compiler import plan, policy
from bridge._memory import address_space
from bridge._runtime import cache
from torch_api._params import buckets
from torch_api._step import bound_executable

PRIME = 16411
SHAPES = [(PRIME,), (129, 131), (3, 3, 7, 331), (PRIME,), (18000,), (7,)]
ODD = 4  # how many of SHAPES are padded
HALF = torch.bfloat16

pytestmark = [pytest.mark.unoptimized, pytest.mark.skipif(not address_space.CAN_READ_BY_ADDRESS, reason="this platform pads no rows")]


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    """Set the number of cores to two, and use only programs that this test compiles."""
    monkeypatch.setattr(_process, "CORES", 2)
    change_policy(monkeypatch, "THREADING", cores=2)
    monkeypatch.setattr(cache, "_programs", {})


def parameters(shapes=SHAPES, dtype=torch.float32):
    return [torch.nn.Parameter((0.1 * torch.randn(shape)).to(dtype)) for shape in shapes]


def padded(optimizer):
    return [leaf for leaf in optimizer._trainable if leaf.bucket_row is not None and len(leaf.jax_buffer.rows) == 1]


def give(params, grads):
    """Set the given tensors as gradients, without a copy."""
    for p, g in zip(params, grads, strict=True):
        p.grad = g


def followed_by(tensor, value):
    """Return the tensor at a multiple of 64 bytes, followed by elements of this value."""
    size = tensor.numel()
    space = torch.full((size + 64,), value, dtype=tensor.dtype)
    start = -space.data_ptr() % 64 // space.element_size()
    return space[start : start + size].view(tensor.shape).copy_(tensor)


@FUSES
def test_padded_parameter_has_the_bytes_and_loops_of_an_even_size():
    (p,) = params = parameters([(PRIME,)])
    optimizer = torch_api.MaskedAdamW(params, lr=0.01)
    address = p.data_ptr()
    set_grads(params, random_grads(params))
    optimizer.step()
    (leaf,), (only,) = padded(optimizer), optimizer._launch_cache.last_used
    width = leaf.jax_buffer.array.shape[1]
    assert width % 16 == 0
    assert PRIME < width < PRIME + 16
    assert optimizer.bytes_accessed() / width == pytest.approx(28, rel=0.01)
    text = only.executable.update.as_text()
    assert f"[{PRIME}]" not in text
    assert " copy(" not in "".join(line for line in text.splitlines() if f",{width}]" in line)
    places = [x.data_ptr() for x in optimizer.state[p].values()]
    optimizer.step()
    assert [p.data_ptr(), *(x.data_ptr() for x in optimizer.state[p].values())] == [address, *places]


def test_padding_is_not_visible_to_the_user():
    params = parameters()
    optimizer = torch_api.MaskedAdamW(params, lr=0.01)
    set_grads(params, random_grads(params))
    optimizer.step()
    assert len(padded(optimizer)) == ODD
    for p in params:
        for x in (p, *(x for x in optimizer.state[p].values() if x.ndim)):
            assert x.shape == p.shape
            assert x.stride() == p.stride()
            assert x.untyped_storage().nbytes() == p.numel() * p.element_size()
            assert x.storage_offset() == 0
        file = io.BytesIO()
        torch.save(p.detach(), file)
        assert file.tell() < p.numel() * 4 + 2048


RULES = {
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "NAdam": (torch_api.MaskedNAdam, torch.optim.NAdam, {"lr": 0.01}),
    "Rprop": (torch_api.MaskedRprop, torch.optim.Rprop, {"lr": 0.01}),
}


@pytest.mark.parametrize("name", RULES)
def test_padded_parameters_move_as_in_torch(name):
    masked, original, options = RULES[name]
    params = parameters()
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    start, others = clones(params), clones(params)
    ours = masked(params, **options)
    run_pair(ours, params, original(others, **options), others, 20)
    assert len(padded(ours)) == ODD
    assert all(movement_error(p, q, s) <= 2e-5 for p, q, s in zip(params, others, start, strict=True))


@pytest.mark.parametrize(
    ("masked", "dtype", "options", "bound"),
    sampled_tuples(
        [
            (torch_api.MaskedAdamW, torch.float32, {"max_grad_norm": 1.0, "ema_decay": 0.9}, 1e-6),
            (torch_api.MaskedAdam, torch.float64, {"amsgrad": True}, 1e-13),
            (torch_api.MaskedAdam, torch.complex64, {}, 1e-6),
            (torch_api.MaskedAdamW, HALF, {"stochastic_rounding": True}, 1e-3),  # the random bits depend on an element's position
            (torch_api.MaskedAdamW, torch.float32, {"state_dtype": HALF}, 1e-4),
            (torch_api.MaskedAdamW, HALF, {"master_weights": True}, 1e-3),
            (torch_api.MaskedSGD, torch.float16, {"momentum": 0.9}, 2e-2),
        ]
    ),
)
@pytest.mark.usefixtures("standard_promotion")
def test_padded_parameters_move_like_unpadded_ones(masked, dtype, options, bound, monkeypatch):
    params = parameters(dtype=dtype)
    start, others = clones(params), clones(params)
    grads = [random_grads(params) for _ in range(20)]
    optimizers = []
    for mine in (params, others):
        optimizers.append(masked(mine, lr=0.01, **options))
        for given in grads:
            give(mine, [followed_by(g, torch.nan) for g in given])
            optimizers[-1].step()
        monkeypatch.setattr(buckets, "is_padded", lambda leaf: False)
    assert [len(padded(optimizer)) for optimizer in optimizers] == [ODD, 0]
    for p, q, s in zip(params, others, start, strict=True):
        assert movement_error(p, q, s) <= bound
        for name, x in optimizers[0].state[p].items():
            y = optimizers[1].state[q][name]
            wide = torch.promote_types(x.dtype, torch.float64)
            error = (x.to(wide) - y.to(wide)).norm()
            assert error <= max(bound, 1e-6 if x.itemsize > 2 else 1e-3) * y.to(wide).norm()


def nonzero_padding(*args):
    """Return the source of a padded gradient whose padding is not zero."""
    source = PADDED_GRADIENT(*args)
    source.buffer.fill_(1e3)
    return source


PADDED_GRADIENT = bound_executable._padded_gradient


@pytest.mark.parametrize("ahead", [True, False], ids=["read ahead", "in the program"])
@pytest.mark.parametrize("broken", [False, True])
def test_norm_excludes_the_padding(ahead, broken, monkeypatch):
    """The broken variants count the padding as part of the gradient."""
    change_policy(monkeypatch, "STREAMING", min_elements=1 << 14 if ahead else 1 << 30)
    if broken and ahead:
        monkeypatch.setattr(plan.LeafPlan, "size", property(lambda leaf: leaf.spec.shape[0]))
    elif broken:
        monkeypatch.setattr(bound_executable, "_padded_gradient", nonzero_padding)
    params = parameters([(PRIME,)])
    start, others = clones(params), clones(params)
    ours, theirs = torch_api.MaskedSGD(params, lr=0.1, max_grad_norm=1.0), torch.optim.SGD(others, lr=0.1)
    for _ in range(20):
        grads = random_grads(params)
        give(params, [followed_by(g, 1e3) for g in grads])
        set_grads(others, grads)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        ours.step()
        theirs.step()
    assert len(padded(ours)) == 1
    assert (streaming_of(ours) is not None) is ahead
    assert (movement_error(params[0], others[0], start[0]) <= 1e-5) is not broken


def test_nonfinite_memory_behind_a_gradient_skips_no_step():
    params = parameters([(PRIME,), (18000,)])
    start, others = clones(params), clones(params)
    optimizer, theirs = torch_api.MaskedAdamW(params, lr=0.01, fused=True), torch.optim.AdamW(others, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(20):
        grads = random_grads(params)
        scaler.scale(torch.ones(()))
        give(params, [followed_by(64 * g, torch.inf) for g in grads])
        scaler.step(optimizer)
        scaler.update()
        set_grads(others, grads)
        theirs.step()
    assert optimizer.skipped_steps == 0
    assert all(movement_error(p, q, s) <= 1e-5 for p, q, s in zip(params, others, start, strict=True))


def test_memory_behind_the_gradient_is_not_read():
    """The gradient ends at the start of a page that may not be read."""
    params, libc = parameters([(PRIME,)]), ctypes.CDLL(None, use_errno=True)
    length = -(-PRIME * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
    space = mmap.mmap(-1, length + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(space))
    assert libc.mprotect(ctypes.c_void_p(address + length), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    grad = torch.from_numpy(np.frombuffer(space, np.float32, PRIME, length - PRIME * 4))
    grad.copy_(torch.randn(PRIME))
    (p,), before = params, params[0].detach().clone()
    optimizer = torch_api.MaskedSGD(params, lr=0.5)
    p.grad = grad
    optimizer.step()
    assert torch.allclose(p.detach(), before - 0.5 * grad)
    assert len(padded(optimizer)) == 1


def _strided(g):
    return torch.stack([g, g], -1)[..., 0]


def _misaligned(g):
    return torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(g.shape)


def _negative(g):
    return torch._neg_view(-g)


@pytest.mark.parametrize(
    "made", [_strided, _misaligned, _negative, lambda g: g.requires_grad_()], ids=["strided", "misaligned", "neg", "grad"]
)
def test_gradient_that_cannot_be_aliased_is_copied(made):
    params = parameters([(PRIME,), (129, 131)])
    start, others = clones(params), clones(params)
    ours, theirs = torch_api.MaskedAdam(params, lr=0.01), torch.optim.Adam(others, lr=0.01)
    for _ in range(20):
        grads = random_grads(params)
        give(params, [made(g.clone()) for g in grads])
        set_grads(others, grads)
        ours.step()
        theirs.step()
    assert len(padded(ours)) == 2
    assert all(movement_error(p, q, s) <= 1e-5 for p, q, s in zip(params, others, start, strict=True))


def test_equal_padded_parameters_share_a_program():
    params = parameters([(40009,)] * 100)  # smaller parameters would share a bucket
    optimizer = torch_api.MaskedAdamW(params, lr=0.01)
    set_grads(params, random_grads(params))
    optimizer.step()
    assert len(padded(optimizer)) == 100
    programs_of_it = {each.executable for each in optimizer._launch_cache.last_used}
    assert len(optimizer._launch_cache.last_used) > len(programs_of_it)


WHOLE = {
    "one that looks at each leaf": lambda params: torch_api.OptaxOptimizer(
        [("p", params[0])], optax.chain(optax.scale_by_trust_ratio(), optax.scale(-0.1))
    ),
    "a mask of elements": lambda params: torch_api.MaskedAdamW([("p", params[0])], mask={"p": torch.rand(PRIME) < 0.5}),
    "copied results": lambda params: torch_api.MaskedAdamW(params, writeback="copy"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_optimizers_of_a_padded_parameter_use_no_padding(name):
    params = parameters([(PRIME,)])
    first = torch_api.MaskedAdamW(params, lr=0.01)
    set_grads(params, random_grads(params))
    first.step()
    assert len(padded(first)) == 1
    optimizer, (before,) = WHOLE[name](params), clones(params)
    optimizer.step()
    assert not padded(optimizer)
    assert not torch.equal(before, params[0])


def test_parameters_are_padded_only_on_a_few_cores(monkeypatch):
    for cores, expected in ((1, 0), (3, ODD), (4, ODD), (5, 0), (64, 0)):
        change_policy(monkeypatch, "THREADING", cores=cores)
        assert len(padded(torch_api.MaskedAdamW(parameters(), lr=0.01))) == expected


def test_copies_and_checkpoints_of_padded_parameters_continue():
    params = parameters()
    others = clones(params)
    ours, theirs = torch_api.MaskedAdamW(params, lr=0.01), torch.optim.AdamW(others, lr=0.01)
    start = clones(params)
    run_pair(ours, params, theirs, others, 5)
    again = torch_api.MaskedAdamW(params, lr=0.01)
    assert len(padded(again)) == ODD
    again.load_state_dict(theirs.state_dict())
    run_pair(again, params, theirs, others, 5)
    for copied in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        again = copied(again)
        params = [p for group in again.param_groups for p in group["params"]]
        run_pair(again, params, theirs, others, 5)
        assert len(padded(again)) == ODD
    assert all(movement_error(p, q, s) <= 1e-5 for p, q, s in zip(params, others, start, strict=True))


def test_padded_parameters_may_be_added_replaced_and_frozen():
    params = parameters([(PRIME,), (129, 131)])
    more = parameters([(PRIME,), (20001,)])
    start, others = clones([*params, *more]), clones([*params, *more])
    ours, theirs = torch_api.MaskedAdamW(params, lr=0.01), torch.optim.AdamW(others[:2], lr=0.01)
    run_pair(ours, params, theirs, others[:2], 5)
    ours.add_param_group({"params": more})
    theirs.add_param_group({"params": others[2:]})
    everyone = [*params, *more]
    run_pair(ours, everyone, theirs, others, 5)
    everyone[0].data, others[0].data = everyone[0].data.clone(), others[0].data.clone()
    for p in (everyone[2], others[2]):
        p.requires_grad_(False)
    before = everyone[2].detach().clone()
    run_pair(ours, everyone, theirs, others, 5)
    assert same([everyone[2]], [before])
    assert len(padded(ours)) == 4
    for p, q, s in [pair for i, pair in enumerate(zip(everyone, others, start, strict=True)) if i != 2]:
        assert movement_error(p, q, s) <= 1e-5


def test_train_step_updates_padded_parameters():
    torch.manual_seed(0)
    model = torch.nn.Linear(129, 131)
    other = copy.deepcopy(model)
    start = clones(model.parameters())
    ours, theirs = torch_api.MaskedAdamW(model.parameters(), lr=0.01), torch.optim.AdamW(other.parameters(), lr=0.01)
    step = torch_api.JaxTrainStep(model, lambda module, x, y: torch.nn.functional.mse_loss(module(x), y), ours)
    for _ in range(20):
        x, y = torch.randn(8, 129), torch.randn(8, 131)
        step(x, y)
        theirs.zero_grad()
        torch.nn.functional.mse_loss(other(x), y).backward()
        theirs.step()
    assert len(padded(ours)) == 1
    assert all(movement_error(p, q, s) <= 1e-4 for p, q, s in zip(model.parameters(), other.parameters(), start, strict=True))


def test_is_ragged_depends_on_the_length():
    assert policy.THREADING.splits_unevenly(PRIME)
    assert not policy.THREADING.splits_unevenly(PRIME + 1)
    assert not policy.THREADING.splits_unevenly(9)
