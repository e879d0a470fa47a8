import gc
import os

# Before jax starts: tests run on the CPU unless they are told otherwise, and every implicit promotion is an error.
os.environ.setdefault("JAX_PLATFORMS", "" if os.environ.get("MASKBRIDGE_TEST_GPU") else "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Before torch starts, for the processes that tests start too: workers and scripts share few cores, and torch's threads would spin
# at every barrier until the others come to theirs. They are as many as ever, but sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import pytest
import torch


def pytest_configure(config):
    config.option.loadscopereorder = False  # of xdist, which would begin with the files of most tests


def pytest_collection_modifyitems(config, items):
    if "nightly" not in config.option.markexpr:  # `-m "not slow"` too; `make nightly` asks for them
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # a worker that came to a long file last would work alone


def pytest_collection_finish():
    """What the imports have left stays: to look through it again and again takes a twelfth of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    # Without a GPU of the CPU alone: for the seed of each device that is not there torch would keep the whole stack as text.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def standard_promotion():
    """As optax's users run: optax itself is not clean under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def unoptimized_training(monkeypatch):
    """LLVM optimizes nothing of whole training steps, which takes seconds for each: test_pipelines.py and examples run the real ones."""
    import unoptimized

    from bridge._train import train_program
    from bridge._xla import compile_options

    asked = compile_options.of_training
    monkeypatch.setattr(train_program, "of_training", lambda *of: asked(*of) | unoptimized.EFFORT)


@pytest.fixture(autouse=True, scope="module")
def _unoptimized_updates(request):
    """Compile updates without LLVM's optimizations in files marked `unoptimized`, and share none of their programs with other files.

    This halves the time of files that test what an update is given and leaves behind, and not last bits, threads or bytes. Other files
    compare numbers of optimized code; `make nightly` does so for all of optax.
    """
    if request.node.get_closest_marker("unoptimized") is None or os.environ.get("MASKBRIDGE_TEST_OPTIMIZED"):
        yield
        return
    import unoptimized

    from bridge._runtime import cache, executable, outline, streaming_stats
    from bridge._xla import compile_options

    with pytest.MonkeyPatch.context() as patch:
        for module in (executable, streaming_stats):
            patch.setattr(module, "of_update", lambda device: compile_options.of_update(device) | unoptimized.options())
        for module, name in ((cache, "_programs"), (cache, "_recent"), (outline, "_tiles")):
            patch.setattr(module, name, type(getattr(module, name))())
        yield


def pytest_terminal_summary(terminalreporter):
    """How many configurations and errors of torch's optimizer database passed, also when xdist's workers ran them."""
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
