"""Which errors can this package raise, and what do they carry?

Wrong arguments raise Python's own ``TypeError`` and ``ValueError``. The classes here are for
what only happens between ranks. Every message says what happened, on which rank, and what to
write instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "AbsentRanksError",
    "DistributedError",
    "LauncherError",
    "OneRankSectionError",
    "RankEnd",
    "RankFailedError",
    "RankZeroError",
    "RanksDisagreeError",
    "RendezvousError",
    "StartError",
]


class DistributedError(RuntimeError):
    """Anything that went wrong between ranks: the base of the errors below."""


class LauncherError(DistributedError):
    """The environment names a launcher only in half, or names two that contradict."""


class RendezvousError(DistributedError):
    """The ranks cannot find each other: an address, a port or an interface is wrong."""


class StartError(DistributedError):
    """A job cannot be started: no guard, an argument that does not pickle, a lost function."""


class RanksDisagreeError(DistributedError):
    """Ranks came to the same collective with different things; raised alike on all of them."""


class AbsentRanksError(DistributedError, TimeoutError):
    """Some ranks did not come to a collective in time; the message names them."""


class OneRankSectionError(DistributedError):
    """A collective was called inside a section that only one rank runs."""


class RankZeroError(DistributedError):
    """Rank zero raised inside a section that the other ranks depend on; raised on those."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``time`` is in seconds since the job was started; ``exit_code`` is None for a rank that a
    signal ended, whose name is then in ``signal`` (``"SIGKILL"``). ``traceback`` is the text
    that Python would have printed, without the frames of this package that called the function.
    """

    rank: int
    kind: Literal["returned", "raised", "exited", "killed", "ended"]
    """``returned`` a value, ``raised`` an exception, ``exited`` by itself without a report,
    ``killed`` by a signal, or ``ended`` by us because of another rank."""
    time: float
    exit_code: int | None = None
    signal: str | None = None
    summary: str = ""
    traceback: str = ""
    lost_peer: bool = False
    """The exception came out of a collective that lost another rank: an effect, not a cause."""


class RankFailedError(DistributedError):
    """One rank failed, and with it the job; raised in the process that started the ranks.

    ``rank`` is the rank of the root cause, ``cause`` its exception object where that could be
    pickled (also ``__cause__``), ``failures`` every rank's end, by rank. The message ends with
    the traceback of the root cause.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        cause: BaseException | None = None,
        failures: Sequence[RankEnd] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause
        self.failures = tuple(failures)

    def __reduce__(self) -> tuple[object, ...]:
        state = {"rank": self.rank, "cause": self.cause, "failures": self.failures}
        return (_rank_failed_error, (type(self), self.args[0], state))


def _rank_failed_error(
    kind: type[RankFailedError], message: str, state: dict[str, object]
) -> RankFailedError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


for _name in __all__:  # tracebacks and pickles name these where the user imports them
    globals()[_name].__module__ = "ddp_utils"
