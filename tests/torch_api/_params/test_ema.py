"""`ema_decay`: the update also computes an average of the trained weights."""

import io

import optax
import pytest
import torch
from oracles import FUSES, clones, movement_error, random_grads, random_params, same, set_grads
from sampling import sampled

import bridge
import torch_api

MAKERS = {
    "adam": lambda params, **kw: torch_api.MaskedAdam(params, lr=1e-2, **kw),
    "factory": lambda params, **kw: torch_api.OptaxOptimizer(params, optax.adamw, lr=1e-2, **kw),
    "together": lambda params, **kw: torch_api.OptaxOptimizer(
        params, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)), **kw
    ),
}  # fmt: skip
pytestmark = [pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]


def train(optimizer, params, steps, after=lambda: None):
    for _ in range(steps):
        set_grads(params, random_grads(params))
        optimizer.step()
        after()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float64, torch.bfloat16, torch.complex64]), ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_average_is_taken_of_the_weights_after_each_step(make, dtype):
    check_average(make, dtype)


@pytest.mark.quick
def test_average_of_a_half_type_is_float32_and_taken_of_the_rounded_weights():
    check_average(MAKERS["adam"], torch.bfloat16)


@pytest.mark.quick
@pytest.mark.parametrize("broken", [False, True])
def test_average_of_master_weights_is_not_that_of_the_rounded_weights(broken):
    """The broken variant takes the average of the parameters."""
    params = random_params(torch.bfloat16)
    optimizer = torch_api.MaskedAdam(params, lr=1e-2, ema_decay=0.9, master_weights=True)
    start = [p.detach().double().clone() for p in params]
    average = [x.clone() for x in start]

    def follow():
        for a, p in zip(average, params, strict=True):
            a.mul_(0.9).add_((p if broken else optimizer.state[p]["master_param"]).detach().double(), alpha=0.1)

    train(optimizer, params, 20, follow)
    errors = [movement_error(optimizer.state[p]["ema_param"], a, s) for p, a, s in zip(params, average, start, strict=True)]
    assert (max(errors) < 1e-5) is not broken


def check_average(make, dtype):
    params = random_params(dtype)
    optimizer = make(params, ema_decay=0.9)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    start = [p.detach().to(wide).clone() for p in params]
    average = [x.clone() for x in start]

    def follow():
        for a, p in zip(average, params, strict=True):
            a.mul_(0.9).add_(p.detach().to(wide), alpha=0.1)

    train(optimizer, params, 20, follow)
    bound = 1e-12 if dtype is torch.float64 else 1e-5
    for p, a, s in zip(params, average, start, strict=True):
        kept = optimizer.state[p]["ema_param"]
        assert kept.dtype == (torch.float32 if dtype is torch.bfloat16 else dtype)
        assert movement_error(kept, a, s) < bound
        assert movement_error(kept, p, s) > 1e-2  # the average differs from the parameter


@pytest.mark.quick
def test_ema_params_swaps_in_place_and_restores_every_bit():
    params = random_params(torch.bfloat16)
    optimizer = torch_api.MaskedAdam([{"params": params[:4]}, {"params": params[4:], "trainable": False}], lr=1e-2, ema_decay=0.8)
    train(optimizer, params, 5)
    before, addresses = clones(params), [p.data_ptr() for p in params]
    averages = [optimizer.state[p]["ema_param"].to(p.dtype) for p in params[:4]]

    def check():
        assert same(params[:4], averages)
        assert same(params[4:], before[4:])
        assert [p.data_ptr() for p in params] == addresses

    with optimizer.ema_params():
        check()
        with pytest.raises(
            RuntimeError,
            match=r"step: inside ema_params\(\) the parameters hold other values than",
        ):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"ema_params: inside ema_params\(\)"), optimizer.ema_params():
            pass
        check()
    assert same(params, before)
    with pytest.raises(KeyError, match="mine"), optimizer.ema_params():
        raise KeyError("mine")
    assert same(params, before)
    assert not same(params[:4], averages)
    train(optimizer, params, 1)


def test_ema_params_without_ema_decay_raises_with_advice():
    optimizer = torch_api.MaskedAdam(random_params())
    with (
        pytest.raises(RuntimeError, match=r"ema_decay is None, so there is no average\. Construct with ema_decay=0.999"),
        optimizer.ema_params(),
    ):
        pass


def test_average_is_saved_and_starts_anew_if_the_checkpoint_lacks_it():
    params = random_params()
    optimizer = torch_api.MaskedAdam(params, lr=1e-2, ema_decay=0.9)
    train(optimizer, params, 4)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = clones(params)
    resumed = torch_api.MaskedAdam(copies, lr=1e-2, ema_decay=0.9)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(4):
        grads = random_grads(params)
        set_grads(params, grads), set_grads(copies, grads)
        optimizer.step(), resumed.step()
    assert same([optimizer.state[p]["ema_param"] for p in params], [resumed.state[p]["ema_param"] for p in copies])
    theirs = clones(params)
    torch.optim.Adam(theirs).load_state_dict(optimizer.state_dict())  # torch loads a checkpoint with the average
    plain = torch_api.MaskedAdam(clones(params))
    plain.load_state_dict(optimizer.state_dict())
    fresh = clones(params)
    begun = torch_api.MaskedAdam(fresh, lr=1e-2, ema_decay=0.9)
    begun.load_state_dict(plain.state_dict())
    train(begun, fresh, 1)
    for p, s in zip(fresh, params, strict=True):
        expected = s.detach() + 0.1 * (p.detach() - s.detach())
        torch.testing.assert_close(begun.state[p]["ema_param"], expected)


def test_changing_ema_decay_compiles_nothing():
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch_api.MaskedSGD([p], lr=1.0, ema_decay=0.5)
    for step, decay in enumerate((0.5, 0.0, 0.75)):
        optimizer.ema_decay = decay
        compiled = bridge.compilations()
        p.grad = -torch.ones(3)
        optimizer.step()
        assert not step or bridge.compilations() == compiled
    assert optimizer.state[p]["ema_param"].tolist() == [2.25] * 3  # 0.5, then 2, then 2 + (3 - 2) / 4


def test_ema_decay_set_later_is_validated():
    optimizer = torch_api.MaskedSGD([torch.nn.Parameter(torch.zeros(3))], ema_decay=0.5)
    for wrong in (1.0, -0.1, "0.9"):
        with pytest.raises(ValueError, match=r"MaskedSGD: ema_decay is .*; expected a number from 0 to below 1, or None"):
            optimizer.ema_decay = wrong
    assert optimizer.ema_decay == 0.5


@FUSES
@pytest.mark.parametrize("make", [torch_api.MaskedSGD, torch_api.MaskedAdamW, torch_api.MaskedAdam])
def test_average_costs_only_its_own_bytes(make):
    p = torch.nn.Parameter(torch.zeros(4096))
    counts = {}
    for decay in (None, 0.9):
        optimizer = make([p], lr=0.1, ema_decay=decay)
        p.grad = torch.ones(4096)
        optimizer.step()
        counts[decay] = optimizer.bytes_accessed()
    assert counts[0.9] - counts[None] <= 8.1 * 4096


@pytest.mark.parametrize("make", [torch_api.MaskedAdagrad, torch_api.MaskedAdam])
def test_average_starts_at_weights_loaded_after_construction(make):
    params = random_params()
    optimizer = make(params, lr=1e-2, ema_decay=0.9)  # Adagrad makes its state at construction
    with torch.no_grad():
        for p in params:
            p.add_(10.0)
    before = clones(params)
    with optimizer.ema_params():
        assert same(params, before)
    train(optimizer, params, 1)
    for p, start in zip(params, before, strict=True):
        assert torch.allclose(optimizer.state[p]["ema_param"], start + 0.1 * (p - start), atol=1e-6)
    resumed = make(clones(params), lr=1e-2, ema_decay=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, resumed.param_groups[0]["params"], strict=True):
        assert torch.equal(resumed.state[q]["ema_param"], optimizer.state[p]["ema_param"])


def test_average_does_not_alias_a_parameter_of_another_optimizer():
    p = torch.nn.Parameter(torch.ones(64))
    p.grad = torch.ones(64)
    torch_api.MaskedSGD([p], lr=0.1).step()
    optimizer = torch_api.MaskedSGD([p], lr=0.1, writeback="copy", ema_decay=0.9)
    optimizer.step()
    average = optimizer.state[p]["ema_param"]
    assert average.data_ptr() != p.data_ptr()
    assert torch.allclose(p, torch.full((64,), 0.8))
    assert torch.allclose(average, torch.full((64,), 0.89))


def test_ema_params_restores_trained_values_at_the_parameters_new_address():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = torch_api.MaskedSGD([p], lr=0.1, ema_decay=0.9)
    train(optimizer, [p], 2)
    before = p.detach().clone()
    with optimizer.ema_params():
        p.data = p.data.clone()  # as model.to() does
    assert torch.equal(p, before)


def test_ema_decay_may_be_switched_on_and_off_between_steps():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = torch_api.MaskedSGD([p], lr=0.1, momentum=0.9)
    train(optimizer, [p], 2)
    start, optimizer.ema_decay = p.detach().clone(), 0.5
    train(optimizer, [p], 1)
    assert torch.allclose(optimizer.state[p]["ema_param"], (start + p.detach()) / 2)
    kept, optimizer.ema_decay = optimizer.state[p]["ema_param"].clone(), None
    train(optimizer, [p], 1)
    assert torch.equal(optimizer.state[p]["ema_param"], kept)


def test_checkpoint_with_average_loads_after_momentum_was_switched_on():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = torch_api.MaskedSGD([p], lr=0.1, ema_decay=0.9)
    train(optimizer, [p], 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["momentum"] = 0.9
    optimizer.load_state_dict(saved)  # the saved state has the average but no momentum buffer
    train(optimizer, [p], 1)
    assert optimizer.state[p].keys() == {"momentum_buffer", "ema_param"}
