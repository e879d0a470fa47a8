import gc
import os
from pathlib import Path

# Before jax starts: tests run on the CPU unless they are told otherwise, and every implicit promotion is an error.
os.environ.setdefault("JAX_PLATFORMS", "" if os.environ.get("MASKBRIDGE_TEST_GPU") else "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Before torch starts, for the processes that tests start too: workers and scripts share few cores, and torch's threads would spin
# at every barrier until the others come to theirs. They are as many as ever, but sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import pytest
import torch

# Files that take half a minute and more, the longest first: a worker that came to one of them last would work alone.
LONG = "repository/examples bridge/_tracing/ops/op_db bridge/_runtime/outline repository/benchmarks"
LONG += " bridge/_compiler/passes/batch_rows torch_api/_params/buckets bridge/_compiler/passes/loop_order"
LONG += " torch_api/precision torch_api/zoo torch_api/distributed bridge/_runtime/execute bridge/_tracing/ops/recurrent"
LONG += " torch_api/_train/step"
LONG += " torch_api/optim_db bridge/_compiler/passes/gather_rows contract/prepare_again contract/threads"
LONG += " contract/damaged_checkpoints contract/tuple_hyperparams contract/views_keep_their_memory"
LONG += " bridge/_compiler/joint_update bridge/_tracing/distributions bridge/_compiler/chunking"
LONG += " contract/cost_baseline contract/groups_added_later contract/state_of_the_user torch_api/optax_optimizer"
LONG += " bridge/_transforms/masking torch_api/optimizer"
# What `make check` runs, three minutes with lint and types: a new file is left out until it is named here.
QUICK = "bridge/_tracing/as_torch bridge/_tracing/autograd_function torch_api/bad_input bridge/_runtime/initial_state"
QUICK += " bridge/process bridge/_compat/compat bridge/_interop/dlpack repository/docs torch_api/gpu"
QUICK += " bridge/_tracing/known_values torch_api/_params/lr_scale bridge/_transforms/selectors bridge/_tracing/promotion"
QUICK += " bridge/_runtime/openmp"
QUICK += " torch_api/_params/bucket_state torch_api/presets repository/project torch_api/protocol torch_api/report"
QUICK += " bridge/_tracing/ops/resize bridge/rules/elementwise torch_api/_step/guards bridge/_compiler/passes/per_kind"
QUICK += " bridge/_memory/scalar_vectors bridge/_runtime/execute bridge/_memory/adoption bridge/_tracing/ops/margins"
QUICK += " bridge/_tracing/op_registry"
QUICK += " bridge/_tracing/ops/order bridge/_tracing/ops/scatter bridge/names bridge/_interop/trees"
QUICK += " bridge/_interop/dtypes repository/contract_imports"
CHECKED = set(QUICK.split())
# Whose subject is what an update is given, keeps and leaves behind, or the program that XLA is given and how it fuses it: half of their
# time was LLVM's, and elementwise updates move the same bytes (test_execute.py). Numbers are compared with those of others from the code
# that users run in zoo, optim_db, optimizer, precision and more.
HASTY = "torch_api/torch_optimizers torch_api/optax_optimizers bridge/_transforms/masking torch_api/_step/guards"
HASTY += " bridge/_memory/scalar_vectors bridge/_tracing/materialize bridge/_tracing/ops/resize torch_api/report"
HASTY += " torch_api/presets torch_api/protocol torch_api/_params/lr_scale"
HASTY += " bridge/_compiler/separability bridge/_compiler/passes/gather_rows bridge/_memory/call_arguments"
HASTY += " torch_api/_step/checked torch_api/state_dict torch_api/_step/closure bridge/doctor contract/edges"
HASTY += " torch_api/_params/ema bridge/_runtime/in_flight torch_api/_step/state_watch bridge/_compiler/passes/batch_rows"
HASTY += " torch_api/loop bridge/_compiler/passes/operand_limit"
HASTY += " torch_api/optax_optimizer torch_api/optax_state torch_api/_params/buckets torch_api/_params/bucket_state"
HASTY += " torch_api/_params/padded torch_api/partitioned bridge/_runtime/outline bridge/_runtime/streaming_stats"
HASTY += " torch_api/_step/grad_scaler torch_api/schedulers torch_api/_params/singly bridge/_compiler/passes/reductions"
HASTY += " bridge/_memory/adoption bridge/_compiler/chunking"
# The same holds for those of contract/ but for these, which are about numbers, threads, costs and what the compiler keeps.
REAL = {
    f"test_{name}" for name in ["compilation_cache", "cost_baseline", "half_scalars", "odd_tensors", "random_keys", "signals", "threads"]
}
EASY = set(HASTY.split())


def name_of(path):
    """The path of a test file below this folder, without `test_` and the suffix."""
    path = path.relative_to(Path(__file__).parent)
    return (path.parent / path.stem.removeprefix("test_")).as_posix()


def pytest_configure(config):
    config.option.loadscopereorder = False  # of xdist, which would begin with the files of most tests


def pytest_collection_modifyitems(config, items):
    if "nightly" not in config.option.markexpr:  # `-m "not slow"` too; `make nightly` asks for them
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    rank = {name: i for i, name in enumerate(LONG.split())}
    for item in items:
        if name_of(item.path) not in CHECKED:
            item.add_marker("slow")
    items.sort(key=lambda item: rank.get(name_of(item.path), len(rank)))


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
def hasty_code(monkeypatch):
    """LLVM optimizes nothing of whole training steps, which takes seconds for each: test_pipelines.py and examples run the real ones."""
    import hasty

    from bridge._train import train_program
    from bridge._xla import compile_options

    asked = compile_options.of_training
    monkeypatch.setattr(train_program, "of_training", lambda *of: asked(*of) | hasty.EFFORT)


@pytest.fixture(autouse=True, scope="module")
def _hasty_updates(request):
    """In the files named for it LLVM optimizes nothing of updates, and none of their programs serves another file."""
    in_contract = request.path.parent.name == "contract" and name_of(request.path) not in REAL
    if not in_contract and name_of(request.path) not in EASY:
        yield
        return
    import hasty

    from bridge._runtime import cache, executable, outline, streaming_stats
    from bridge._xla import compile_options

    with pytest.MonkeyPatch.context() as patch:
        for module in (executable, streaming_stats):
            patch.setattr(module, "of_update", lambda device: compile_options.of_update(device) | hasty.options())
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
