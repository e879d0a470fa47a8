"""Arguments that are imported once per address, tested on a CPU, where stream order does not matter."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from oracles import movement_error, run_pair

import torch_api
from bridge._compat.torch import storage_use_count
from bridge._interop import dlpack, dtypes
from bridge._ir import jaxpr, queries
from bridge._memory import call_arguments
from bridge._memory.array_interface import ArrayInterface
from bridge._memory.call_arguments import GpuArguments

pytestmark = pytest.mark.unoptimized


@pytest.fixture
def imports(monkeypatch):
    seen = []
    monkeypatch.setattr(call_arguments, "to_jax", lambda x, real=dlpack.to_jax: seen.append(x.data_ptr()) or real(x))
    return seen


def test_address_is_imported_once_and_shows_current_values(imports):
    arguments = GpuArguments([None, None])
    a, b = torch.randn(64), torch.randn(4, 16)
    first = arguments([a, b], [])
    assert [x.unsafe_buffer_pointer() for x in first] == [a.data_ptr(), b.data_ptr()]
    assert [x.shape for x in first] == [(64,), (64,)]
    a.fill_(3)
    second = arguments([a, b], [])
    assert second[0] is first[0]
    assert float(jax.jit(jnp.sum)(second[0])) == 3 * 64
    assert imports == [a.data_ptr(), b.data_ptr()]
    c = torch.ones(64)
    assert arguments([c, b], [])[0].unsafe_buffer_pointer() == c.data_ptr()
    assert arguments([a, b], [])[0] is first[0]
    assert len(imports) == 3


def test_imports_keep_no_tensor_alive():
    arguments, tensor = GpuArguments([None]), torch.randn(1024)
    arguments([tensor], [])
    gc.collect()
    assert storage_use_count(tensor) == 1


def test_number_of_remembered_addresses_is_bounded(imports):
    arguments, tensors = GpuArguments([None]), [torch.zeros(16) for _ in range(call_arguments._MAX_REMEMBERED + 3)]
    for tensor in tensors:
        arguments([tensor], [])
    assert len(arguments._imports[0]) <= call_arguments._MAX_REMEMBERED
    assert len(imports) == len(tensors)


ELEMENTS = torch.arange(24.0)
WAYS = {
    "as it is": lambda x: x.clone(),
    "transposed": lambda x: x.clone().t(),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "not aligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "lazily negated": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "empty": lambda x: x[:0].clone(),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_have_logical_element_order(way):
    for shape in ((4, 6), (6, 4)):
        tensor = WAYS[way](ELEMENTS.view(shape))
        arguments = GpuArguments([None])
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(arguments([tensor], [])[0]), tensor.reshape(-1).numpy(force=True))


def test_other_strides_or_lazy_negation_at_one_address_are_noticed():
    base = torch.randn(4, 4)
    arguments = GpuArguments([None])
    as_it_is, turned = np.asarray(arguments([base], [])[0]).copy(), np.asarray(arguments([base.t()], [])[0]).copy()
    np.testing.assert_array_equal(as_it_is, base.reshape(-1).numpy())
    np.testing.assert_array_equal(turned, base.t().reshape(-1).numpy())
    negated = torch._neg_view(base)
    assert negated.data_ptr() == base.data_ptr()
    np.testing.assert_array_equal(np.asarray(arguments([negated], [])[0]), -base.reshape(-1).numpy())


def test_lazy_conjugate_at_a_known_address_is_noticed():
    base = torch.randn(8, dtype=torch.complex64)
    arguments = GpuArguments([None], are_complex=True)
    arguments([base], [])
    np.testing.assert_array_equal(np.asarray(arguments([base.conj()], [])[0]), base.conj().resolve_conj().numpy())


def test_arguments_have_the_given_dim_order(imports):
    weight = torch.randn(2, 4, 2, 2).to(memory_format=torch.channels_last)
    arguments = GpuArguments([(0, 2, 3, 1)])
    for tensor in (weight, weight.contiguous(), weight):
        np.testing.assert_array_equal(np.asarray(arguments([tensor], [])[0]), weight.permute(0, 2, 3, 1).reshape(-1).numpy())
    assert imports == [weight.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool, torch.int32], ids=str)
def test_array_interface_becomes_a_storage_of_its_own_bytes(dtype):
    whole_ = torch.arange(64).to(dtype)
    window = ArrayInterface(whole_, whole_.data_ptr() + 16 * dtype.itemsize, (3,), dtypes.numpy_dtype(dtype), whole_.device)
    view = window.as_tensor()
    assert view.dtype is dtype
    assert view.untyped_storage().nbytes() == 3 * dtype.itemsize
    assert torch.equal(view.view(torch.uint8), whole_[16:19].contiguous().view(torch.uint8))
    address = whole_.data_ptr()
    del whole_, window
    gc.collect()
    assert view.data_ptr() == address + 16 * dtype.itemsize  # the owner of the bytes is still alive
    view.clone()


# ---------------------------------------------------------------------- calls that jax 0.11 leaves in a trace


def bias_corrected(updates, count):
    return jax.tree.map(lambda g: g / (1 - 0.9**count), updates)


def with_jitted_call(wrap):
    """A transformation that calls one jitted function of all leaves, as optax's bias correction does."""

    def update(updates, state, params=None):
        jax.jit(lambda x: ())(state)  # this call has no results
        return jax.tree.map(lambda g: -0.1 * g, wrap(bias_corrected)(updates, (state + 1).astype(jnp.float32))), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("late", [True, False])
def test_inlinable_call_with_all_leaves_does_not_join_them(late, monkeypatch):
    if late:
        for module in (queries, jaxpr):
            monkeypatch.setattr(module, "must_inline", lambda eqn: eqn.primitive.name in ("jit", "pjit"))
    params = [torch.nn.Parameter(torch.randn(n)) for n in (5, 7, 7)]
    start = [p.detach().clone() for p in params]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, other = (torch_api.OptaxOptimizer(ps, with_jitted_call(wrap)) for ps, wrap in ((params, jax.jit), (twins, lambda f: f)))
    run_pair(optimizer, params, other, twins, 20)
    assert max(map(movement_error, params, twins, start)) < 1e-6
    assert (optimizer._hyperparam_table.transforms[0].joint_set is None) is late
