"""Transactions: signal handlers wait until all results of a step are in place, and each device serves one thread at a time."""

# Modules of this project share names that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax
import torch

_OPTIONAL_SIGNALS = "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2"  # schedulers send the last two before they end a job
_DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM, *(getattr(signal, name) for name in _OPTIONAL_SIGNALS if hasattr(signal, name)))
_LOCK_TIMEOUT_SECONDS = 0.1  # between two checks for signals while another thread has the lock

_locks: dict[Hashable, threading.RLock] = {}


@dataclass(slots=True, eq=False, repr=False)  # `signal` formats the handler of each signal, and so this object
class Transaction:
    """A context manager for changes of memory that torch, other threads and other optimizers read: all of it changes, or nothing.

    A signal handler that raises halfway would leave parameters without their state. So in the main thread handlers written in Python are
    deferred to the end. Then each is called once for each signal, in the order of arrival, also if the transaction or an earlier handler
    raises.

    Two threads may donate the same buffer: a parameter may have several optimizers, and parameters of several optimizers may share a
    bucket. So there is one reentrant lock for each device.

    A signal may arrive at any bytecode. Therefore a handler is recorded before it is replaced, no lock is acquired or released while a
    handler may raise, and handlers are restored last.

    Args:
      devices: the devices whose memory changes, in an order that is the same for all transactions.
    """

    devices: Sequence[Hashable]
    _handlers: dict[int, Callable[[int, FrameType | None], object]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    _deferred_signals: list[tuple[int, FrameType | None]] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    _held_locks: list[threading.RLock] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    _interruptible: bool = False

    def __enter__(self) -> Transaction:
        try:
            if threading.current_thread() is threading.main_thread():
                for number in _DEFERRED_SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._defer_or_call)
            for device in self.devices:
                lock = _locks.get(device) or _locks.setdefault(device, threading.RLock())
                while not lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
                    self._call_deferred_handlers()
                self._held_locks.append(lock)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._interruptible = False
        while self._held_locks:
            self._held_locks.pop().release()
        error: BaseException | None = None
        given_back = False
        while not given_back:
            try:
                for number, handler in self._handlers.items():
                    replaced = signal.signal(number, handler)
                    if replaced not in (self._defer_or_call, handler):  # a handler has set another one, which stays
                        signal.signal(number, replaced)
                given_back = True
            except BaseException as raised:  # noqa: BLE001 - a restored handler has raised; restore the others too
                error = _chain_errors(error, raised)
        if self._deferred_signals or error is not None:  # all handlers are restored, so no more signals are deferred
            self._call_deferred_handlers(error)

    @contextmanager
    def interruptible(self) -> Generator[None, None, None]:
        """Return a context in which handlers run at once. It is for long work that changes no memory, such as compilation."""
        try:
            self._interruptible = True
            self._call_deferred_handlers()
            yield
        finally:
            self._interruptible = False

    def _defer_or_call(self, number: int, frame: FrameType | None) -> None:
        """Take the place of each handler: record the signal, or call the handler within `interruptible`."""
        if self._interruptible:
            with torch.DisableTorchFunction(), jax.ensure_compile_time_eval():  # keeps the handler out of a trace that it interrupts
                self._handlers[number](number, frame)
        else:
            self._deferred_signals.append((number, frame))

    def _call_deferred_handlers(self, error: BaseException | None = None) -> None:
        """Call the handlers of all deferred signals, also after one that raises.

        Then raise the last error, with the earlier ones as its context.
        """
        while self._deferred_signals:
            try:
                number, frame = self._deferred_signals[0]
                del self._deferred_signals[0]  # without a call in between, in which another handler could raise
                self._handlers[number](number, frame)
            except BaseException as raised:  # noqa: BLE001 - raised below, after the other handlers have run
                error = _chain_errors(error, raised)
        if error is not None:
            raise error


def _chain_errors(before: BaseException | None, error: BaseException) -> BaseException:
    if before is not error and error.__context__ is None:
        error.__context__ = before
    return error


def _reset_in_child() -> None:
    """Reset locks and handlers in a forked child: the threads that hold the locks and defer the signals do not exist there."""
    _locks.clear()
    for number in _DEFERRED_SIGNALS:
        handler: Any = signal.getsignal(number)
        while getattr(handler, "__func__", None) is Transaction._defer_or_call:
            handler = handler.__self__._handlers[number]
            signal.signal(number, handler)


os.register_at_fork(after_in_child=_reset_in_child)
