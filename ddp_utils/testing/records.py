"""What does a rank tell of the test that it runs, and how does the parent read it?

Each rank appends records to a file of its own as things happen, so that a rank that crashes or
is killed has still told everything up to then. Its output goes into two more files.
"""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Exit", "Files", "Phase", "Record", "Subtest", "Trouble", "Warned", "shorten"]

PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True)
class Phase:
    """The report of the setup, the call or the teardown of the test on one rank."""

    report: dict[str, Any]
    """As pytest serializes it."""
    moment: float
    """By the clock that all processes of a machine share."""
    raised: bool
    """An exception ended the phase; a strict xfail that passes is a failure without one."""
    lost_peer: bool
    """The exception came out of a collective that lost another rank: an effect, not a cause."""
    written: tuple[int, int]
    """Sizes of the files of standard output and standard error at the end of the phase."""


@dataclass(frozen=True)
class Subtest:
    """The report of one subtest."""

    report: dict[str, Any]


@dataclass(frozen=True)
class Warned:
    """A warning, in the parts from which it can be made again."""

    text: str
    category: str
    """Its module and name: the class itself may be one that only a rank can import."""
    filename: str
    lineno: int
    when: str
    nodeid: str
    location: tuple[str, int, str] | None


@dataclass(frozen=True)
class Trouble:
    """Why the rank could not run the test at all."""

    text: str


@dataclass(frozen=True)
class Exit:
    """``pytest.exit()`` was called."""

    reason: str
    returncode: int | None


Record: TypeAlias = Phase | Subtest | Warned | Trouble | Exit


@dataclass(frozen=True)
class Files:
    """The files of one rank, in a folder that the parent made for one test."""

    folder: str
    rank: int

    def path(self, kind: str) -> Path:
        """Return the path of one of the files."""
        return Path(self.folder, f"{self.rank}.{kind}")

    def append(self, record: Record) -> None:
        """Tell the parent something."""
        payload = pickle.dumps(record)
        with open(self.path("records"), "ab") as file:
            file.write(payload)

    def read(self) -> list[Record]:
        """Return all that this rank has told; its last record may have been cut short."""
        records: list[Record] = []
        try:
            with open(self.path("records"), "rb") as file:
                while True:
                    records.append(pickle.load(file))
        except (OSError, EOFError, pickle.UnpicklingError):
            return records

    def sizes(self) -> tuple[int, int]:
        """Return how much has been written to standard output and standard error."""
        out, err = (self.path(kind) for kind in ("out", "err"))
        return (out.stat().st_size, err.stat().st_size) if out.exists() else (0, 0)

    def output(self, kind: str, start: int, end: int | None) -> str:
        """Return a part of the output."""
        try:
            content = self.path(kind).read_bytes()
        except OSError:
            return ""
        return content[start:end].decode("utf-8", "replace")

    def mark_done(self) -> None:
        """Say that this rank has nothing more to do."""
        self.path("done").touch()

    def all_done(self, world_size: int) -> bool:
        """Whether every rank has nothing more to do."""
        return all(Files(self.folder, rank).path("done").exists() for rank in range(world_size))

    def stopped_at(self) -> str:
        """Return the user's line at which this rank was when it was told to end."""
        stacks = shorten(self.output("stacks", 0, None))
        frames = re.findall(r'File "(.+)", line (\d+) in ', stacks)
        own = [frame for frame in frames if not _is_library(frame[0])]
        return f"{os.path.relpath(own[0][0])}:{own[0][1]}" if own else ""


def shorten(text: str) -> str:
    """Leave out of stacks, as faulthandler writes them, what called the test."""
    lines, skips = [], False
    for line in text.splitlines():
        frame = line.startswith(('  File "', "  ..."))
        skips = frame and (skips or "/_pytest/" in line)
        if not skips:
            lines.append(line)
    return "\n".join(lines)


def _is_library(filename: str) -> bool:
    parts = Path(filename).parts
    standard = filename.startswith((os.path.dirname(os.__file__), "<"))
    return standard or "site-packages" in parts or "ddp_utils" in parts
