"""Transactions: signals wait until all results of a step are in place, and threads take turns on each device."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import torch

_MAY_HAVE = "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2"  # the last two tell a job that its time is over
_HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, *(getattr(signal, name) for name in _MAY_HAVE if hasattr(signal, name)))
_SECONDS = 0.1  # between two looks at signals that have arrived while another thread has its turn

_locks: dict[Hashable, threading.RLock] = {}


class Transaction:
    """The time in which memory changes that torch, other threads and other optimizers look at: all of it changes, or nothing.

    A handler that raises in the middle would leave parameters without their state, so in the main thread handlers written in Python wait
    for the end. Then each is called once for each signal, in the order of arrival, also where the transaction raises, or the handler of
    another signal. Two threads may donate the same buffers, since parameters may have several optimizers, and those of separate
    parameters share packs. So there is one lock for each device, which a thread may hold several times.

    A signal may arrive at any bytecode. Therefore a handler is noted before it is replaced, no lock is taken or released while a handler
    may raise, and handlers come back last.

    Args:
      devices: those whose memory changes, in an order that is the same for all transactions.
    """

    __slots__ = ("_arrived", "_devices", "_handlers", "_interruptible", "_taken")

    def __init__(self, devices: Sequence[Hashable]) -> None:
        self._devices = devices
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []
        self._taken: list[threading.RLock] = []
        self._interruptible = False

    def __enter__(self) -> Transaction:
        try:
            if threading.current_thread() is threading.main_thread():
                for number in _HELD_SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._note)
            for device in self._devices:
                lock = _locks.get(device) or _locks.setdefault(device, threading.RLock())
                while not lock.acquire(timeout=_SECONDS):
                    self._deliver()
                self._taken.append(lock)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._interruptible = False
        while self._taken:
            self._taken.pop().release()
        error: BaseException | None = None
        given_back = False
        while not given_back:
            try:
                for number, handler in self._handlers.items():
                    replaced = signal.signal(number, handler)
                    if replaced not in (self._note, handler):  # by a handler that has set another
                        signal.signal(number, replaced)
                given_back = True
            except BaseException as raised:  # noqa: BLE001 - a handler that is back has raised; the others must be given back, too
                error = _behind(error, raised)
        if self._arrived or error is not None:  # handlers are back, so no more arrive
            self._deliver(error)

    @contextmanager
    def interruptible(self) -> Generator[None, None, None]:
        """A part in which handlers do not wait: it takes long, as compiling does, and an error in it changes no memory."""
        try:
            self._interruptible = True
            self._deliver()
            yield
        finally:
            self._interruptible = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Stands in for each handler."""
        if self._interruptible:
            with torch.DisableTorchFunction(), jax.ensure_compile_time_eval():  # not in the trace that it interrupts
                self._handlers[number](number, frame)
        else:
            self._arrived.append((number, frame))

    def _deliver(self, error: BaseException | None = None) -> None:
        """Call the handlers of all signals that have arrived, also behind one that raises.

        Then raise the last error, with those before it as its context.
        """
        while self._arrived:
            try:
                number, frame = self._arrived[0]
                del self._arrived[0]  # no call in between, in which another handler could raise
                self._handlers[number](number, frame)
            except BaseException as raised:  # noqa: BLE001 - raised below, after the other handlers
                error = _behind(error, raised)
        if error is not None:
            raise error


def _behind(before: BaseException | None, error: BaseException) -> BaseException:
    if before is not error and error.__context__ is None:
        error.__context__ = before
    return error


def _after_fork() -> None:
    """In a child, which has one thread: those that hold locks or wait with signals are not in it."""
    _locks.clear()
    for number in _HELD_SIGNALS:
        handler: Any = signal.getsignal(number)
        while getattr(handler, "__func__", None) is Transaction._note:
            handler = handler.__self__._handlers[number]
            signal.signal(number, handler)


os.register_at_fork(after_in_child=_after_fork)
