"""Calls in another thread: results, errors, and the end of the interpreter, when no thread can start."""

import subprocess
import sys
import textwrap
import threading

import pytest

from bridge._xla.compile import submit

pytestmark = pytest.mark.quick


def test_call_runs_in_another_thread_and_returns_its_result():
    assert submit(threading.get_ident).result() != threading.get_ident()
    assert submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        submit(divmod, 7, 0).result()


def test_submitting_a_call_does_not_wait_for_it():
    free = threading.Event()
    held = submit(free.wait)
    assert not held.done()
    free.set()
    assert held.result()


@pytest.mark.slow
def test_first_step_works_at_the_end_of_the_interpreter():
    """`atexit` functions run when a thread pool can no longer start threads."""
    code = """
        import atexit, torch, torch_api
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch_api.MaskedSGD([p], lr=1.0)

        def last():
            p.grad = torch.ones(3)
            optimizer.step()
            print(p.detach().tolist())

        atexit.register(last)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[-1.0, -1.0, -1.0]"
    assert not done.stderr
