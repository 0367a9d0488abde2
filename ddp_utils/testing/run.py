"""How does a test run a function on several ranks?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ddp_utils.start.ranks import Options, start_ranks
from ddp_utils.start.supervise import JobStopped

R = TypeVar("R")

__all__ = ["run_distributed", "start"]


def run_distributed(
    fn: Callable[..., R], *args: Any, world_size: int = 2, timeout: float = 60, **kwargs: Any
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks and return their values, by rank.

    Args:
        fn: A function at the top level of a module; with cloudpickle installed also a closure.
        world_size: Number of ranks, each a process of its own, with gloo on the CPU.
        timeout: Seconds after which the ranks are killed and every rank's stacks are shown.

    Raises:
        RankFailedError: A rank failed, or the time was over.

    Example:
        >>> run_distributed(abs, -2, world_size=2)
        [2, 2]
    """
    return start(fn, args, kwargs, Options(nproc=world_size, backend="gloo"), timeout)


def start(
    fn: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    time_limit: float | None,
) -> list[R]:
    """Start ranks for a test, and return what they return also where they were stopped."""
    try:
        return start_ranks(fn, args, kwargs, options, all_results=True, time_limit=time_limit)
    except JobStopped as stopped:
        return stopped.values
