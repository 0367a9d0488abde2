"""How does a ``DataLoader`` worker live through a signal that is meant for its rank?

A scheduler asks for a stop by signalling the whole process group. The rank may go on until it
has saved, and needs its workers for the step that it is in; left alone, they would die.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

__all__ = ["is_being_forked", "obey_parent_only"]

_obeying: int | None = None
"""The process that has been told to obey its parent only: a fork of it has not."""


def is_being_forked() -> bool:
    """Whether a ``DataLoader`` is forking this process just now, as one of its workers."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
    return False


def obey_parent_only() -> None:
    """Let SIGTERM end this worker only if its rank has sent it, or is gone; SIGUSR1 never.

    For the worker's main thread; doing it twice is doing it once. torch's own handler for
    workers can only end them, so SIGTERM is blocked, and a thread answers it (on Linux;
    elsewhere it ends the worker as ever).
    """
    global _obeying
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, stack: None)
    if sys.platform != "linux" or _obeying == os.getpid():
        return
    _obeying = os.getpid()
    parent = os.getppid()

    def answer() -> None:
        while os.getppid() == parent:
            if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent:
                break
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=answer, name="ddp_utils signals", daemon=True).start()
