"""The quick tests with each supported Python, and the newest jax and torch that have wheels for it.

    nox -s quick-3.12                                              # what the workflow runs
    nox -s quick-3.12 -- tests/torch_api/test_optimizer.py         # other arguments of pytest

The interpreters must be on the path; with pyenv: `PYENV_VERSION=3.11.7:3.12.1:3.13.0 nox`.
"""

import nox

nox.needs_version = ">=2025.5"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["quick-3.11", "quick-3.12", "quick-3.13"]

# The pins of each Python, in requirements/. 3.14 and its build without the global lock (3.14t) are not supported yet.
PINS = {"3.11": "constraints.txt", "3.12": "python3.12.txt", "3.13": "python3.13.txt", "3.14": "python3.13.txt", "3.14t": "python3.13.txt"}


@nox.session(python=list(PINS))
def quick(session: nox.Session) -> None:
    """Run the quick tests, or pytest with the arguments that follow `--`."""
    session.install("pip>=25.1")
    session.install("-e", ".[examples]", "--group", "test", "-c", f"requirements/{PINS[str(session.python)]}")
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "2", "--dist", "loadfile", "-m", "quick and not slow")))
