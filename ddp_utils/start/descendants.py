"""Which processes descend from this one, and how does it see to their end?"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys
import time

__all__ = ["become_reaper", "gone_within", "kill_descendants", "reap_others"]


def become_reaper() -> None:
    """Let orphans among the descendants become children of this process (Linux)."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def reap_others(but: set[int]) -> bool:
    """Reap every child that has ended, ``but`` these pids; return whether none is left."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        if found is None or found.si_pid in but:
            return False  # one of those has its own SIGCHLD, and is seen to then
        os.waitpid(found.si_pid, 0)


def gone_within(seconds: float, *, unless: socket.socket | None = None) -> bool:
    """Wait for all descendants to end, or until something comes over ``unless``.

    They are reaped here, so that zombies do not count.
    """
    deadline = time.monotonic() + seconds
    watched = [] if unless is None else [unless]
    while not reap_others(set()):
        if time.monotonic() >= deadline or select.select(watched, [], [], 0.01)[0]:
            return False
    return True


def kill_descendants(number: int) -> None:
    """Send a signal to every process that descends from this one, those born meanwhile too."""
    told: set[int] = set()
    while new := set(_descendants(os.getpid())) - told:
        for pid in new:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        told |= new


def _descendants(root: int) -> list[int]:
    """Return the pids of all processes below ``root`` (Linux; elsewhere none)."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found, front = [], [root]
    while front:
        front = [child for pid in front for child in children.get(pid, [])]
        found += front
    return found
