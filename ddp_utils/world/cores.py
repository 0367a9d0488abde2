"""How many of this machine's cores does a rank get?"""

from __future__ import annotations

import os

__all__ = ["share_of_cores", "usable_cores"]


def share_of_cores(
    local_world_size: int, *, usable: int, available: int, per_task: int | None = None
) -> int:
    """Return how many cores one of the ranks on a machine should use.

    Args:
        local_world_size: Ranks on this machine.
        usable: Cores that this process may run on.
        available: Cores that its launcher may run on: more, where the launcher has bound each
            rank to cores of its own.
        per_task: What was asked for each task (``srun --cpus-per-task``).

    >>> share_of_cores(4, usable=16, available=16)  # four ranks on the same sixteen cores
    4
    >>> share_of_cores(4, usable=4, available=16)  # each has been bound to four of them
    4
    >>> share_of_cores(4, usable=64, available=64, per_task=8)
    8
    """
    return max(1, min(usable, per_task or max(usable, available) // local_world_size))


def usable_cores(pid: int = 0) -> int:
    """Return the number of cores that a process may run on, this one by default."""
    if hasattr(os, "sched_getaffinity"):
        try:
            return len(os.sched_getaffinity(pid))
        except OSError:
            return 0
    return os.cpu_count() or 1
