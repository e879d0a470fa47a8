"""Two processes: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and torch.distributed.checkpoint."""

import time

import distributed_worker
import pytest
import torch

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

LIMIT = 240  # seconds for each family, on a machine that does much else


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What each process has checked, by rank, and the error that ended them: one start for all families."""
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
def test_on_two_processes(family, ended):
    ranks, error = ended
    for rank, names in enumerate(ranks):
        missing = [check.__name__ for check in distributed_worker.FAMILIES[family] if check.__name__ not in names]
        assert not missing, f"rank {rank} did not get through {missing}: {error}"


def test_the_processes_end(ended):
    assert ended[1] is None
