"""Tensors to arrays and back share memory, or an error names the cause."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from packing import ODD

import bridge
from bridge import _process
from bridge._interop import dlpack
from bridge._memory import call_arguments

pytestmark = pytest.mark.quick

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]

LAYOUTS = {
    "0-d": lambda: torch.tensor(1.5),
    "empty": lambda: torch.zeros(0, 3),
    "size-1 dimensions": lambda: torch.randn(4, 1, 4, 1),
    "transposed": lambda: torch.randn(4, 8).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last of one channel": lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.fixture(params=["fast", "public"])
def route(request, monkeypatch):
    """Run the test with jax's internal DLPack calls and with its public ones."""
    caches = (dlpack._import_method, dlpack._importer, dlpack._exporter)
    for cache in caches:
        cache.cache_clear()
    if request.param == "public":
        monkeypatch.setattr(dlpack, "_raw_importer", lambda *_: None)
        monkeypatch.setattr(dlpack, "_raw_exporter", lambda: None)
    yield request.param
    for cache in caches:
        cache.cache_clear()


def supported(dtype):
    try:
        torch.from_dlpack(torch.zeros(64).to(dtype))
        jax.dlpack.from_dlpack(torch.zeros(64).to(dtype))
    except (BufferError, RuntimeError, ValueError, TypeError, KeyError):
        return False
    return True


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + FLOAT8, ids=str)
def test_every_dtype_crosses_both_ways_without_a_copy(dtype, route):
    if dtype in FLOAT8 and not supported(dtype):
        pytest.skip("float8 is not on both sides in these versions")
    tensor = (torch.arange(64) % 3).to(dtype)
    array = bridge.to_jax(tensor)
    back = bridge.to_torch(array)
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_dense_layouts_cross_without_a_copy(layout, route):
    tensor = layout()
    array = bridge.to_jax(tensor)
    assert array.shape == tuple(tensor.shape)
    assert not tensor.numel() or array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), tensor.numpy())
    assert torch.equal(bridge.to_torch(array), tensor)


def test_write_by_torch_shows_in_a_new_import():
    tensor = torch.zeros(64)
    bridge.to_jax(tensor)
    tensor += 1
    assert float(bridge.to_jax(tensor).sum()) == 64.0


def test_array_keeps_the_memory_of_its_tensor_alive():
    array = bridge.to_jax(torch.full((1 << 16,), 7.0))
    torch.zeros(1 << 16)  # would reuse the memory if it were freed
    assert bool((array == 7).all())


def test_64_bit_types_stay_64_bit_while_the_global_flag_is_off():
    assert not jax.config.jax_enable_x64
    assert bridge.to_jax(torch.zeros(8, dtype=torch.float64)).dtype == np.float64
    assert jnp.zeros(8).dtype == np.float32


BAD = {
    "unaligned": (lambda: torch.randn(65)[1:], "not aligned to 64 bytes .*Pass copy=None"),
    "strided": (lambda: torch.randn(8, 8)[:, ::2], r"strides \(8, 2\), which leave gaps .*copy=None"),
    "expanded": (lambda: torch.randn(8, 1).expand(8, 8), r"strides \(1, 0\), which leave gaps or overlap"),
    "conjugate": (lambda: torch.randn(64, dtype=torch.complex64).conj(), "lazy conjugate .*resolve_conj"),
    "negative": (lambda: torch._neg_view(torch.randn(64)), "lazy conjugate or negative"),
}
NEVER = {
    "requires grad": (lambda: torch.randn(64, requires_grad=True), r"requires grad.*tensor.detach\(\)"),
    "sparse": (lambda: torch.eye(8).to_sparse(), r"torch.sparse_coo; expected torch.strided.*to_dense"),
    "meta": (lambda: torch.zeros(8, device="meta"), "meta device and has no memory.*to_empty"),
}


@pytest.mark.parametrize(("make", "text"), BAD.values(), ids=BAD.keys())
def test_memory_that_jax_cannot_alias_raises_or_is_copied_on_request(make, text, route):
    tensor = make()
    with pytest.raises(ValueError, match=text):
        bridge.to_jax(tensor)
    with pytest.raises(ValueError, match=r"'layer\.weight'"):
        bridge.to_jax({"layer": {"weight": tensor}})
    array = bridge.to_jax(tensor, copy=None)
    np.testing.assert_array_equal(np.asarray(array), tensor.resolve_conj().resolve_neg().numpy())


@pytest.mark.parametrize(("make", "text"), NEVER.values(), ids=NEVER.keys())
@pytest.mark.parametrize("copy", [False, None, True])
def test_tensor_without_plain_memory_raises_for_every_copy(make, text, copy):
    with pytest.raises(ValueError, match=text):
        bridge.to_jax(make(), copy=copy)
    with pytest.raises(ValueError, match="tensor 'w'"):
        bridge.to_jax({"w": make()}, copy=copy)


@pytest.mark.parametrize("copy", [True, None])
def test_copy_true_copies_and_copy_none_aliases_if_possible(copy):
    tensor = torch.randn(64)
    shared = bridge.to_jax(tensor, copy=copy).unsafe_buffer_pointer() == tensor.data_ptr()
    assert shared is (copy is None)
    array = jnp.arange(64.0)
    assert (bridge.to_torch(array, copy=copy).data_ptr() == array.unsafe_buffer_pointer()) is (copy is None)


def test_donated_array_raises_and_is_called_donated():
    array = jnp.ones(64)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    with pytest.raises(ValueError, match="donated or deleted"):
        bridge.to_torch(array)


def test_tracer_raises_and_is_named():
    with pytest.raises(ValueError, match=r"array 'x' is a tracer.*outside jit"):
        jax.jit(lambda x: bridge.to_torch({"x": x}))(jnp.ones(3))


def test_missing_device_raises_with_advice():
    if "cuda" in {d.platform for d in jax.devices()}:
        pytest.skip("jax sees a GPU here")
    with pytest.raises(RuntimeError, match=r"jax has no gpu backend.*maskbridge\[cuda13\]"):
        dlpack._jax_device("cuda", 0)


def test_trees_keep_containers_and_other_leaves():
    tree = {"a": [torch.zeros(64), 3], "b": (None, "text")}
    out = bridge.to_jax(tree)
    assert isinstance(out["a"][0], jax.Array)
    assert (out["a"][1], out["b"]) == (3, (None, "text"))
    assert torch.equal(bridge.to_torch(out)["a"][0], tree["a"][0])


def test_call_arguments_alias_their_tensors():
    tensors = [torch.randn(8, 16), torch.randn(64).bfloat16(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    orders = [dlpack.dense_order(t) for t in tensors]
    views = call_arguments.as_call_arguments(tensors, orders)
    for view, tensor, order in zip(views, tensors, orders, strict=True):
        assert view.ctypes.data == tensor.data_ptr()
        assert view.shape == (tensor.numel(),)
        np.testing.assert_array_equal(view.astype(np.float32), tensor.permute(order).float().numpy().reshape(-1))


def test_x64_scope_is_local_to_the_thread():
    seen = []
    with _process.x64():
        thread = threading.Thread(target=lambda: seen.append(jnp.zeros(1).dtype))
        thread.start()
        thread.join()
        seen.append(jnp.zeros(1).dtype)
    assert seen == [np.float32, np.float64]


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_cached_call_arguments_equal_uncached_ones(odd):
    plain, other = torch.randn(7, 5), odd(torch.randn(6, 6))
    for tensors in ([plain], [plain, other], [plain.bfloat16()]):
        found = call_arguments.CpuArguments([t.shape for t in tensors], [t.dtype for t in tensors], [None] * len(tensors))(tensors, [])
        looked_at = call_arguments.as_call_arguments(tensors, [None] * len(tensors))
        assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(found, looked_at, strict=True))
    (flat,) = call_arguments.CpuArguments([(7, 5)], [torch.float32], [None])([plain], [])
    assert flat.ctypes.data == plain.data_ptr()


def test_call_arguments_resolve_lazy_negation(monkeypatch):
    negated = torch._neg_view(torch.ones(3))
    take = call_arguments.CpuArguments([(3,)], [torch.float32], [None])
    assert take([negated], [])[0].tolist() == [-1, -1, -1]
    monkeypatch.setattr(torch.Tensor, "is_neg", lambda _: False)
    assert take([negated], [])[0].tolist() == [1, 1, 1]  # the check can fail
