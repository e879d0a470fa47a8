"""`python -m bridge`: print the report of `bridge.doctor()`.

Exit code 0: nothing stands in the way (warnings and notes do not count); 1: something does not work; 2: unknown arguments.
"""

from __future__ import annotations

import argparse
import sys

from .doctor import doctor
from .environment import gather


def main() -> int:
    """Print the report, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bridge", description="What stands between torch and jax here, each with its fix.")
    parser.add_argument("--start", action="store_true", help="start jax to look at its devices, even if that takes a GPU")
    start = parser.parse_args().start or not gather().may_start_gpu  # a jax without plugins can only take the CPU
    report = doctor(start)
    print(report)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
