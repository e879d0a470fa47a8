"""jax_function: counted cost of a call; arguments with a fast signature; residuals that are rematerialized."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge
from bridge._autograd import autograd_functions, fast_signature, jax_function, residuals, traced_function
from bridge._interop import dlpack
from bridge._memory import call_arguments

pytestmark = pytest.mark.quick

OURS = str(Path(bridge.__file__).parent)


def pair(*shape):
    return [torch.randn(shape, requires_grad=True) for _ in range(2)]


def frames(function):
    """Return the name of each call that enters a function of ours."""
    seen = []

    def entered(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        function()
    finally:
        sys.setprofile(before)
    return seen


# ------------------------------------------------------------------ repeated calls


def test_warm_call_enters_few_project_functions_and_no_context(monkeypatch):
    f, (a, b) = bridge.jax_function(lambda a, b: jnp.sin(a) * b), pair(16, 16)
    monkeypatch.setattr(traced_function, "as_call_arguments", None)  # neither the import of torch's nor of jax's is called
    expected = f(a, b), f(a.detach(), b.detach())
    monkeypatch.setattr(traced_function, "enable_x64", None)
    monkeypatch.setattr(jax_function, "scope", None)
    without = ["__call__", "is_transformed", "fast_signature", "call_with_views", "__call__", "_run", "results_as_tensors"]
    assert set(frames(lambda: f(a, b))) - {"<listcomp>"} == {*without, "forward"}
    assert len(frames(lambda: f(a, b))) <= 10
    assert len(frames(lambda: f(a.detach(), b.detach()))) <= 9
    torch.testing.assert_close((f(a, b), f(a.detach(), b.detach())), expected)


def test_small_recorded_call_keeps_no_residuals():
    f, (a, b) = bridge.jax_function(lambda a, b: jnp.sin(a) * b), pair(16, 16)
    f(a, b)
    ((call, recording, _),) = f._by_fast_signature.values()
    assert (call, len(call._is_transferable), recording.split_points, recording.needed_argnums) == (recording.forward, 1, (1, 1), (0, 1))


def test_unusual_call_does_not_match_an_earlier_fast_signature():
    f = bridge.jax_function(lambda x: x * 2)
    x = torch.arange(64.0)
    f(x)
    assert len(f._by_fast_signature) == 1
    others = [
        torch._neg_view(x),
        torch.arange(128.0)[::2],
        torch.arange(8.0)[:, None].expand(8, 8),
        torch.zeros(0),
        torch.arange(64.0).as_subclass(type("Mine", (torch.Tensor,), {})),
        torch.arange(64.0).reshape(8, 8).t(),
        torch.arange(64.0, dtype=torch.float64),
        torch.arange(65.0)[1:],
    ]
    for other in others:
        for _ in range(2):
            torch.testing.assert_close(f(other), torch.Tensor(other.resolve_neg()).to(other.dtype) * 2)
    assert len(f._by_fast_signature) == 3, "transposed and 64-bit arguments also have a fast signature"


def test_equal_static_values_of_other_types_have_separate_programs():
    f, x = bridge.jax_function(lambda x, n: x * 2 if n is True else x * 3 if isinstance(n, int) else x * n), torch.ones(4)
    for _ in range(2):
        assert [f(x, n)[0].item() for n in (True, 1, 1.0, 4.0)] == [2, 3, 1, 4]
    assert f.programs == 3


def test_trees_and_floats_have_fast_signatures():
    f = bridge.jax_function(lambda batch, s, *, mode: {"y": batch["x"] * s + batch["z"][0], "n": batch["x"].sum()})
    x, z = pair(4)
    for s in (2.0, 3.0):
        out = f({"x": x, "z": [z]}, s, mode="a")
        torch.testing.assert_close(out, {"y": x * s + z, "n": x.sum()})
    assert (len(f._by_fast_signature), f.programs) == (1, 1)
    assert "_any" not in frames(lambda: f({"x": x, "z": [z]}, 4.0, mode="a"))


def test_tensors_of_torch_func_use_the_general_path():
    kept = []
    torch.func.grad(lambda x: (kept.append(x), (x * x).sum())[1])(torch.ones(3))
    f = bridge.jax_function(jnp.sin)
    f(torch.ones(3, requires_grad=True))
    torch.testing.assert_close(f(kept[0]).detach(), torch.sin(torch.ones(3)))


def test_freed_storage_has_no_address():
    x = torch.ones(8)
    assert fast_signature.fast_signature([x])[1] == [x]
    assert fast_signature.can_view([x], [(torch.float32, 8)])
    x.untyped_storage().resize_(0)
    assert fast_signature.fast_signature([x]) is None
    assert not fast_signature.can_view([x], [(torch.float32, 8)])


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4),
        torch.ones(8).double(),
        torch.ones(16)[::2],
        torch.ones(8, device="meta"),
        torch._neg_view(torch.ones(8)),
        torch.ones(8).to_sparse(),
        torch.ones(8).as_subclass(type("Mine", (torch.Tensor,), {})),
    ],
    ids=["size", "type", "gaps", "meta", "negative", "sparse", "subclass"],
)
def test_addresses_are_taken_of_ordinary_tensors_only(other):
    good = torch.ones(8)
    assert fast_signature.can_view([good, good], [(torch.float32, 8)] * 2)
    assert not fast_signature.can_view([good, other], [(torch.float32, 8)] * 2)


def test_hook_that_returns_another_size_raises():
    f, (a, b) = bridge.jax_function(lambda a, b: a * b), pair(64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:2].clone()):
        out = f(a, b).sum()
    with pytest.raises(TypeError):
        out.backward()


def test_fast_signatures_are_bounded_and_dropped_with_their_programs(monkeypatch):
    monkeypatch.setattr(jax_function, "_MAX_PROGRAMS", 3)
    f = bridge.jax_function(lambda x, n: x * n)
    for n in range(7):
        f(torch.ones(2), n)
        f(torch.ones(2, requires_grad=True), n)
        assert len(f._by_fast_signature) <= 3
        programs = {id(program) for program, _ in f._by_signature.values()}
        assert all(recording is None or id(recording.program) in programs for _, recording, _ in f._by_fast_signature.values())


def test_public_fallbacks_give_the_same_results(monkeypatch):
    f, (a, b) = bridge.jax_function(lambda a, b: jnp.cumsum(a) * b), pair(64)
    expected = torch.autograd.grad(f(a, b).sum(), (a, b))
    monkeypatch.setattr(jax_function, "record_call", autograd_functions.RecordedCall.apply)
    monkeypatch.setattr(dlpack, "_capsule_calls", lambda: None)
    monkeypatch.setattr(call_arguments, "_capsule_calls", lambda: None)
    monkeypatch.setattr(dlpack, "_exporter", lambda: torch.from_dlpack)
    monkeypatch.setattr(call_arguments, "_exporter", lambda: torch.from_dlpack)
    torch.testing.assert_close(torch.autograd.grad(f(a, b).sum(), (a, b)), expected)
    monkeypatch.setattr(autograd_functions, "functorch_is_active", lambda: True)
    torch.testing.assert_close(torch.autograd.grad(f(a, b).sum(), (a, b)), expected)


# ------------------------------------------------------------------ residuals


def recorded(fn, *args):
    f = bridge.jax_function(fn)
    out = f(*args)
    recording = next(iter(f._by_signature.values()))[0].with_residuals(tuple(range(len(args))))
    return out, recording


ANEW = {
    "sine": (lambda a, b: jnp.sin(a) * b, lambda a, b: torch.sin(a) * b, 0),
    "a chain": (lambda a, b: jnp.tanh(jnp.exp(a) * b), lambda a, b: torch.tanh(torch.exp(a) * b), 0),
    "a call": (lambda a, b: jax.jit(lambda a: jnp.sin(a) * 2)(a) * b, lambda a, b: torch.sin(a) * 2 * b, 0),
    "of a row": (lambda a, b: jnp.sin(a[None, :].T).reshape(-1) * b, lambda a, b: torch.sin(a) * b, 0),
    "a sum": (lambda a, b: jnp.sin(jnp.cumsum(a)) * b, lambda a, b: torch.sin(torch.cumsum(a, 0)) * b, 2),
    "a slow one": (lambda a, b: jax.lax.lgamma(a * a + 1) * b, lambda a, b: torch.lgamma(a * a + 1) * b, 2),
}


@pytest.mark.parametrize("name", ANEW)
def test_few_elementwise_operations_are_rematerialized(name, monkeypatch):
    fn, like, count = ANEW[name]
    a, b = pair(32)
    out, recording = recorded(fn, a, b)
    assert len(recording.transferable) == count
    expected = like(a, b)
    seed = torch.randn(32)
    want = torch.autograd.grad(expected, (a, b), seed)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, (a, b), seed), want, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(residuals, "MAX_REMATERIALIZED", 0)
    again, recording = recorded(fn, a, b)
    assert len(recording.transferable) > 0
    torch.testing.assert_close(torch.autograd.grad(again, (a, b), seed), want, atol=1e-5, rtol=1e-5)


def test_rematerialization_of_large_arguments_is_bounded_in_total():
    def fn(a, b):
        return sum(jnp.sin(a * i) for i in range(1, 21)) * b

    a, b = pair(400)
    out, recording = recorded(fn, a, b)
    made = len(recording._rematerialized)
    assert 0 < made * 400 <= residuals.MAX_REMATERIALIZED
    assert len(recording.transferable) >= 21 - made
    want = sum(torch.sin(a * i) for i in range(1, 21)) * b
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (a, b)), torch.autograd.grad(want.sum(), (a, b)), atol=1e-3, rtol=1e-3)
    assert not recorded(fn, *pair(5000))[1]._rematerialized


def test_rematerialization_gets_all_kinds_of_arguments():
    def fn(a, b, s, values):
        return jnp.sin(a * s) * values + 2 * b

    f, (a, b), values = bridge.jax_function(fn), pair(8), np.arange(8, dtype=np.float32)
    found = torch.autograd.grad(f(a, b, 3.0, values).sum(), (a, b))
    recording = next(iter(f._by_signature.values()))[0].with_residuals((0, 1))
    assert (recording.needed_argnums, recording.transferable) == ((0,), [])
    assert recording._rematerialized
    torch.testing.assert_close(found, (3 * torch.cos(3 * a.detach()) * torch.from_numpy(values), torch.full((8,), 2.0)))
