"""Where does a call stand: at which line of the user's code, in which section, after which epoch?

Floor 4. Collectives ask here before they talk: one that is called where only one rank runs would
wait for ever for the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from ddp_utils.ground.errors import OneRankSectionError
from ddp_utils.world.world import get_rank

__all__ = [
    "Section",
    "call_site",
    "last_epoch",
    "note_epoch",
    "one_rank_section",
    "refuse_in_section",
]

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCHS = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PASSED_THROUGH = (OURS, TORCHS, contextlib.__file__)
"""Torch too: it is what calls the forward of a wrapped model."""


@dataclass(frozen=True)
class Section:
    """A stretch of code that not all ranks run, or not at the same time."""

    name: str
    site: str
    excludes: bool
    """Ranks that are not in it never come to it, as with ``rank_zero_only``; under
    ``rank_zero_first`` they all do, one after the other."""


_sections: ContextVar[tuple[Section, ...]] = ContextVar("ddp_utils.sections", default=())


@contextlib.contextmanager
def one_rank_section(section: Section) -> Iterator[None]:
    """Let collectives know, as long as the block runs, that they would wait in vain."""
    token = _sections.set((*_sections.get(), section))
    try:
        yield
    finally:
        _sections.reset(token)


def refuse_in_section(operation: str, *, in_turn: bool = False) -> None:
    """Raise if ``operation`` needs other ranks that will not come.

    Args:
        operation: What was called.
        in_turn: It may stand in a section that all ranks come to, one after the other.

    Raises:
        OneRankSectionError: names both lines.
    """
    for section in _sections.get():
        if section.excludes or not in_turn:
            raise OneRankSectionError(
                f"rank {get_rank()} called {operation} at {call_site()} inside {section.name} "
                f"({section.site}), which the other ranks do not run at that time: they would "
                f"never come to {operation}, and this rank would wait for them. Call it outside; "
                "to hand rank zero's result to all ranks, use rank_zero_only(broadcast=True)."
            )


def call_site() -> str:
    """Return ``file:line`` of the innermost frame that is neither this package's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(PASSED_THROUGH) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_last_epoch: int | None = None


def note_epoch(epoch: int | None) -> None:
    """Remember that a pass over data, of this epoch, has been walked to its end; None: no pass."""
    global _last_epoch
    _last_epoch = epoch


def last_epoch() -> int | None:
    """Return the epoch of the pass over data that ended last here, None before any has."""
    return _last_epoch
