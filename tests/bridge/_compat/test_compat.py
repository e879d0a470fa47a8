"""Private names of other packages equal their public fallbacks, and the whole library works without any private name."""

import importlib.util
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch2jax as package
from torch.nn.modules.module import register_module_forward_pre_hook

from bridge._compat import jax as of_jax
from bridge._compat import lookup, python, torch2jax
from bridge._compat import torch as of_torch
from bridge._interop import dlpack
from bridge._memory import adoption, ownership
from bridge._tracing.op_registry import functions_named
from bridge._xla import streams

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]
NEWEST = torch.__version__ >= (2, 13) and jax.__version_info__ >= (0, 10, 2)
PAGE = (ROOT / "docs" / "internals" / "upstream.md").read_text()
TABLE = PAGE.partition("## What breaks without a name")[2].partition("## What to ask for upstream")[0]
ROWS = [list(map(str.strip, line.split("|")[1:-1])) for line in TABLE.splitlines() if line.startswith("| `")]


def without_names(module):
    """Return a copy of a module of `_compat` that finds no private name."""
    copy = importlib.util.module_from_spec(module.__spec__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "private", lambda path, otherwise, needed=False: otherwise)
        module.__spec__.loader.exec_module(copy)
    return copy


BARE_JAX, BARE_TORCH = without_names(of_jax), without_names(of_torch)
on_torch = pytest.mark.parametrize("names", [of_torch, BARE_TORCH], ids=["private", "stand-in"])
on_jax = pytest.mark.parametrize("names", [of_jax, BARE_JAX], ids=["private", "stand-in"])


@pytest.mark.skipif(not NEWEST, reason="older releases lack some of them")
def test_this_release_has_each_name():
    missing = object()
    of_torch.step_observers(), of_jax.has_per_program_flag()
    assert len(lookup.NAMES) > 35
    assert [path for path in sorted(lookup.NAMES) if lookup.private(path, missing) is missing] == []


def test_page_about_upstream_has_a_full_row_for_each_name():
    of_torch.step_observers(), of_jax.has_per_program_flag()
    listed = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}
    assert sorted(lookup.NAMES - listed) == []
    assert [row for row in ROWS if len(row) != 5 or not all(row)] == []


def test_page_about_upstream_names_files_and_tests_that_exist():
    named = {(file, test) for row in ROWS for file, test in re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", row[4])}
    assert len(named) > 40
    for file, test in sorted(named):
        texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {test}(" in text if test else text for text in texts), (file, test)
    files = {file for row in ROWS for file in re.findall(r"`((?:bridge|torch_api)/[\w/]+\.py)`", row[1])}
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_fallback_is_used_for_missing_names_and_packages():
    assert [lookup.private(path, 7) for path in ("torch._C._no_such", "torch._no.such", "no_such_package._x")] == [7, 7, 7]
    lookup.NAMES.difference_update({"torch._C._no_such", "torch._no.such", "no_such_package._x"})


def test_safe_mode_uses_only_names_that_are_needed(monkeypatch):
    assert lookup.private("torch._foreach_copy_", None) is torch._foreach_copy_
    monkeypatch.setattr(lookup, "SAFE_MODE", True)
    assert lookup.private("torch._foreach_copy_", None) is None
    assert lookup.private("torch._foreach_copy_", None, needed=True) is torch._foreach_copy_


def test_deprecated_name_is_found_without_a_warning(monkeypatch):
    class Package(types.ModuleType):
        def __getattr__(self, name):
            warnings.warn(f"{name} is deprecated", DeprecationWarning, stacklevel=2)
            return 3

    monkeypatch.setitem(sys.modules, "ages", Package("ages"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lookup.private("ages.old", 7) == 3
        with pytest.raises(DeprecationWarning, match="old is deprecated"):
            sys.modules["ages"].old  # noqa: B018 - reading it warns
    lookup.NAMES.discard("ages.old")


# ------------------------------------------------------------------ torch


@on_torch
def test_many_tensors_are_copied(names):
    into, values = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)], [torch.arange(3.0), torch.ones(2, 2)]
    names.foreach_copy_(into, values)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(into, values, strict=True))
    with pytest.raises((RuntimeError, ValueError)):
        names.foreach_copy_(into, values[:1])


@on_torch
def test_capsule_becomes_a_tensor_over_the_same_memory(names):
    tensor = torch.arange(6.0)
    assert names.tensor_from_capsule(torch.utils.dlpack.to_dlpack(tensor)).data_ptr() == tensor.data_ptr()


@on_torch
def test_allocations_are_compared_under_lazy_clones(names, monkeypatch):
    monkeypatch.setattr(ownership, "lazy_clone", names.lazy_clone)
    assert ownership._is_allocation(torch.ones(4)) is (names is of_torch)


@on_torch
def test_number_of_holders_is_never_underestimated(names):
    known, tensor = names is of_torch, torch.ones(4)
    assert (names.is_view(tensor), names.storage_use_count(tensor)) == ((False, 1) if known else (True, 0))
    view = tensor.view(2, 2)
    assert (names.is_view(view), names.storage_use_count(view)) == ((True, 2) if known else (True, 0))
    assert not names.is_only_view(view)
    alone = names.is_only_view(torch.ones(4).view(2, 2))  # outside of the assertion, where pytest would hold the base
    assert alone is known


def test_memory_is_not_adopted_if_torch_hides_its_holders(monkeypatch):
    assert adoption.why_not_adoptable(torch.ones(4)) == ""
    monkeypatch.setattr(adoption, "storage_use_count", BARE_TORCH.storage_use_count)
    assert adoption.why_not_adoptable(torch.ones(4)) == adoption.SHARED
    monkeypatch.setattr(adoption, "is_view", BARE_TORCH.is_view)
    assert adoption.why_not_adoptable(torch.ones(4)) == "a view of another tensor"


@on_torch
def test_guard_rejects_other_metadata(names):
    made = names.make_guard([torch.zeros(2, 3)])
    assert (made is not None) is (names is of_torch)
    assert made is None or (made(torch.ones(2, 3)), made(torch.ones(3, 2))) == (True, False)


def test_guards_with_wrong_answers_are_not_used(monkeypatch):
    class AlwaysTrue:
        def __init__(self, *tensors, **sizes):
            pass

        def check(self, *tensors):
            return True

    monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", AlwaysTrue)
    assert of_torch._find_guard() is of_torch.no_guard


@on_torch
def test_write_changes_the_version(names):
    tensor = torch.zeros(2)
    before = names.version(tensor)
    assert (names.version(tensor) == before) is (names is of_torch)
    tensor.add_(1)
    assert names.version(tensor) != before


@on_torch
def test_step_has_no_listeners_only_if_torch_says_so(names):
    before, after, somewhere, here = names.step_observers()
    assert (before, after) == ({}, {})
    assert (somewhere(), here()) == ((False, False) if names is of_torch else (True, False))
    with torch.autograd.profiler.profile():
        assert somewhere()


def test_schedulers_see_that_a_step_was_taken():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    vars(optimizer)[of_torch.OPT_CALLED] = True
    scheduler.step()  # it would warn if it had not seen the step
    assert of_torch.OPT_CALLED == "_opt_called"


def test_public_compiler_disable_is_the_fallback():
    assert BARE_TORCH.disable_dynamo is torch.compiler.disable
    assert of_torch.disable_dynamo(len).__wrapped__ is len


@on_torch
def test_torch_func_transforms_are_noticed(names):
    seen = []
    torch.func.vmap(lambda x: seen.append(names.functorch_is_active()) or x)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        seen.append(names.forward_level() >= 0)
    assert seen == [True, True]
    assert names.functorch_is_active() is (names is BARE_TORCH)
    assert names.forward_level() == -1
    assert not names.is_legacy_batch(torch.ones(2))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@on_torch
def test_fast_apply_equals_function_apply(names, monkeypatch):
    x = torch.ones(2, requires_grad=True)
    names.unchecked_apply(Double)(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert issubclass(Double, names.FUNCTION_BASE)
    assert names.FUNCTION_BASE is not torch.autograd.Function or names is BARE_TORCH or names.APPLY_IS_C

    class Alone:
        pass

    class Own(Alone):
        apply = staticmethod(abs)

    monkeypatch.setattr(torch.autograd, "Function", Alone)
    assert names.unchecked_apply(Own) is abs


@on_torch
def test_overridden_functions_run_again_only_where_torch_can(names):
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "asked"

    mine = torch.ones(2).as_subclass(Mine)
    with torch.DisableTorchFunction(), names.with_overrides():
        assert (type(torch.abs(mine)) is str) is (names is of_torch)


@on_torch
def test_tensor_becomes_one_of_a_subclass(names):
    class Mine(torch.Tensor):
        pass

    made = names.make_subclass(Mine, torch.empty(2, 3, dtype=torch.int8, device="meta"))
    assert (type(made), made.shape, made.dtype, made.is_meta) == (Mine, (2, 3), torch.int8, True)


@on_torch
def test_module_hooks_and_classes_are_found(names):
    handle = register_module_forward_pre_hook(lambda *_: None)
    assert len(names.global_forward_pre_hooks) == (names is of_torch)
    handle.remove()
    nn = torch.nn
    batch, others = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm], [nn.InstanceNorm1d, nn.InstanceNorm3d]
    convolutions = [nn.Conv1d, nn.Conv2d, nn.ConvTranspose3d]
    assert [issubclass(kind, names.BATCH_NORMS) for kind in batch + others] == [True] * 4 + [False] * 2
    assert [issubclass(kind, names.NORMS) for kind in batch + others + convolutions] == [True] * 6 + [False] * 3
    assert [issubclass(kind, names.CONVOLUTIONS) for kind in (*convolutions, nn.Linear)] == [True] * 3 + [False]


@pytest.mark.parametrize("space", of_torch.PRIVATE_NAMESPACES)
def test_builtin_functions_equal_the_public_ones(space):
    public = vars(BARE_TORCH.PRIVATE_NAMESPACES[space])
    same = [name for name, function in public.items() if getattr(of_torch.PRIVATE_NAMESPACES[space], name, None) is function]
    assert len(same) > 10
    for name in same[:5]:
        assert public[name] in functions_named(name)


def test_builtin_stft_equals_the_public_one():
    x = torch.randn(64)
    below = of_torch.unpadded_stft(x, 16, 8, 16, torch.ones(16), False, True, True)
    torch.testing.assert_close(below, torch.stft(x, 16, 8, 16, torch.ones(16), center=False, onesided=True, return_complex=True))
    assert BARE_TORCH.unpadded_stft is None


@on_torch
def test_dirichlet_sample_is_drawn(names):
    drawn = names.sample_dirichlet(torch.tensor([[4000.0, 12000.0]] * 3))
    torch.testing.assert_close(drawn.sum(-1), torch.ones(3))
    torch.testing.assert_close(drawn, torch.tensor([[0.25, 0.75]] * 3), atol=0.05, rtol=0)


def test_in_place_operators_are_known():
    assert isinstance(torch.ops.aten.add, of_torch.OVERLOAD_PACKET)
    found = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.add.out, object()
    assert list(map(of_torch.mutates_arguments, found)) == [False, True, True, True]


# ------------------------------------------------------------------ jax


@on_jax
def test_whether_jax_has_started_is_known(names):
    jax.devices()
    assert names.client_started() is (names is of_jax)


@on_jax
def test_program_options_are_set_only_within_the_context(names):
    from jax._src import compiler

    with names.extra_option("a"):
        assert (names._thread_option.option == "a") is names.has_per_program_flag()
        inside = compiler.get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString()
    outside = compiler.get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString()
    assert (inside == outside) is not names.has_per_program_flag()
    assert not BARE_JAX.has_per_program_flag()


@on_jax
def test_arrays_convert_to_and_from_capsules(names, monkeypatch):
    monkeypatch.setattr(dlpack, "array_from_capsule", names.array_from_capsule)
    monkeypatch.setattr(dlpack, "capsule_from_array", names.capsule_from_array)
    dlpack._capsule_calls.cache_clear()
    try:
        importer, calls = dlpack._raw_importer("cpu"), dlpack._capsule_calls()
    finally:
        dlpack._capsule_calls.cache_clear()
    assert (calls is None) is (names is BARE_JAX)
    assert (importer is None) is (names is BARE_JAX) or not NEWEST  # jaxlib 0.8 has other arguments
    tensor = torch.arange(64.0)
    array = (importer or dlpack._public_import)(tensor, dlpack.cpu_device())
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()


@on_jax
def test_numpy_views_an_array_on_the_cpu(names):
    array = jnp.arange(64, dtype=jnp.bfloat16)
    found = names.uncached_numpy(array)
    found = found[0] if isinstance(found, tuple) else found
    assert np.asarray(found).ctypes.data == array.unsafe_buffer_pointer()


@on_jax
def test_streams_are_used_only_if_they_can_be_read_and_set(names):
    assert BARE_JAX.stream_calls is None
    assert streams._stream_calls is of_jax.stream_calls
    if names.stream_calls is not None:
        read, choose = names.stream_calls
        before = read()
        choose(before + 5)
        found = read()
        choose(before)
        assert (found, read()) == (before + 5, before)


def _deprecated(_):
    warnings.warn("deprecated", DeprecationWarning, stacklevel=2)


def _removed(_):
    raise RuntimeError("removed")


def _with_name(stream, *, name):
    pass


def _refused(_):
    raise ValueError("no such stream")


@pytest.mark.parametrize("choose", [_deprecated, _removed, _with_name, _refused, lambda _: None, None])
def test_streams_are_not_used_if_they_cannot_be_set(choose, monkeypatch):
    monkeypatch.setattr("jaxlib._jax.set_execution_stream_id", choose, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_jax._find_stream_calls() is None


@on_jax
def test_programs_from_the_persistent_cache_are_counted(names):
    before = names.cache_hits()
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    jax.monitoring.record_event("/jax/compilation_cache/cache_misses")
    assert names.cache_hits() == before + 1


@on_jax
def test_tracer_of_an_inner_trace_is_recognized(names):
    state, found = names.trace_state(), []
    jax.jit(lambda x: found.append((names.is_from_inner_trace(x, state), names.is_from_inner_trace(x, names.trace_state()))) or x)(1.0)
    assert found == [(names is of_jax, False)]


# ------------------------------------------------------------------ torch2jax and functions


def test_error_names_what_torch2jax_lacks(monkeypatch):
    torch2jax.torch2jax.cache_clear()
    monkeypatch.delattr(package, "RngPooperContext")
    with pytest.raises(ImportError, match=r"has no RngPooperContext, by which .* 0\.1 has it\. Install it"):
        torch2jax.torchish_class()
    monkeypatch.undo()
    assert torch2jax.torchish_class() is package.Torchish


def test_draws_of_torch2jax_use_our_keys():
    class Keys:
        def poop(self):
            return "key"

    with torch2jax.rng_keys_from(Keys()):
        assert package.mk_rng() == "key"


def test_function_can_be_copied_with_other_variables():
    def f(x=1):
        return x + TERM

    made = python.with_code_of(f, {"TERM": 5}, (2,), f.__closure__)
    assert (made(), made.__name__, python.code_of(made) is python.code_of(f)) == (7, "f", True)
    assert python.code_of(len) is None


TERM = 0

# ------------------------------------------------------------------ the whole library

WITHOUT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bridge._compat.lookup", sys.argv[1])
sys.modules["bridge._compat.lookup"] = lookup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lookup)
lookup.private = lambda path, otherwise, needed=False: otherwise

import jax, numpy, torch, bridge, torch_api
from torch import nn

def trained(make):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = make(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.arange(6.0).view(2, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer

net, optimizer = trained(lambda p: torch_api.MaskedAdamW(p, lr=0.1))
twin, _ = trained(lambda p: torch.optim.AdamW(p, lr=0.1))
for p, q in zip(net.parameters(), twin.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.shift = torch.ones(2)
        self.norm = nn.BatchNorm1d(2, momentum=None)
    def forward(self, x):
        mixed = torch.distributions.Dirichlet(self.scale.exp()).rsample()
        unused = self.norm(x.expand(2, 2)).sum() + torch.nn.functional.pad(mixed, (0, 0)).sum()
        return Double.apply(x * self.scale) + self.shift + 0 * unused

f = bridge.module_function(Net())
value, grad = jax.value_and_grad(lambda p: f(p, jax.numpy.ones(2), rng=jax.random.key(0)).sum())(bridge.module_tree(Net()))
assert abs(value - 8) < 1e-5 and abs(grad["scale"] - 2).max() < 1e-5, (value, grad)

x = torch.ones(3, requires_grad=True)
bridge.jax_function(lambda x: jax.numpy.sin(x).sum())(x).backward()
torch.testing.assert_close(x.grad, x.detach().cos())

model = nn.Linear(3, 1)
step = torch_api.JaxTrainStep(model, lambda m, x: m(x).square().sum(), torch_api.MaskedSGD(model.parameters(), lr=0.1))
before = model.weight.detach().clone()
losses = [float(step(torch.ones(2, 3))) for _ in range(3)]
assert losses[-1] < losses[0] and not torch.equal(before, model.weight)
print(bridge.doctor())
"""


@pytest.mark.slow
def test_library_works_without_any_private_name():
    path = ROOT / "bridge" / "_compat" / "lookup.py"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(path)], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "does not tell" in done.stdout, done.stdout
