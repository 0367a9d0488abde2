"""Are gloo's threads through with Python, so that the interpreter may end?

A thread of gloo's lets go of a collective's tensors only after the collective is over, and for a
tensor that Python knew it needs the interpreter. One that is ending ends such a thread instead, and
with it, by way of C++, the process: "terminate called without an active exception", exit code 134
(pytorch/pytorch#38228, #190489). Under a launcher with restarts a finished job then runs again.
"""

from __future__ import annotations

import atexit
import functools
import glob
import sys
import time
from contextlib import suppress

__all__ = ["let_them_rest", "rest_at_exit"]

NAME = "pt_gloo_runloop"
"""What torch calls the threads."""
PATIENCE = 5.0
"""Seconds for a thread to let go of what it holds."""
MOMENT = 0.002
"""Seconds in which a thread that waits for the interpreter gets it, or is at least about to run."""


@functools.cache
def rest_at_exit() -> None:
    """Let the threads rest before this interpreter ends."""
    atexit.register(let_them_rest)


def let_them_rest() -> None:
    """Wait, but not for long, until no thread of gloo's has run for a moment.

    One that waits for peers who do not come is at rest too.
    """
    if sys.platform != "linux":
        time.sleep(0.05)  # nothing tells, but it is long for what is left to do
        return
    deadline = time.monotonic() + PATIENCE
    before = _turns()
    while before and time.monotonic() < deadline:
        time.sleep(MOMENT)  # and without the interpreter, which such a thread may wait for
        now = _turns()
        if now == before and all(turns[0].endswith("S (sleeping)") for turns in now.values()):
            return
        before = now


def _turns() -> dict[str, list[str]]:
    """Return the state of each of the threads, and how often it has had a processor."""
    turns = {}
    for path in glob.glob("/proc/self/task/*/status"):
        with suppress(OSError), open(path) as file:  # the thread may have ended
            lines = file.read().splitlines()
            if lines[0].endswith(NAME):
                turns[path] = [line for line in lines if line.startswith("State") or "ctxt" in line]
    return turns
