"""Which signal has asked this process to stop?

Signals are seen by a thread of their own, through the descriptor that Python's handler writes
to: so they count at once, also while the main thread waits in a collective that never ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

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
        self.first: int | None = None
        self._came_at = 0.0
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def catch(self, numbers: Iterable[int]) -> None:
        """Catch these signals as well. On the main thread only."""
        if not self.before:
            threading.Thread(target=self._listen, name="ddp_utils signals", daemon=True).start()
        other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        taken = other not in (-1, self._write)
        if taken:  # an event loop listens there, and Python's handlers have to do
            signal.set_wakeup_fd(other)
        for number in numbers:
            before = signal.signal(number, self._tell if taken else _only_wake)
            self.before.setdefault(number, before)

    def release(self) -> None:
        """Put back what handled the signals before. On the main thread only."""
        for number, handler in self.before.items():
            if signal.getsignal(number) in (self._tell, _only_wake):
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        other = signal.set_wakeup_fd(-1)
        if other != self._write:
            signal.set_wakeup_fd(other)
        os.close(self._write)  # ends the thread

    def abandon(self) -> None:
        """In a fork of this process: it was not asked to stop, and must not answer for it.

        Its termination is as it was, so that whoever started it can end it. The other signals
        are let pass: a scheduler sends them to loader workers too, which would die of them.
        """
        other = signal.set_wakeup_fd(-1)
        if other != self._write:
            signal.set_wakeup_fd(other)
        os.close(self._read)
        os.close(self._write)
        for number, handler in self.before.items():
            ends = number in (signal.SIGTERM, signal.SIGINT)
            signal.signal(number, (handler or signal.SIG_DFL) if ends else _only_wake)

    def _tell(self, number: int, stack: object) -> None:
        os.write(self._write, bytes([number]))

    def _listen(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number in self.before:
                    self._note(number)
        os.close(self._read)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._came_at = number, now
        elif now - self._came_at > REPEAT:
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
    wanted = [number for number in signals if _watch is None or number not in _watch.before]
    if not wanted:
        return
    if threading.current_thread() is not threading.main_thread():
        if not _warned:
            _warned = True
            _logger.warning("stop signals to this rank are not caught: not on the main thread")
        return
    if not _prepared:
        _prepared = True
        os.register_at_fork(after_in_child=_in_fork)
    if _watch is None:
        _watch = _Watch()
    _watch.catch(wanted)
    for callback in _callbacks:
        callback(tuple(_watch.before))


def disarm() -> None:
    """Let the signals do what they did before, and forget that one came."""
    global _watch
    if _watch is not None and threading.current_thread() is threading.main_thread():
        _watch.release()
        _watch = None


def armed() -> tuple[int, ...]:
    """Return the signals that ask this process for a stop; none of them ends it."""
    return () if _watch is None else tuple(_watch.before)


def first_signal() -> int | None:
    """Return the number of the signal that has asked this process to stop, if one has."""
    return None if _watch is None else _watch.first


def when_armed(callback: Callable[[tuple[int, ...]], None]) -> None:
    """Call ``callback(signals)`` whenever signals are armed; at once if some are already."""
    _callbacks.append(callback)
    if _watch is not None:
        callback(armed())


def _only_wake(number: int, stack: object) -> None:
    """Do nothing: what counts is the byte that Python has written before it calls this."""


def _in_fork() -> None:
    global _watch
    _callbacks.clear()
    if _watch is not None:
        _watch.abandon()
        _watch = None


def _end_by(number: int) -> None:
    """End this process as if the signal had not been caught, whatever its main thread does.

    ``signal.signal`` is for the main thread, which may be waiting for ever in C.
    """
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
