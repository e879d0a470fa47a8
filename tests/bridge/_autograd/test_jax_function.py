"""jax_function: values and gradients match torch's; differentiability; signatures."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import bridge

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]


class Counted:
    """A function that counts its traces."""

    def __init__(self, fn):
        self.fn, self.traces = fn, 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.fn(*args, **kwargs)


def tensor(*shape, dtype=torch.float64, grad=True):
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


# (JAX, torch, arguments); all functions are smooth at these arguments.
PAIRS = {
    "elementwise": (lambda a, b: jnp.sin(a) * b, lambda a, b: torch.sin(a) * b, lambda: (tensor(4, 3), tensor(4, 3))),
    "broadcast": (lambda a, b: a / (2 + jnp.cos(b)), lambda a, b: a / (2 + torch.cos(b)), lambda: (tensor(4, 3), tensor(3))),
    "matmul": (lambda a, b: jnp.tanh(a @ b), lambda a, b: torch.tanh(a @ b), lambda: (tensor(4, 3), tensor(3, 2))),
    "linear": (lambda a, b: 2 * a - b, lambda a, b: 2 * a - b, lambda: (tensor(3), tensor(3))),
    "one is not used": (lambda a, b: jnp.exp(a), lambda a, b: torch.exp(a) + 0 * b, lambda: (tensor(3), tensor(3))),
    "0-d": (lambda a, b: a * a * b, lambda a, b: a * a * b, lambda: (tensor(), tensor())),
    "transposed": (lambda a, b: a**3 * b, lambda a, b: a**3 * b, lambda: (tensor(4, 3), torch.randn(3, 4).double().t().requires_grad_())),
    "several outputs": (lambda a, b: (jnp.tanh(a), a @ b), lambda a, b: (torch.tanh(a), a @ b), lambda: (tensor(3, 3), tensor(3, 2))),
    "softmax": (
        lambda a, b: jax.nn.log_softmax(a, 1) * b,
        lambda a, b: F.log_softmax(a, 1) * b,
        lambda: (tensor(4, 3), tensor(4, 3)),
    ),
    "scan": (
        lambda a, b: jax.lax.scan(lambda c, x: (jnp.tanh(c + x), c * b), a[0], a)[1],
        lambda a, b: torch.stack(functools.reduce(lambda s, x: (torch.tanh(s[0] + x), [*s[1], s[0] * b]), a, (a[0], []))[1]),
        lambda: (tensor(4, 3), tensor(3)),
    ),
    "complex": (
        lambda a, b: jnp.exp(a) * jnp.conj(b) + a * b,
        lambda a, b: torch.exp(a) * b.conj() + a * b,
        lambda: (tensor(3, dtype=torch.complex128), tensor(3, dtype=torch.complex128)),
    ),
    "complex to real": (
        lambda a, b: jnp.abs(a) ** 2 * b,
        lambda a, b: torch.abs(a) ** 2 * b,
        lambda: (tensor(3, dtype=torch.complex128), tensor(3)),
    ),
}


def flat(outs):
    return outs if isinstance(outs, tuple) else (outs,)


def assert_as_torch(jax_fn, torch_fn, args):
    """Compare values, gradients and second derivatives with torch's."""
    ours, theirs = flat(bridge.jax_function(jax_fn)(*args)), flat(torch_fn(*args))
    seeds = [torch.randn_like(x) for x in theirs]
    torch.testing.assert_close(ours, theirs)
    first = [
        torch.autograd.grad(outs, args, seeds, create_graph=True, allow_unused=True, materialize_grads=True) for outs in (ours, theirs)
    ]
    torch.testing.assert_close(*first)
    # Without create_graph, another program computes the gradients from residuals.
    torch.testing.assert_close(torch.autograd.grad(ours, args, seeds, retain_graph=True), first[1])
    if not any(grad.requires_grad for grad in first[1]):
        return
    again = [torch.randn_like(x) for x in args]
    pairs = [[(g, s) for g, s in zip(grads, again, strict=True) if g.requires_grad] for grads in first]
    second = [torch.autograd.grad([g for g, _ in p], args, [s for _, s in p], allow_unused=True, materialize_grads=True) for p in pairs]
    torch.testing.assert_close(*second)


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_derivatives_match_torch(name):
    jax_fn, torch_fn, make = PAIRS[name]
    assert_as_torch(jax_fn, torch_fn, make())


@pytest.mark.parametrize(
    "broken",
    [
        lambda a, b: jnp.cos(a) * b,
        lambda a, b: jax.lax.stop_gradient(jnp.sin(a)) * b,
        lambda a, b: jnp.sin(a) * b + (jnp.cos(a) - jax.lax.stop_gradient(jnp.cos(a))) * 1e-3,
    ],
    ids=["value", "no gradient", "a little gradient"],
)
def test_comparison_detects_wrong_values_and_gradients(broken):
    _, torch_fn, make = PAIRS["elementwise"]
    with pytest.raises(AssertionError):
        assert_as_torch(broken, torch_fn, make())


def test_comparison_detects_a_wrong_second_derivative():
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda x, t: (sine(*x), jax.lax.stop_gradient(jnp.cos(*x)) * t[0]))
    _, torch_fn, make = PAIRS["elementwise"]
    with pytest.raises(AssertionError):
        assert_as_torch(lambda a, b: sine(a) * b, torch_fn, make())


@pytest.mark.parametrize("name", PAIRS)
def test_gradcheck_passes_in_both_modes_and_to_second_order(name):
    jax_fn, _, make = PAIRS[name]
    f, args = bridge.jax_function(jax_fn), make()
    assert gradcheck(f, args, check_forward_ad=True)
    assert gradgradcheck(f, args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
def test_dtypes_are_kept(dtype):
    x = tensor(8, dtype=dtype)
    y = bridge.jax_function(lambda x: x * x)(x)
    y.backward(torch.ones_like(y))
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    torch.testing.assert_close(y, x * x)
    torch.testing.assert_close(x.grad, (2 * x.detach()).conj().resolve_conj())
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_and_booleans_are_passed_without_gradient(dtype):
    n, x = torch.tensor([0, 1, 1]).to(dtype), tensor(3)
    m, y = bridge.jax_function(lambda n, x: (n, jnp.where(n.astype(bool), x, 0)))(n, x)
    assert torch.equal(m, n)
    assert (m.dtype, m.requires_grad, y.requires_grad) == (dtype, False, True)
    y.sum().backward()
    assert x.grad.tolist() == [0, 1, 1]


def test_integers_of_64_bits_keep_their_values():
    n = torch.tensor([2**40, -(2**40)])
    assert torch.equal(bridge.jax_function(lambda n: n + 1)(n), n + 1)


def test_arguments_may_be_trees_static_values_none_and_keywords():
    def fn(batch, scale, *, mode, power=2, extra=None):
        assert extra is None
        assert mode == "plain"
        return {"y": [batch["x"] ** power * scale, None], "count": len(batch), "constant": 1.5}

    out = bridge.jax_function(fn)({"x": torch.tensor([1.0, 2.0]), "none": None}, 2.0, mode="plain", power=3)
    assert out["y"][0].tolist() == [2, 16]
    assert out["y"][1] is None
    assert (out["count"].item(), out["constant"].item()) == (2, 1.5)


def test_arguments_may_be_jax_and_numpy_arrays_keys_and_numbers():
    def fn(key, x, noise, array, values):
        return x + noise * jax.random.normal(key, x.shape) + array + values, jax.random.split(key, 2), key

    f, key = bridge.jax_function(fn), jax.random.key(3)
    x, array, values = tensor(4, dtype=torch.float32), jnp.arange(4.0), np.ones(4, np.float32)
    y, keys, same = f(key, x, 0.5, array, values)
    np.testing.assert_allclose(y.detach().numpy(), fn(key, x.detach().numpy(), 0.5, array, values)[0], rtol=1e-6)
    assert jax.random.key_data(keys).tolist() == jax.random.key_data(jax.random.split(key, 2)).tolist()
    assert jax.random.key_data(same).tolist() == jax.random.key_data(key).tolist()
    values += 1  # later calls must not see this write
    y.sum().backward()
    assert x.grad.tolist() == [1] * 4


def test_residual_without_a_torch_dtype_stays_in_jax():
    def fn(key, x):
        mine = jax.random.fold_in(key, 1)
        return jax.checkpoint(lambda x: jnp.sin(x) * jax.random.normal(mine, x.shape))(x)

    x, key = tensor(5, dtype=torch.float32), jax.random.key(0)
    bridge.jax_function(fn)(key, x).sum().backward()
    expected = jax.grad(lambda x: fn(key, x).sum())(jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-6)


def test_numpy_array_may_change_between_forward_and_backward():
    x, values = tensor(3, dtype=torch.float32), np.full(3, 2, np.float32)
    y = bridge.jax_function(lambda x, v: x * v)(x, values)
    values[:] = 7
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_tensor_given_twice_gets_both_gradients():
    x = tensor(3)
    bridge.jax_function(lambda a, b: a * b)(x, x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_only_tensors_that_require_grad_get_gradients():
    a, b = tensor(3), tensor(3, grad=False)
    first, second = bridge.jax_function(lambda a, b: (a * b, jnp.sin(a) * b))(a, b)
    first.sum().backward(retain_graph=True)
    torch.testing.assert_close(a.grad, b)
    assert b.grad is None
    second.sum().backward()
    torch.testing.assert_close(a.grad, b + torch.cos(a.detach()) * b)


# ------------------------------------------------------------------ torch.func and modes


def loss(module, x, w):
    return module.sum(module.tanh(x * w) ** 2)


def test_torch_func_transforms_match_torch():
    ours, theirs = bridge.jax_function(functools.partial(loss, jnp)), functools.partial(loss, torch)
    wrong = bridge.jax_function(lambda x, w: loss(jnp, x, w) * 1.01)
    x, w, v = torch.randn(5, 3), torch.randn(3), torch.randn(3)
    for transform in (
        lambda f: torch.func.grad(f, argnums=(0, 1))(x[0], w),
        lambda f: torch.func.grad_and_value(f)(x, w),
        lambda f: torch.func.vjp(f, x, w)[1](torch.tensor(2.0)),
        lambda f: torch.func.jvp(lambda w: f(x, w), (w,), (v,)),
        lambda f: torch.func.vmap(f, (0, None))(x, w),
        lambda f: torch.func.vmap(f, (1, 0))(x, w),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=1), (0, None))(x, w),
        lambda f: torch.func.vmap(torch.func.vmap(f, (0, None)), (1, 0))(x.reshape(5, 3, 1), w.reshape(3, 1)),
        lambda f: torch.func.jacrev(torch.func.grad(f))(x[0], w),
        lambda f: torch.func.hessian(f, argnums=1)(x, w),
        lambda f: torch.func.jacfwd(torch.func.jacfwd(f))(x[0], w),
        lambda f: torch.func.grad(lambda w: torch.func.vmap(f, (0, None))(x, w).sum())(w),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))
        with pytest.raises(AssertionError):
            torch.testing.assert_close(transform(wrong), transform(theirs))


def test_forward_mode_works_outside_torch_func():
    x, t = torch.randn(3), torch.randn(3)
    with torch.autograd.forward_ad.dual_level():
        out = bridge.jax_function(jnp.sin)(torch.autograd.forward_ad.make_dual(x, t))
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, torch.cos(x) * t)


def test_vmap_works_with_integers_and_several_outputs():
    out, count = torch.func.vmap(bridge.jax_function(lambda x, i: (x[i], i + 1)))(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    assert out.shape == (4,)
    assert count.tolist() == [1, 2, 3, 1]


def test_custom_gradients_of_jax_are_used():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    x = tensor(3)
    (bridge.jax_function(clipped)(x) * 5).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_saved_tensor_hooks_get_the_residuals():
    f, x = bridge.jax_function(lambda x: jnp.tanh(jnp.sin(x) * 2)), tensor(5000)
    expected = torch.autograd.grad(torch.tanh(torch.sin(x) * 2).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(checkpoint(f, x, use_reentrant=False).sum(), x)[0], expected)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.clone()) or len(packed) - 1, lambda i: packed[i]):
        out = f(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)
    assert len(packed) >= 2


def test_autocast_does_not_change_the_dtypes():
    x = tensor(4, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        y = bridge.jax_function(lambda x: x @ x)(x)
        half = bridge.jax_function(lambda x: x * 2)(x @ x)
    assert (y.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    y.sum().backward()
    assert x.grad.dtype is torch.float32


def test_no_residuals_are_kept_without_grad_mode():
    x, f = tensor(3), bridge.jax_function(jnp.sin)
    with torch.no_grad():
        assert not f(x).requires_grad
    with torch.inference_mode():
        out = f(x)
    assert out.is_inference()
    torch.testing.assert_close(out.clone(), torch.sin(x.detach()))
    program = next(iter(f._by_signature.values()))[0]
    assert list(program._cache) == ["run"], "a program with residuals was compiled"


# ------------------------------------------------------------------ signatures


@pytest.mark.filterwarnings("ignore::torch_api.CompilationWarning")
def test_each_signature_is_traced_once():
    fn = Counted(lambda x, scale=1.0, flag=True, name="a": jnp.sin(x) * scale)
    f, x = bridge.jax_function(fn), tensor(3, dtype=torch.float32)
    for scale in (1.0, 2.0, 3.5):
        f(x, scale).sum().backward()
        f(x.detach(), scale)
        torch.autograd.grad(torch.autograd.grad(f(x, scale).sum(), x, create_graph=True)[0].sum(), x)
    assert (fn.traces, f.programs) == (1, 1)
    for arguments in (
        (torch.randn(4),),
        (torch.randn(3).double(),),
        (torch.randn(3, 2).t(),),
        (torch.randn(2, 3),),
        (x, 1.0, False),
        (x, 1.0, 1),
        (x, 1.0, True, "b"),
        (x, torch.tensor(1.0)),
        (x, np.float32(2)),
    ):
        before = fn.traces
        f(*arguments)
        f(*arguments)
        assert fn.traces == before + 1
    with jax.default_matmul_precision("float32"):
        f(x, 1.0)
    assert fn.traces == 11


def test_x64_decides_about_64_bit_types():
    def fn(x, labels):
        return -jnp.sum(jax.nn.one_hot(labels, 3) * jax.nn.log_softmax(x), axis=1)

    x, labels = tensor(4, 3, dtype=torch.float32), torch.tensor([0, 1, 2, 0])
    with jax.numpy_dtype_promotion("standard"):
        assert bridge.jax_function(fn)(x, labels).dtype is torch.float64
        out = bridge.jax_function(fn, x64=False)(x, labels)
        assert bridge.jax_function(lambda x: jnp.ones(3), x64=True)(x).dtype is torch.float64
    torch.testing.assert_close(out, F.cross_entropy(x, labels, reduction="none"))
    wide = tensor(3)
    narrow = bridge.jax_function(jnp.sin, x64=False)(wide)
    narrow.sum().backward()
    assert (narrow.dtype, wide.grad.dtype) == (torch.float32, torch.float64)


def test_number_of_programs_is_bounded(monkeypatch):
    monkeypatch.setattr(bridge._autograd.jax_function, "_MAX_PROGRAMS", 3)
    fn = Counted(lambda x, n: x * n)
    f = bridge.jax_function(fn)
    for n in range(5):
        f(torch.ones(2), n)
    assert (f.programs, fn.traces) == (3, 5)
    f(torch.ones(2), 4)
    assert fn.traces == 5


def test_function_that_raises_leaves_no_program():
    fail = True

    def fn(x):
        if fail:
            raise KeyError("mine")
        return x

    f = bridge.jax_function(fn)
    with pytest.raises(KeyError, match="mine"):
        f(torch.ones(2))
    assert f.programs == 0
    fail = False
    assert torch.equal(f(torch.ones(2)), torch.ones(2))


def cube(x):
    """x to the third."""
    return x**3


@pytest.mark.parametrize(
    "duplicate", [lambda f: pickle.loads(pickle.dumps(f)), copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"]
)
def test_jax_function_can_be_pickled_and_copied(duplicate):
    f = bridge.jax_function(cube, x64=False)
    f(torch.ones(2))
    other = duplicate(f)
    assert (other.programs, other.__name__, other.__doc__, other.__wrapped__) == (0, "cube", "x to the third.", cube)
    out = other(torch.full((2,), 2.0, dtype=torch.float64))
    assert (out.tolist(), out.dtype) == ([8, 8], torch.float32)
    assert repr(other) == "<jax_function(cube): 1 programs>"


def test_gradient_of_an_integer_raises():
    n, x = torch.tensor([1, 2]), tensor(2)
    f = bridge.jax_function(lambda n, x: n.astype(x.dtype) * x)
    with pytest.raises(RuntimeError, match="not require grad"):
        torch.autograd.grad(f(n, x).sum(), n)
    with pytest.raises(RuntimeError, match="floating point"):
        torch.func.grad(lambda n: f(n, x).sum())(n)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: (torch.ones(3), np.arange(3, dtype="f")),
        lambda: (np.ones(3, "f"), np.arange(3, dtype="f")),
        lambda: (2.0, 3.0),
        lambda: (torch.ones(3, requires_grad=True), jnp.arange(3.0)),
    ],
    ids=["tensor and numpy", "numpy", "floats", "tensor and jax"],
)
def test_first_call_may_happen_inside_a_jax_trace(arguments):
    given = arguments()

    def within(x):
        return x + bridge.to_jax(bridge.jax_function(lambda a, b: a * b + 1)(*given).detach())

    want = np.ones(3) + np.asarray(given[0].detach() if isinstance(given[0], torch.Tensor) else given[0]) * np.asarray(given[1]) + 1
    np.testing.assert_array_equal(jax.jit(within)(jnp.ones(3)), want)
