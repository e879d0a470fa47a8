"""`python -m bridge`: print the report of `bridge.doctor()`.

The exit code is 0 if no finding is an error (warnings and notes do not count), 1 if one is, and 2 for unknown arguments.
"""

from __future__ import annotations

import argparse
import sys

from .doctor import doctor
from .environment import read_environment


def main(command: str = "python -m bridge") -> int:
    """Print the report and return its exit code. The command stands in the help text."""
    parser = argparse.ArgumentParser(prog=command, description="Report problems between torch and jax, each with its fix.")
    parser.add_argument("--start", action="store_true", help="start jax to list its devices, even if jax then takes GPU memory")
    start = parser.parse_args().start or not read_environment().may_start_gpu  # without plugins jax can start only on the CPU
    report = doctor(start)
    print(report)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
