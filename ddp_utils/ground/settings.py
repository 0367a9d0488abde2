"""Which environment variables does this package read, and what do they mean?

All of them are here. Each is read when it is needed, never at import, so that a variable set
early in a script counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

__all__ = ["VARIABLES", "Variable"]


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: its name, how its text is read, and what it is for."""

    name: str
    parse: Callable[[str], T]
    default: T
    accepts: str
    meaning: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the variable's value, or its default where it is unset or empty."""
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(
                f"{self.name}={text!r} cannot be read: it takes {self.accepts} ({self.meaning})"
            ) from None


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    return parse


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


FLAG = "1 or 0"
SECONDS = "a number of seconds"

LAUNCHERS = ("none", "spawn", "torchrun", "slurm", "mpi")
START_METHODS = ("auto", "server", "spawn")
OUTPUTS = ("prefix", "rank_zero", "all")

LAUNCHER: Variable[str] = Variable(
    "DDP_UTILS_LAUNCHER",
    _one_of(*LAUNCHERS),
    "",
    " | ".join(LAUNCHERS),
    "the launcher to believe, whatever the other variables say",
)
NPROC: Variable[int | None] = Variable(
    "DDP_UTILS_NPROC", _count, None, "a count, at least 1", "processes to start on this machine"
)
START_METHOD: Variable[str] = Variable(
    "DDP_UTILS_START_METHOD",
    _one_of(*START_METHODS),
    "auto",
    " | ".join(START_METHODS),
    "how ranks are started",
)
OUTPUT: Variable[str] = Variable(
    "DDP_UTILS_OUTPUT",
    _one_of(*OUTPUTS),
    "prefix",
    " | ".join(OUTPUTS),
    "what becomes of the output of ranks other than zero",
)
LOG_DIR: Variable[str | None] = Variable(
    "DDP_UTILS_LOG_DIR", str, None, "a folder", "where output='rank_zero' keeps the others' output"
)
GRACE: Variable[float] = Variable(
    "DDP_UTILS_GRACE", _seconds, 5.0, SECONDS, "how long ranks may take to end once asked to"
)
STOP_GRACE: Variable[float | None] = Variable(
    "DDP_UTILS_STOP_GRACE",
    _seconds,
    None,
    SECONDS,
    "how long ranks may take after a stop request before they are killed; no limit unless set",
)
TIMEOUT: Variable[float | None] = Variable(
    "DDP_UTILS_TIMEOUT", _seconds, None, SECONDS, "the process group's timeout, instead of torch's"
)
OVERSUBSCRIBE: Variable[bool] = Variable(
    "DDP_UTILS_OVERSUBSCRIBE", _flag, False, FLAG, "let several ranks share one device"
)
DEBUG: Variable[bool] = Variable(
    "DDP_UTILS_DEBUG", _flag, False, FLAG, "compare what the ranks do before each collective"
)
DEBUG_WAIT: Variable[float] = Variable(
    "DDP_UTILS_DEBUG_WAIT",
    _seconds,
    30.0,
    SECONDS,
    "how long a rank may wait, under DDP_UTILS_DEBUG, before every rank's stack is printed",
)
QUIET: Variable[bool] = Variable(
    "DDP_UTILS_QUIET", _flag, False, FLAG, "do not print the one line at the start"
)

VARIABLES: tuple[Variable[object], ...] = (
    LAUNCHER,  # type: ignore[assignment]  # Variable is invariant only because of its parser
    NPROC,
    START_METHOD,
    OUTPUT,
    LOG_DIR,
    GRACE,
    STOP_GRACE,
    TIMEOUT,
    OVERSUBSCRIBE,
    DEBUG,
    DEBUG_WAIT,
    QUIET,
)

STARTED_BY_US = "DDP_UTILS_STARTED_RANK"
"""Internal: set to ``1`` in the ranks that this package started, beside torchrun's variables."""
