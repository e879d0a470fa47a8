"""Two processes: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and torch.distributed.checkpoint."""

import time

import distributed_worker
import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

LIMIT = 240  # seconds, on a machine that does much else


@pytest.mark.parametrize("family", distributed_worker.FAMILIES)
def test_on_two_processes(family, tmp_path):
    if family == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch runs FSDP2 on a GPU only")
    context = torch.multiprocessing.spawn(distributed_worker.run, (family, str(tmp_path)), distributed_worker.WORLD, join=False)
    deadline = time.monotonic() + LIMIT
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the checks of {family!r} did not end within {LIMIT} s")
