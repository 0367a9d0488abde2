"""Which signal has asked this process to stop?

Signals are counted by a thread of their own, which reads what Python writes to a descriptor as
they come: a second one ends this process also while the main thread waits in C for ever.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ddp_utils.ground import loader_workers

__all__ = ["STOP_SIGNALS", "arm", "armed", "disarm", "first_signal", "when_armed"]

STOP_SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)

REPEAT = 2.0
"""Seconds within which more signals are one request: a scheduler signals a whole process group,
and the parent in it passes the signal on."""

_logger = logging.getLogger("ddp_utils")


class _Watch:
    """The signals that are caught in this process, and the first one that came."""

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}
        self.came: int | None = None
        self._since: float | None = None
        self._passes_on = False
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        threading.Thread(target=self._count, name="ddp_utils signals", daemon=True).start()

    def catch(self, numbers: Iterable[int]) -> None:
        """Catch these signals as well. On the main thread only, like the other two."""
        own = self._write.fileno()
        other = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
        self._passes_on = other not in (-1, own)
        if self._passes_on:  # an event loop listens there; then Python's handler has to do
            signal.set_wakeup_fd(other)
        for number in numbers:
            self.before[number] = signal.getsignal(number)
            signal.signal(number, self._on_signal)

    def release(self) -> None:
        """Put back what handled the signals before."""
        for number, handler in self.before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        other = signal.set_wakeup_fd(-1)
        if other != self._write.fileno():
            signal.set_wakeup_fd(other)
        self._write.close()  # the thread reads its end

    def _on_signal(self, number: int, stack: object) -> None:
        self.came = number
        if self._passes_on:
            self._write.send(bytes([number]))

    def _count(self) -> None:
        with self._read:
            while numbers := self._read.recv(64):
                for number in numbers:
                    if number in self.before:
                        self._note(number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        self.came = self.came or number
        if self._since is None:
            self._since = now
        elif now - self._since > REPEAT:
            _end_by(number)


_watch: _Watch | None = None
_callbacks: list[Callable[[tuple[int, ...]], None]] = []
_warned = _prepared = False


def arm(signals: Iterable[int] = STOP_SIGNALS) -> None:
    """Let these signals ask for a stop, from now on, instead of ending this process.

    A signal that comes more than 2 s after the first one ends the process at once. Off the main
    thread, where Python allows no handlers, nothing is caught; that is logged once.
    """
    global _watch, _warned, _prepared
    wanted = [number for number in signals if number not in armed()]
    if not wanted:
        return
    if threading.current_thread() is not threading.main_thread():
        if not _warned:
            _warned = True
            _logger.warning("stop signals to this rank are not caught: not on the main thread")
        return
    if not _prepared and hasattr(os, "register_at_fork"):
        _prepared = True
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork
        )
    _watch = _watch or _Watch()
    _watch.catch(wanted)
    for callback in _callbacks:
        callback(armed())


def disarm() -> None:
    """Let the signals do what they did before, and forget that one came."""
    global _watch
    if _watch is not None and threading.current_thread() is threading.main_thread():
        _watch.release()
        _watch = None


def armed() -> tuple[int, ...]:
    """Return the signals that ask this process for a stop instead of ending it."""
    return () if _watch is None else tuple(_watch.before)


def first_signal() -> int | None:
    """Return the number of a signal that has asked this process to stop, if one has."""
    return None if _watch is None else _watch.came


def when_armed(callback: Callable[[tuple[int, ...]], None]) -> None:
    """Call ``callback(signals)`` whenever signals are armed; at once if some are already."""
    _callbacks.append(callback)
    if _watch is not None:
        callback(armed())


_forking = threading.local()


def _before_fork() -> None:
    """Hold signals back until the fork has its own handlers: else one to it would count here."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, armed())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_fork() -> None:
    """In a fork of this process: it was not asked to stop, and must not answer for it."""
    global _watch
    _callbacks.clear()
    if _watch is not None:
        _watch.release()
        _watch._read.close()  # here is no thread that would
        _watch = None
        if loader_workers.is_being_forked():
            loader_workers.obey_parent_only()
            _forking.mask |= {signal.SIGTERM}
    _after_fork()


def _end_by(number: int) -> None:
    """End this process as if the signal had not been caught, whatever its main thread does.

    ``signal.signal`` is for the main thread, which may be waiting in C.
    """
    if sys.platform != "win32":
        ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
