"""Tensors whose storage was freed or shrunk (`untyped_storage().resize_()`, as FSDP and offloading do) are refused and never read."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def halved(tensor):
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() // 2)
    return tensor


def second_half_cut_off(tensor):
    """Return a view of the second half of a storage that is then shrunk to half its size."""
    flat = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    view = flat[tensor.numel() :].view(tensor.shape)
    flat.untyped_storage().resize_(tensor.nbytes)
    return view


def half_of_a_freed_buffer(tensor):
    return freed(torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)[tensor.numel() :].view(tensor.shape))


WAYS = [freed, halved, second_half_cut_off, half_of_a_freed_buffer]
SHAPES = {
    "gathered among equal ones": [(6, 6)] * 5,
    "alone": [(200, 6), (7,)],
    "of an odd length": [(16411,), (5,)],
    "read before the update": [(1024, 1024)],
    "many of medium size": [(64, 1024)] * 40,
}


def named(shapes):
    return [(f"layer{i}", torch.nn.Parameter(torch.ones(shape))) for i, shape in enumerate(shapes)]


def give_gradients(parameters):
    for _, p in parameters:
        p.grad = torch.ones_like(p)


def refused(call, optimizer, parameters, match):
    """Check that the call raises and changes neither parameters nor state."""
    before = [p.detach().clone() for _, p in parameters]
    states = {(name, key): x.clone() for name, p in parameters for key, x in optimizer.state[p].items()}
    with pytest.raises(ValueError, match=match):
        call()
    assert all(torch.equal(p, old) for (_, p), old in zip(parameters, before, strict=True))
    assert all(torch.equal(optimizer.state[p][key], states[name, key]) for name, p in parameters for key in optimizer.state[p])


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_freed_gradient_is_refused(way, shapes):
    parameters = named(shapes)
    optimizer = torch_api.MaskedAdamW(parameters, lr=0.1, max_grad_norm=1.0 if shapes == [(1024, 1024)] else None)
    give_gradients(parameters)
    p = parameters[0][1]
    p.grad = way(p.grad)
    refused(optimizer.step, optimizer, parameters, "gradient of 'layer0'.*storage was resized.*Nothing was updated")
    p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    before = p.detach().clone()
    p.grad = way(torch.ones_like(p))
    refused(optimizer.step, optimizer, parameters, "gradient of 'layer0'.*storage was resized.*Nothing was updated")
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(p, before)


@pytest.mark.parametrize("change", [lambda p: None, lambda p: p.to(memory_format=torch.channels_last), lambda p: p.bfloat16()])
def test_gradient_freed_after_a_step_is_refused(change):
    """A step leaves the storage of a gradient resizable, so it may be freed after a step has read it."""
    p = torch.nn.Parameter(torch.ones(8, 3, 5, 5))
    p.data = p.data if change(p) is None else change(p.data)
    optimizer = torch_api.MaskedSGD([("weight", p)], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    freed(p.grad)
    refused(optimizer.step, optimizer, [("weight", p)], "gradient of 'weight'")


def test_gradients_may_be_slices_of_one_buffer():
    parameters = named([(3, 4), (5,), (200, 6)])
    optimizer = torch_api.MaskedSGD(parameters, lr=0.5)
    flat = torch.ones(sum(p.numel() for _, p in parameters))
    for (_, p), part in zip(parameters, flat.split([p.numel() for _, p in parameters]), strict=True):
        p.grad = part.view(p.shape)
    for steps in (1, 2):
        optimizer.step()
        assert all(bool((p == 1 - 0.5 * steps).all()) for _, p in parameters)
    freed(flat)
    refused(optimizer.step, optimizer, parameters, "gradient of 'layer.'")


def test_freed_parameter_of_torch_memory_is_refused():
    flat = torch.ones(24)
    parameters = [("first", torch.nn.Parameter(flat[:8])), ("second", torch.nn.Parameter(flat[8:]))]
    optimizer = torch_api.MaskedSGD(parameters, lr=0.5)
    give_gradients(parameters)
    optimizer.step()
    nbytes = flat.nbytes
    freed(flat)
    with pytest.raises(ValueError, match=r"parameter 'first'.*its memory was freed.*Nothing was updated"):
        optimizer.step()
    flat.untyped_storage().resize_(nbytes)
    flat.fill_(3.0)
    optimizer.step()
    assert flat.tolist() == [2.5] * 24


def test_parameter_may_get_its_memory_after_construction():
    p = torch.nn.Parameter(torch.zeros(4))
    freed(p)
    optimizer = torch_api.MaskedSGD([("weight", p)], lr=0.5)
    p.untyped_storage().resize_(16)
    p.data.fill_(1.0)
    p.grad = torch.ones(4)
    optimizer.step()
    assert p.tolist() == [0.5] * 4


@pytest.mark.parametrize("way", WAYS)
def test_freed_extra_arguments_loss_scales_and_masks_are_refused(way):
    parameters = named([(4, 3)])

    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: -g * value[0], updates), state

    scaled = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]
    optimizer = torch_api.OptaxOptimizer(parameters, scaled, lr=1.0)
    give_gradients(parameters)
    optimizer.step(value=torch.ones(2))
    for dtype in (torch.float32, torch.float64):
        value = way(torch.ones(2, dtype=dtype))
        refused(functools.partial(optimizer.step, value=value), optimizer, parameters, "argument value .*storage was resized")
    optimizer = torch_api.MaskedAdamW(parameters, lr=0.1, fused=True)
    vars(optimizer).update(found_inf=torch.zeros(()), grad_scale=way(torch.ones(2)))  # as GradScaler does
    refused(optimizer.step, optimizer, parameters, "optimizer.grad_scale .*storage was resized")
    with pytest.raises(ValueError, match=r"mask: the tensor for 'layer0'.*storage was resized"):
        torch_api.MaskedSGD(parameters, lr=0.1, mask={"layer0": way(torch.ones(4, 3, dtype=torch.bool))})


def test_mask_tensor_may_be_freed_after_construction():
    mask = torch.tensor([True, False, True])
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch_api.MaskedSGD([("weight", p)], lr=1.0, mask={"weight": mask})
    freed(mask)
    p.grad = torch.ones(3)
    optimizer.step()
    assert p.tolist() == [0, 1, 0]


def test_train_step_refuses_freed_batches_and_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    model[0].get_parameter("bias").requires_grad_(False)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.1)
    step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().sum(), optimizer)
    batch = torch.ones(3, 4)
    step(batch)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    freed(batch)  # possible, because the previous step leaves its storage resizable
    refused(functools.partial(step, batch), optimizer, trained, "item 0 of the batch.*storage was resized")
    for way in WAYS:
        for dtype in (torch.float32, torch.bfloat16):
            given = way(torch.ones(3, 4, dtype=dtype))
            refused(functools.partial(step, given), optimizer, trained, "item 0 of the batch.*storage was resized")
    frozen: torch.Tensor = model[0].get_parameter("bias")
    size = frozen.nbytes
    freed(frozen)
    refused(functools.partial(step, torch.ones(3, 4)), optimizer, trained, "'0.bias' of the module cannot be read")
    frozen.untyped_storage().resize_(size)
    frozen.data.zero_()
    step(torch.ones(3, 4))


@pytest.mark.parametrize("x64", [None, False])
@pytest.mark.parametrize("way", WAYS)
def test_jax_function_refuses_freed_arguments(way, x64):
    f = bridge.jax_function(lambda x, y: jnp.sin(x) * y["scale"], x64=x64)
    for dtype in (torch.float32, torch.float64):
        x, y = torch.ones(4, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)
        expected = torch.sin(x) * 2
        torch.testing.assert_close(f(x, {"scale": y}), expected, check_dtype=False)
        for kept in ([x, {"scale": way(y)}], [way(torch.ones(4, dtype=dtype)), {"scale": torch.ones(4, dtype=dtype)}]):
            with pytest.raises(ValueError, match=r"argument '(0|1\.scale)'.*storage was resized"):
                f(*kept)


def test_backward_of_a_jax_function_refuses_freed_residuals():
    f = bridge.jax_function(lambda x, y: x * y)
    x, y = torch.ones(64, requires_grad=True), torch.ones(64)
    out = f(x, y)
    freed(y)
    with pytest.raises(ValueError, match="its memory was freed"):
        out.sum().backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copy", [False, None, True])
def test_to_jax_refuses_freed_tensors(way, copy):
    with pytest.raises(ValueError, match=r"tensor 'a'.*storage was resized"):
        bridge.to_jax({"a": way(torch.ones(64))}, copy=copy)


def test_intact_tensor_is_accepted():
    whole = torch.ones(64)
    assert jax.numpy.array_equal(bridge.to_jax(whole), jnp.ones(64))


def test_first_step_in_inference_mode_can_be_followed_by_others():
    p = torch.nn.Parameter(torch.zeros((1 << 14) + 1))  # its length is odd, so its gradient is copied to a longer row
    optimizer = torch_api.MaskedSGD([p], lr=1.0)
    p.grad = torch.ones_like(p)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert torch.equal(p.detach(), torch.full_like(p, -2.0))
