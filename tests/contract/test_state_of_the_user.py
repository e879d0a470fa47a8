"""State tensors that a user puts into `optimizer.state` are updated in place, as in torch.optim, wherever their memory lies."""

import copy
import io

import jax
import numpy as np
import optax
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]


def parameters(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


ALONE, PACKED = [(3, 50)], [(3, 4)] * 6
TORCH = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
OURS = {name: getattr(torch_api, f"Masked{name}") for name in TORCH}


def steps(optimizer, count=3):
    for nth in range(count):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.linspace(-1, 1, p.numel()).add(0.1 * nth).view(p.shape)
        optimizer.step()


def share_in_place(state, field):
    return state[field].share_memory_()


def put(state, field, tensor):
    state[field] = tensor.copy_(state[field])
    return tensor


def own(state, field):
    return put(state, field, torch.zeros(state[field].shape))


def own_in_shared_memory(state, field):
    return put(state, field, torch.zeros(state[field].shape).share_memory_())


def view_of_a_flat_buffer(state, field):
    size = state[field].numel()
    return put(state, field, torch.zeros(2 * size + 7)[7 : 7 + size].view(state[field].shape))


def over_an_array(state, field):
    return put(state, field, torch.from_numpy(np.zeros(tuple(state[field].shape), np.float32)))


def strided(state, field):
    shape = state[field].shape
    return put(state, field, torch.zeros(2, *shape).movedim(0, -1)[..., 0])


def with_an_alias(state, field):
    tensor = torch.zeros(state[field].shape)
    state["alias"] = tensor.detach()
    put(state, field, tensor)
    return state.pop("alias")


PUT = [share_in_place, own, own_in_shared_memory, view_of_a_flat_buffer, over_an_array, strided, with_an_alias]


def check_puts(name, field, place, shapes, more):
    """Compare parameters and the user's tensor between torch's optimizer and ours; the user also writes into the tensor."""
    results = []
    for classes in (TORCH, OURS):
        ps = parameters(shapes)
        optimizer = classes[name](ps, lr=0.01, **more)
        steps(optimizer)
        mine = place(optimizer.state[ps[-1]], field)
        shown, address = optimizer.state[ps[-1]][field], mine.data_ptr()
        steps(optimizer)
        mine.mul_(0.5)
        steps(optimizer)
        assert optimizer.state[ps[-1]][field] is shown
        assert shown.data_ptr() == mine.data_ptr()
        assert mine.data_ptr() == address or place is own
        results.append([mine, *(p.detach() for p in ps)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shapes", [ALONE, PACKED], ids=["alone", "packed"])
@pytest.mark.parametrize("place", PUT)
def test_moments_stay_the_users_tensors(place, shapes):
    check_puts("Adam", "exp_avg", place, shapes, {})


@pytest.mark.parametrize("shapes", [ALONE, PACKED], ids=["alone", "packed"])
@pytest.mark.parametrize("place", [share_in_place, own, view_of_a_flat_buffer])
def test_step_counts_stay_the_users_tensors(place, shapes):
    check_puts("AdamW", "step", place, shapes, {})


@pytest.mark.parametrize("place", [own_in_shared_memory, view_of_a_flat_buffer])
def test_other_state_stays_the_users_tensors(place):
    check_puts("SGD", "momentum_buffer", place, ALONE, {"momentum": 0.9})
    check_puts("Adagrad", "sum", place, PACKED, {})


@jax.numpy_dtype_promotion("standard")  # optax fails under strict promotion
def test_shared_state_stays_the_users_tensors():
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_schedule(lambda count: -0.1 / (1 + count)))
    results = []
    for new in (None, lambda dtype: torch.zeros((), dtype=dtype), lambda dtype: torch.zeros(9, dtype=dtype)[4]):
        ps = parameters(PACKED[:2])
        optimizer = torch_api.OptaxOptimizer(ps, transformation)
        steps(optimizer)
        state = optimizer.state[ps[0]]
        numbers = [name for name, value in state.items() if value.shape == ()]
        mine = {name: put(state, name, new(state[name].dtype)) for name in numbers if new is not None}
        steps(optimizer)
        for name, tensor in mine.items():
            assert state[name] is tensor
            assert optimizer.state[ps[1]][name] is tensor
        results.append([*(p.detach() for p in ps), *(state[name].float() for name in numbers)])
    assert len(results[0]) == len(ps) + 1
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


def test_train_step_updates_the_users_tensors():
    results = []
    for place in (own, view_of_a_flat_buffer, own_in_shared_memory):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch_api.MaskedAdam(model.parameters(), lr=0.01)
        step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)
        step(torch.ones(3, 4))
        mine = [place(optimizer.state[model.weight], field) for field in ("exp_avg", "step")]
        for _ in range(2):
            step(torch.ones(3, 4))
        mine[0].mul_(0.5)
        step(torch.ones(3, 4))
        assert mine[1] == 4
        results.append([mine[0].clone(), model.weight.detach().clone()])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


def test_loaded_and_copied_state_is_independent():
    ps = parameters(ALONE)
    optimizer = torch_api.MaskedAdam(ps, lr=0.01)
    steps(optimizer)
    mine = view_of_a_flat_buffer(optimizer.state[ps[0]], "exp_avg")
    steps(optimizer, 1)
    file = io.BytesIO()
    torch.save(saved := optimizer.state_dict(), file)
    other, twin = torch_api.MaskedAdam(parameters(ALONE), lr=0.01), copy.deepcopy(optimizer)
    other.load_state_dict(saved)
    before = mine.clone()
    steps(other)
    steps(twin)
    torch.testing.assert_close(mine, before, rtol=0, atol=0)
    steps(optimizer)
    for each in (other, twin):
        torch.testing.assert_close(next(iter(each.state.values()))["exp_avg"], mine)
    file.seek(0)
    torch.testing.assert_close(torch.load(file)["state"][0]["exp_avg"], before)


def test_refused_step_leaves_the_users_tensors_unchanged():
    ps = parameters(PACKED)
    optimizer = torch_api.MaskedAdam(ps, lr=0.01)
    steps(optimizer)
    mine = [own_in_shared_memory(optimizer.state[p], "exp_avg") for p in ps]
    steps(optimizer)
    before = [tensor.clone() for tensor in mine]
    ps[1].grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    torch.testing.assert_close(mine, before, rtol=0, atol=0)


def test_share_memory_of_adagrad_shares_its_state():
    ours, theirs = parameters(PACKED), parameters(PACKED)
    optimizer, twin = torch_api.MaskedAdagrad(ours, mask=lambda name, p: p is not ours[0]), torch.optim.Adagrad(theirs[1:])
    for each in (optimizer, twin):
        each.share_memory()
    assert all(optimizer.state[p]["sum"].is_shared() for p in ours[1:])
    steps(optimizer)
    steps(twin)
    assert all(optimizer.state[p]["sum"].is_shared() for p in ours[1:])
    for p, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, expected)


class SharedState:
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for value in self.state[p].values():
                value.share_memory_()


class SharedTorch(SharedState, torch.optim.Adam):
    pass


class SharedMasked(SharedState, torch_api.MaskedAdam):
    pass


def test_steps_of_a_spawned_process_update_shared_state():
    ours, theirs = (torch.nn.ParameterList(parameters(PACKED)).share_memory() for _ in range(2))
    optimizer, twin = SharedMasked(ours), SharedTorch(theirs)
    worker = torch.multiprocessing.get_context("spawn").Process(target=steps, args=(optimizer,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    steps(twin)
    for _ in range(2):
        for p, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, expected)
            assert optimizer.state[p]["step"] == twin.state[expected]["step"]
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], twin.state[expected]["exp_avg"])
        steps(optimizer)  # continues from the worker's values
        steps(twin)
