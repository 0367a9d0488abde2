"""Which signals have come to this process while it waits for its ranks?

A handler only writes the signal's number into a pipe, and the loop reads it there: nothing is
ever done in the middle of something else.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["CaughtSignals", "catching_signals"]


class CaughtSignals:
    """SIGINT, SIGTERM and what else is asked for, readable from ``descriptor`` as they come."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.catch(number)

    def catch(self, number: int) -> None:
        """Catch one more signal. Off the main thread nothing is caught; ignored stays ignored."""
        on_main_thread = threading.current_thread() is threading.main_thread()
        if (
            on_main_thread
            and number not in self._before
            and signal.getsignal(number) is not signal.SIG_IGN
        ):
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, stack: FrameType | None) -> None:
        os.write(self._write, bytes([number]))

    def read(self) -> bytes:
        """Return the numbers that have come since the last call, one byte each."""
        return os.read(self.descriptor, 64)

    def close(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self.descriptor)
        os.close(self._write)


@contextmanager
def catching_signals() -> Iterator[CaughtSignals]:
    """Catch signals for a while."""
    caught = CaughtSignals()
    try:
        yield caught
    finally:
        caught.close()
