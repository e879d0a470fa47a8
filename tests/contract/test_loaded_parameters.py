"""Parameters loaded from files are updated in place; parameters whose memory has another holder get a copy of each result."""

import gc
import io
import mmap
import re
import warnings

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from sampling import sampled

import torch_api

pytestmark = pytest.mark.unoptimized

STEPS = 3


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 4))


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def assigned(state):
    loaded = model()
    loaded.load_state_dict(state, assign=True)
    return loaded


def by_safetensors(folder):
    safetensors.torch.save_file(model().state_dict(), folder / "weights.safetensors")
    return assigned(safetensors.torch.load_file(folder / "weights.safetensors"))


def by_safe_open(folder):
    safetensors.torch.save_file(model().state_dict(), folder / "weights.safetensors")
    with safetensors.safe_open(folder / "weights.safetensors", "pt") as file:
        return assigned({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping


def by_load(_):
    return assigned(torch.load(saved(model().state_dict())))


def by_mapped_load(folder):
    torch.save(model().state_dict(), folder / "weights.pt")
    return assigned(torch.load(folder / "weights.pt", mmap=True))


def whole(_):
    return torch.load(saved(model()), weights_only=False)


def seen_by_numpy(_):
    """Take a NumPy view and drop it."""
    made = model()
    assert all(np.isfinite(p.detach().numpy()).all() for p in made.parameters())
    return made


LOADERS = [by_safetensors, by_safe_open, by_load, by_mapped_load, whole, seen_by_numpy]


def give_gradients(parameters, nth):
    for p in parameters:
        p.grad = torch.linspace(-1, 1, p.numel()).add(0.1 * nth).view(p.shape)


def steps(parameters, optimizer):
    for nth in range(STEPS):
        give_gradients(parameters, nth)
        optimizer.step()


@pytest.mark.fast_path
@pytest.mark.parametrize("load", sampled(LOADERS))
def test_loaded_parameters_are_updated_in_their_own_memory(load, tmp_path):
    loaded, twin = load(tmp_path), model()
    gc.collect()
    before = [p.data_ptr() for p in loaded.parameters()]
    optimizer = torch_api.MaskedAdamW(loaded.named_parameters(), lr=0.1)
    placed = [p.data_ptr() for p in loaded.parameters()]
    assert not set(before) & set(placed)
    assert {row["write-back"] for row in optimizer.report().rows} == {"inplace"}
    steps(list(loaded.parameters()), optimizer)
    assert [p.data_ptr() for p in loaded.parameters()] == placed
    steps(list(twin.parameters()), torch.optim.AdamW(twin.parameters(), lr=0.1))
    for ours, theirs in zip(loaded.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.fast_path
@pytest.mark.parametrize("is_held", [False, True])
def test_tensors_of_a_file_are_trained_in_place(is_held, tmp_path):
    safetensors.torch.save_file({"w": torch.ones(4, 4)}, tmp_path / "weights.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    other = loaded["w"].view(16) if is_held else None
    for tensor in loaded.values():
        tensor.requires_grad_()
    optimizer = torch_api.MaskedSGD(loaded.items(), lr=0.1)
    steps(list(loaded.values()), optimizer)
    (row,) = optimizer.report().rows
    assert (row["write-back"] == "inplace") is not is_held
    assert loaded["w"][0, 0] > 1
    if other is not None:
        torch.testing.assert_close(other.view(4, 4), loaded["w"].detach())
    loss = (3 * loaded["w"]).sum()
    loaded["w"].grad = None
    loss.backward()
    assert (loaded["w"].grad == 3).all()


@pytest.mark.fast_path
def test_a_train_step_updates_loaded_parameters_in_their_own_memory(tmp_path):
    loaded, x = by_safetensors(tmp_path), torch.ones(2, 8)
    optimizer = torch_api.MaskedSGD(loaded.named_parameters(), lr=0.1)
    step = torch_api.JaxTrainStep(loaded, lambda model, x: model(x).square().mean(), optimizer)
    first = step(x)
    addresses = [p.data_ptr() for p in loaded.parameters()]
    assert step(x) < first
    assert [p.data_ptr() for p in loaded.parameters()] == addresses
    assert {row["write-back"] for row in optimizer.report().rows} == {"inplace"}


def test_training_leaves_the_files_unchanged(tmp_path):
    for load, name in ((by_safetensors, "weights.safetensors"), (by_mapped_load, "weights.pt")):
        loaded = load(tmp_path)
        content = (tmp_path / name).read_bytes()
        steps(list(loaded.parameters()), torch_api.MaskedSGD(loaded.parameters(), lr=0.1))
        assert (tmp_path / name).read_bytes() == content


def of_numpy(_):
    array = np.ones((4, 4), np.float32)
    return torch.from_numpy(array), array


def of_a_buffer(_):
    space = bytearray(np.ones((4, 4), np.float32).tobytes())
    return torch.frombuffer(space, dtype=torch.float32).view(4, 4).detach(), np.frombuffer(space, np.float32).reshape(4, 4)


def of_dlpack(_):
    array = np.ones((4, 4), np.float32)
    return torch.from_dlpack(array), array


def of_a_mapped_array(folder):
    np.save(folder / "array.npy", np.ones((4, 4), np.float32))
    array = np.load(folder / "array.npy", mmap_mode="c")
    return torch.from_numpy(array), array


def of_a_shared_file(folder):
    torch.save({"w": torch.ones(4, 4)}, folder / "weights.pt")
    load = lambda: torch.load(folder / "weights.pt", mmap=True)["w"]  # noqa: E731
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return load(), load().numpy()


def of_a_kept_dict(_):
    state = torch.load(saved({"w": torch.ones(4, 4)}))
    return state["w"], state["w"].numpy()


@pytest.mark.fast_path
@pytest.mark.parametrize("share", [of_numpy, of_a_buffer, of_dlpack, of_a_mapped_array, of_a_shared_file, of_a_kept_dict])
def test_memory_with_another_holder_gets_the_updates(share, tmp_path):
    tensor, other = share(tmp_path)
    parameter = torch.nn.Parameter(tensor)
    if share is not of_a_kept_dict:
        del tensor
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = torch_api.MaskedSGD([("w", parameter)], lr=0.1)
        steps([parameter], optimizer)
        optimizer.add_param_group({"params": [("v", torch.nn.Parameter(torch.ones(3)))]})
    assert [re.search(r"each step copies 'w'.*p\.data\.clone\(\)", str(warning.message)) is None for warning in seen] == [False]
    assert parameter[0, 0] > 1
    np.testing.assert_array_equal(other, parameter.detach())


@pytest.mark.fast_path
def test_numpy_view_of_a_parameter_gets_the_updates():
    parameter = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    array = parameter.numpy()
    parameter.requires_grad_()
    with pytest.warns(UserWarning, match="each step copies 'w'"):
        steps([parameter], torch_api.MaskedSGD([("w", parameter)], lr=0.1))
    assert array[0, 0] > 1
    np.testing.assert_array_equal(array, parameter.detach())


@pytest.mark.fast_path
@pytest.mark.quick
def test_parameters_in_own_memory_and_requested_copies_do_not_warn():
    array = np.ones((4, 4), np.float32)
    parameter, other = torch.nn.Parameter(torch.from_numpy(array)), torch.nn.Parameter(torch.from_numpy(array.copy()))
    parameter.data = parameter.data.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps([parameter], optimizer := torch_api.MaskedSGD([parameter], lr=0.1))
        steps([other], torch_api.MaskedSGD([other], lr=0.1, writeback="copy"))
    assert optimizer.report().rows[0]["write-back"] == "inplace"
    assert (array == 1).all()
    torch.testing.assert_close(other, parameter)


@pytest.mark.fast_path
def test_warning_raised_as_an_error_leaves_the_optimizer_usable():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch_api.MaskedSGD([parameter], lr=0.1, momentum=0.9)
    steps([parameter], optimizer)
    before = parameter.detach().clone()
    parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
    give_gradients([parameter], 0)
    with pytest.raises(UserWarning, match="each step copies"):
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), before, rtol=0, atol=0)
    optimizer.step()
    assert not torch.equal(parameter.detach(), before)


def test_jax_arrays_are_never_written_to():
    array = jax.numpy.ones(64)
    parameter = torch.nn.Parameter(torch.from_dlpack(array).clone())
    steps([parameter], torch_api.MaskedSGD([parameter], lr=0.1))
    assert (array == 1).all()


@pytest.mark.fast_path
def test_numpy_memory_is_not_adopted_if_gc_cannot_list_holders(tmp_path):
    file = tmp_path / "numbers"
    np.zeros(8, np.float32).tofile(file)
    array = np.memmap(file, np.float32, "c")
    gc.freeze()
    try:
        p = torch.nn.Parameter(torch.from_numpy(array))
        p.grad = torch.ones_like(p)
        with pytest.warns(UserWarning, match="copies"):
            optimizer = torch_api.MaskedSGD([p], lr=1.0)
        optimizer.step()
    finally:
        gc.unfreeze()
    assert array.tolist() == [-1.0] * 8


def unfrozen_by_grad(model, optimizer, step):
    model[0].requires_grad_(True)
    return optimizer


def unfrozen_by_set_trainable(model, optimizer, step):
    optimizer.set_trainable("0.*", True)
    return optimizer


def added(model, optimizer, step):
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].named_parameters("0"))})
    return optimizer


def unfrozen_for_another_optimizer(model, optimizer, step):
    model[0].requires_grad_(True)
    return torch_api.MaskedSGD(model.named_parameters(), lr=0.1)


THAWS = {
    unfrozen_by_grad: lambda model: torch_api.MaskedSGD(model.named_parameters(), lr=0.1),
    unfrozen_by_set_trainable: lambda model: torch_api.MaskedSGD(model.named_parameters(), lr=0.1, mask="[12].*"),
    added: lambda model: torch_api.MaskedSGD([*model[1].named_parameters("1"), *model[2].named_parameters("2")], lr=0.1),
    unfrozen_for_another_optimizer: lambda model: torch_api.MaskedSGD(model.named_parameters(), lr=0.1),
}


@pytest.mark.fast_path
@pytest.mark.parametrize("first", sampled(["the train step", "the optimizer"]))
@pytest.mark.parametrize("thaw", THAWS)
def test_thawed_parameter_of_a_train_step_is_updated_in_place(thaw, first):
    made, twin, batches = model(), model(), [torch.ones(2, 8), torch.ones(3, 8)]
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    if thaw is not unfrozen_by_set_trainable:
        made[0].requires_grad_(False)
    step = torch_api.JaxTrainStep(made, loss, optimizer := THAWS[thaw](made))
    for x in batches:  # two programs read the frozen layer
        step(x)
    thawed = thaw(made, optimizer, step)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), made.parameters(), strict=True):
            p.copy_(q)
    theirs, x, placed = torch.optim.SGD(twin.parameters(), lr=0.1), batches[0], []
    for nth in range(3):
        if thawed is optimizer and (nth or first == "the train step"):
            step(x)
        else:
            made.zero_grad()
            loss(made, x).backward()
            thawed.step()
        theirs.zero_grad()
        loss(twin, x).backward()
        theirs.step()
        placed.append([p.data_ptr() for p in made.parameters()])
    assert placed[0] == placed[1] == placed[2]
    assert {row["write-back"] for row in thawed.report().rows} == {"inplace"}
    for ours, of_torch in zip(made.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, of_torch, rtol=1e-4, atol=1e-5)


def test_train_step_reads_parameters_that_another_optimizer_has_moved():
    made, x = model(), torch.ones(2, 8)
    made[:2].requires_grad_(False)
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    step = torch_api.JaxTrainStep(made, loss, torch_api.MaskedSGD(made[2].parameters(), lr=0.0))
    step(x)
    other = torch_api.MaskedSGD(made[0].requires_grad_(True).parameters(), lr=0.1)
    made[0].requires_grad_(False)
    for _ in range(2):
        torch.testing.assert_close(step(x), loss(made, x).detach(), rtol=1e-4, atol=1e-5)
        made[0].requires_grad_(True)
        give_gradients(list(made[0].parameters()), 0)
        other.step()
        made[0].requires_grad_(False)
    torch.testing.assert_close(step(x), loss(made, x).detach(), rtol=1e-4, atol=1e-5)
