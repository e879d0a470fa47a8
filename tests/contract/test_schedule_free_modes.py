"""`eval()` and `train()` of the schedule-free optimizer put optax's average into the parameters and restore the training point."""

import copy
import io
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax itself is not clean under strict promotion
        yield


def made(dtype=torch.float32, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 3).to(dtype)), torch.nn.Parameter(torch.randn(4).to(dtype))]
    return params, torch_api.MaskedScheduleFreeAdamW([("w", params[0]), ("b", params[1])], lr=0.1, **options)


def steps(params, optimizer, first=0, count=3):
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def values(params):
    return [p.detach().clone() for p in params]


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_eval_gives_the_average_and_train_restores_the_training_point():
    params, optimizer = made()
    tx = optax.contrib.schedule_free_adamw(0.1)
    y = {str(i): jnp.asarray(p.detach().numpy().copy()) for i, p in enumerate(params)}
    state = tx.init(y)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        grads = {str(i): jnp.asarray(torch.randn(p.shape, generator=generator).numpy()) for i, p in enumerate(params)}
        updates, state = tx.update(grads, state, y)
        y = optax.apply_updates(y, updates)
        steps(params, optimizer, number, 1)
        optimizer.eval()
        x = optax.contrib.schedule_free_eval_params(state, y)
        for i, p in enumerate(params):
            torch.testing.assert_close(p.detach(), torch.tensor(jax.device_get(x[str(i)])), rtol=1e-4, atol=1e-5)
        optimizer.train()
        for i, p in enumerate(params):
            torch.testing.assert_close(p.detach(), torch.tensor(jax.device_get(y[str(i)])), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modes_are_idempotent_and_restore_all_bits(dtype):
    params, optimizer = made(dtype)
    optimizer.train()  # as trainers do before the first step
    optimizer.eval()  # before the first step, each parameter equals its average
    optimizer.train()
    steps(params, optimizer)
    y, addresses = values(params), [p.data_ptr() for p in params]
    with optimizer.eval_params():
        x = values(params)
    for _ in range(2):
        optimizer.eval()
        assert all(map(torch.equal, params, x))
        with optimizer.eval_params():
            assert all(map(torch.equal, params, x))
        assert all(map(torch.equal, params, x))
    assert not torch.equal(x[0], y[0])
    for _ in range(2):
        optimizer.train()
        assert all(map(torch.equal, params, y))
    assert [p.data_ptr() for p in params] == addresses
    other, reference = made(dtype)
    steps(other, reference, count=5)
    steps(params, optimizer, 3, 2)
    assert all(map(torch.equal, params, other)), "eval() and train() change later steps"


def test_step_in_eval_mode_raises_and_changes_nothing():
    params, optimizer = made(ema_decay=0.9)
    steps(params, optimizer)
    optimizer.eval()
    x = values(params)
    for call in (lambda: steps(params, optimizer), lambda: optimizer.ema_params().__enter__()):
        with pytest.raises(RuntimeError, match=r"since eval\(\).*Call train\(\) first"):
            call()
        assert all(map(torch.equal, params, x))
    optimizer.train()
    steps(params, optimizer)
    for context in (optimizer.eval_params, optimizer.ema_params):
        with context():
            for call in (optimizer.eval, optimizer.train):
                with pytest.raises(RuntimeError, match="Leave it first"):
                    call()
    steps(params, optimizer)


def test_train_step_in_eval_mode_raises():
    model = torch.nn.Linear(2, 2)
    optimizer = torch_api.MaskedScheduleFreeAdamW(model.parameters(), lr=0.1)
    train_step = torch_api.JaxTrainStep(model, lambda model, x: (model(x) ** 2).mean(), optimizer)
    train_step(torch.ones(3, 2))
    y = values(model.parameters())
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"Call train\(\) first"):
        train_step(torch.ones(3, 2))
    optimizer.train()
    assert all(map(torch.equal, model.parameters(), y))
    train_step(torch.ones(3, 2))


def saved_and_loaded(optimizer, twins):
    other = torch_api.MaskedScheduleFreeAdamW([("w", twins[0]), ("b", twins[1])], lr=0.5)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return twins, other


def copied(optimizer, _):
    other = copy.deepcopy(optimizer)
    return other.param_groups[0]["params"], other


def pickled(optimizer, _):
    other = pickle.loads(pickle.dumps(optimizer))
    return other.param_groups[0]["params"], other


@pytest.mark.parametrize("way", [saved_and_loaded, copied, pickled])
def test_copy_made_in_eval_mode_continues_after_train(way):
    params, optimizer = made()
    steps(params, optimizer)
    optimizer.eval()
    twins, other = way(optimizer, [torch.nn.Parameter(p.detach().clone()) for p in params])
    with pytest.raises(RuntimeError, match=r"Call train\(\) first"):
        steps(twins, other)
    assert all(map(torch.equal, twins, params))
    other.eval()
    for o in (optimizer, other):
        o.train()
    torch.testing.assert_close(list(twins), params, rtol=1e-5, atol=1e-6)
    for own, o in ((params, optimizer), (twins, other)):
        steps(own, o, 3, 2)
        assert "train_mode" not in o.param_groups[0]
    torch.testing.assert_close(list(twins), params, rtol=1e-4, atol=1e-5)


def test_loading_a_training_checkpoint_ends_eval_mode():
    params, optimizer = made()
    steps(params, optimizer)
    saved, y = copy.deepcopy(optimizer.state_dict()), values(params)
    optimizer.eval()
    damaged = copy.deepcopy(saved)
    damaged["state"][0]["z"] = torch.zeros(2)
    with pytest.raises(ValueError, match="'z'"):
        optimizer.load_state_dict(damaged)
    with pytest.raises(RuntimeError, match=r"Call train\(\) first"):
        optimizer.step()
    with torch.no_grad():
        for p, value in zip(params, y, strict=True):
            p.copy_(value)  # as model.load_state_dict does
    optimizer.load_state_dict(saved)
    other, reference = made()
    steps(other, reference, count=5)
    steps(params, optimizer, 3, 2)
    assert all(map(torch.equal, params, other))


@pytest.mark.parametrize(
    "write", [lambda p, value: p.copy_(value), lambda p, value: p.data.copy_(value), lambda p, value: setattr(p, "data", value)]
)
def test_training_continues_from_weights_loaded_in_eval_mode(write):
    """The new training point lies between the loaded weights and z, as in the schedulefree package."""
    params, optimizer = made()
    steps(params, optimizer)
    y = values(params)
    optimizer.eval()
    best = torch.randn(5, 3)
    with torch.no_grad():
        write(params[0], best.clone())
    optimizer.train()
    z = optimizer.state[params[0]]["z"]
    torch.testing.assert_close(params[0].detach(), 0.9 * best + 0.1 * z, rtol=1e-5, atol=1e-6)
    assert torch.equal(params[1], y[1])
    steps(params, optimizer)


def test_modes_leave_frozen_parameters_unchanged():
    params, optimizer = made(mask="w")
    steps(params, optimizer)
    before = params[1].detach().clone()
    optimizer.eval()
    assert torch.equal(params[1], before)
    optimizer.train()
    assert torch.equal(params[1], before)


@pytest.mark.parametrize("way", [saved_and_loaded, copied, pickled])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_point_of_master_weights_is_saved(dtype, way):
    params, optimizer = made(dtype, master_weights=True)
    steps(params, optimizer)
    y = values(params)
    optimizer.eval()
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    if way is saved_and_loaded:
        other = torch_api.MaskedScheduleFreeAdamW([("w", twins[0]), ("b", twins[1])], lr=0.1, master_weights=True)
        other.load_state_dict(through_a_file(optimizer.state_dict()))
    else:
        twins, other = way(optimizer, twins)
    for own, o in ((params, optimizer), (twins, other)):
        o.train()
        assert all(map(torch.equal, own, y))
        steps(own, o, 3, 3)
    assert all(map(torch.equal, twins, params))
    assert all(torch.equal(other.state[q]["master_param"], optimizer.state[p]["master_param"]) for p, q in zip(params, twins, strict=True))


def test_training_continues_from_weights_loaded_beside_master_weights():
    params, optimizer = made(torch.bfloat16, master_weights=True)
    steps(params, optimizer)
    optimizer.eval()
    twins, other = copied(optimizer, None)
    best = torch.randn(5, 3).bfloat16()
    with torch.no_grad():
        twins[0].copy_(best)
    other.train()
    torch.testing.assert_close(twins[0].detach(), (0.9 * best.float() + 0.1 * other.state[twins[0]]["z"].float()).bfloat16())
