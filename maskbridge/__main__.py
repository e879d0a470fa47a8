"""`python -m maskbridge`: as `python -m bridge`, print the report of `bridge.doctor()`."""

import sys

from bridge.__main__ import main

if __name__ == "__main__":
    sys.exit(main("python -m maskbridge"))
