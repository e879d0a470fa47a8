"""What MASKBRIDGE_SAFE=1 costs: AdamW steps with and without it, each in processes of its own, in turn.

    python benchmarks/safe_mode.py

Prints the ratio of the medians, with the quartiles over pairs of processes, and the largest memory of a process.
"""

import os
import resource
import statistics
import subprocess
import sys
import time

SIZES = {"60 parameters of 112 to 301 elements": [(7, 16 + i // 2) for i in range(60)], "24 parameters of 1024 x 1024": [(1024, 1024)] * 24}
PAIRS, STEPS = 5, 30


def measure() -> None:
    """Print the median time of a step for each set of sizes, and the peak memory in MiB."""
    import torch

    import torch_api

    times = []
    for shapes in SIZES.values():
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = torch_api.MaskedAdamW(params, lr=1e-3)
        for p in params:
            p.grad = torch.randn_like(p)
        taken = []
        for _ in range(STEPS):
            start = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - start)
        times.append(statistics.median(taken[5:]))
    print(*times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def run(safe: str) -> list[float]:
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, env=os.environ | {"MASKBRIDGE_SAFE": safe}, capture_output=True, text=True, check=True)
    return list(map(float, done.stdout.split()))


def main() -> None:
    pairs = [(run("0"), run("1")) for _ in range(PAIRS)]
    for i, name in enumerate((*SIZES, "peak memory of the process")):
        low, middle, high = statistics.quantiles([safe[i] / usual[i] for usual, safe in pairs], n=4)
        print(f"{name}: {middle:.1f} [{low:.1f} {high:.1f}]")


if __name__ == "__main__":
    measure() if "--measure" in sys.argv else main()
