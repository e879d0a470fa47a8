import gc
import os

# Set before jax starts: tests run on the CPU unless MASKBRIDGE_TEST_GPU is set, and every implicit promotion is an error.
os.environ.setdefault("JAX_PLATFORMS", "" if os.environ.get("MASKBRIDGE_TEST_GPU") else "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Set before torch starts, and inherited by processes that tests start. Workers and scripts share few cores; without this, torch's
# threads would spin at every barrier until the others arrive. With it they sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import pytest
import torch


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would otherwise start with the files that have most tests


def pytest_collection_modifyitems(config, items):
    if "nightly" not in config.option.markexpr:  # also with `-m "not slow"`; `make nightly` selects them
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # long files first, so that no worker is left alone with one


def pytest_collection_finish():
    """Freeze the objects that imports have made, so that the garbage collector does not scan them again in every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    # torch.manual_seed seeds every device; for each missing GPU torch would store the whole stack as text.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def standard_promotion():
    """Use standard promotion, as users of optax do: optax itself fails under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def unoptimized_training(monkeypatch):
    """Compile train steps without LLVM's optimizations, which take seconds each; test_pipelines.py and examples compile with them."""
    import unoptimized

    from bridge._train import train_program
    from bridge._xla import compile_options

    asked = compile_options.train_options
    monkeypatch.setattr(train_program, "train_options", lambda *of: asked(*of) | unoptimized.EFFORT)


@pytest.fixture(autouse=True, scope="module")
def _unoptimized_updates(request):
    """Compile updates without LLVM's optimizations in files marked `unoptimized`; other files share none of these programs.

    This halves the time of files that test behavior and not last bits, threads or byte counts. Other files compare numbers of optimized
    code; `make nightly` does so for all of optax.
    """
    if request.node.get_closest_marker("unoptimized") is None or os.environ.get("MASKBRIDGE_TEST_OPTIMIZED"):
        yield
        return
    import unoptimized

    from bridge._runtime import cache, executable, outline, streaming_stats
    from bridge._xla import compile_options

    with pytest.MonkeyPatch.context() as patch:
        for module in (executable, streaming_stats):
            patch.setattr(module, "update_options", lambda device: compile_options.update_options(device) | unoptimized.options())
        for module, name in ((cache, "_programs"), (cache, "_lru"), (outline, "_tiles")):
            patch.setattr(module, name, type(getattr(module, name))())
        yield


def pytest_terminal_summary(terminalreporter):
    """Print how many inputs of torch's optimizer database passed, also if xdist's workers ran them."""
    counts, worst = {}, {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in getattr(report, "user_properties", ()) if report.when == "call" else ():
                if name == "optim_db":
                    counts.setdefault(value, {"passed": 0, "failed": 0})[outcome] += 1
                elif name == "movement":
                    worst[value[0], value[1]] = max(worst.get((value[0], value[1]), 0.0), value[2])
    for kind, n in counts.items():
        terminalreporter.write_line(f"optim_db: {n['passed']} of {n['passed'] + n['failed']} {kind} inputs as in torch.optim")
    if worst and terminalreporter.verbosity > 0:
        for (name, dtype), error in sorted(worst.items()):
            terminalreporter.write_line(f"  {name} {dtype}: {error:.1e} of the movement at most")
