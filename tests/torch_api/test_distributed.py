"""DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and torch.distributed.checkpoint on two processes."""

import time

import distributed_worker
import pytest
import torch

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

LIMIT = 240  # seconds per family, on a busy machine


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run all families in one start; return the checks that each rank has passed, and the error that ended the run."""
    directory = tmp_path_factory.mktemp("distributed")
    families = list(distributed_worker.FAMILIES)
    context = torch.multiprocessing.spawn(distributed_worker.run, (families, str(directory)), distributed_worker.WORLD, join=False)
    deadline, error = time.monotonic() + LIMIT * len(families), None
    try:
        while not context.join(timeout=5):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                error = f"they did not end within {LIMIT * len(families)} s"
                break
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as raised:
        error = str(raised)
    return [distributed_worker.checked(directory, rank) for rank in range(distributed_worker.WORLD)], error


@pytest.mark.parametrize("family", distributed_worker.FAMILIES)
def test_every_check_passes_on_two_processes(family, ended):
    ranks, error = ended
    for rank, names in enumerate(ranks):
        missing = [check.__name__ for check in distributed_worker.FAMILIES[family] if check.__name__ not in names]
        assert not missing, f"rank {rank} did not get through {missing}: {error}"


def test_processes_end(ended):
    assert ended[1] is None
