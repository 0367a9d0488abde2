"""How does a script log once, and not once on every rank?"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from ddp_utils.ground.saying import say
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["RankLogger", "get_logger"]

FORMAT = "%(levelname)s:%(name)s:%(message)s"


class RankLogger(logging.Logger):
    """A logger that knows its rank: see :func:`get_logger`."""

    def isEnabledFor(self, level: int) -> bool:
        """Whether a record of this level could be logged here, with ``all_ranks=True`` at least."""
        return self.manager.disable < level >= self.level

    def _log(
        self,
        level: int,
        msg: object,
        args: Any,
        exc_info: Any = None,
        extra: Mapping[str, object] | None = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        all_ranks: bool = False,
    ) -> None:
        rank = get_rank()
        if rank != 0 and level < logging.WARNING and not all_ranks:
            return
        if rank != 0 or all_ranks:
            msg = f"[rank {rank}] {msg}"
        ranks = {"rank": rank, "world_size": get_world_size()}
        super()._log(
            level, msg, args, exc_info, {**ranks, **(extra or {})}, stack_info, stacklevel + 1
        )

    def callHandlers(self, record: logging.LogRecord) -> None:
        """Hand the record to the user's handlers; print it where there are none at all."""
        if self.hasHandlers():
            super().callHandlers(record)
        else:
            say(logging.Formatter(FORMAT).format(record))

    def __reduce__(self) -> tuple[Any, ...]:
        return get_logger, (self.name,)


@functools.cache
def get_logger(name: str) -> RankLogger:
    """Return a logger that logs from ``INFO`` on rank zero, and from ``WARNING`` on the others.

    Messages of other ranks begin with ``[rank 3]``. With ``all_ranks=True`` a record is logged
    on every rank. The rank is asked for at each record, so that the logger may be made at
    import, before there is a process group. Each record has ``rank`` and ``world_size`` for
    formatters and filters. Handlers are the user's, found by the logger's name as always; only
    where there are none, records are printed on stderr. No other logger is touched, that of
    ``logging.getLogger(name)`` neither.

    Args:
        name: As for ``logging.getLogger``. The same name gives the same logger.

    Returns:
        A ``logging.Logger``. ``setLevel`` changes the level for rank zero and for records with
        ``all_ranks=True``; the other ranks stay at ``WARNING`` at least.

    Example:
        >>> log = get_logger("train")
        >>> log.info("epoch %d", 3)
        >>> log.info("my share: %d samples", 512, all_ranks=True)
    """
    logger = RankLogger(name, logging.INFO)
    logger.parent = logging.getLogger(name)
    return logger
