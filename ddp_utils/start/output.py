"""What becomes of the output of each rank?

Rank zero keeps the parent's own terminal. The others write into a pipe, from which whole lines
come out behind their rank, or into a file, or straight through.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO

__all__ = ["LineForwarder", "Outputs"]

TAIL = 40
"""How many lines of a failed rank's file are shown."""

ATOMIC = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512

LONGEST = 2**16
"""A line is cut after so many bytes, so that no output can fill the memory."""


class LineForwarder:
    """Writes what comes out of one pipe as whole lines behind a prefix."""

    def __init__(self, source: int, stream_name: str, prefix: str) -> None:
        self.source = source
        self._stream_name = stream_name
        self._prefix = prefix
        self._rest = b""

    def read(self) -> bool:
        """Forward what is there now; False at the end of the pipe."""
        try:
            data = os.read(self.source, 2**16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)
        return bool(data)

    def finish(self) -> None:
        """Forward what is left in the pipe now that its rank has ended, and close it.

        Not until the pipe's end: what the rank has started may hold it open for ever.
        """
        os.set_blocking(self.source, False)
        while True:
            try:
                data = os.read(self.source, 2**16)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._write([*lines, rest] if rest else lines)
        os.close(self.source)

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        stream: TextIO | None = getattr(sys, self._stream_name)
        if stream is None:
            return
        try:
            for text in _atomic(self._prefix, lines):
                stream.write(text)
                stream.flush()
        except (OSError, ValueError):
            pass  # the parent's stream is closed: the rank must not fail for it


def _atomic(prefix: str, lines: list[bytes]) -> Iterator[str]:
    """Yield the lines in pieces that a pipe takes whole, since rank zero writes to it as well.

    Of a progress bar that overwrites itself, the last state is the line.
    """
    piece = ""
    for line in lines:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
        text = f"{prefix}{shown}\n"
        if piece and len(piece) + len(text) > ATOMIC:
            yield piece
            piece = ""
        piece += text
    if piece:
        yield piece


class Outputs:
    """The standard streams of one job's ranks, by local rank."""

    def __init__(self, mode: str, log_dir: str | None, first_rank: int) -> None:
        self._mode = mode
        self._first_rank = first_rank
        self._log_dir = log_dir
        self.files: dict[int, str] = {}

    def open(self, local_rank: int) -> tuple[list[int], list[LineForwarder]]:
        """Return a rank's stdin, stdout and stderr, to be closed once it has them, and readers."""
        rank = self._first_rank + local_rank
        if rank == 0:
            return [_dup_or_null(0, os.O_RDONLY), *_terminal()], []
        null = os.open(os.devnull, os.O_RDONLY)
        if self._mode == "all":
            return [null, *_terminal()], []
        if self._mode == "rank_zero":
            return [null, *self._file(rank)], []
        streams, forwarders = [null], []
        for name in ("stdout", "stderr"):
            source, sink = os.pipe()
            streams.append(sink)
            forwarders.append(LineForwarder(source, name, f"[rank {rank}] "))
        return streams, forwarders

    def tail(self, rank: int) -> str:
        """Return the last lines of a rank's file, nothing where it has none."""
        if rank not in self.files:
            return ""
        with open(self.files[rank], errors="replace") as file:
            lines = file.readlines()[-TAIL:]
        return f"The last lines of {self.files[rank]}:\n" + "".join(lines)

    def _file(self, rank: int) -> list[int]:
        if not self.files:
            self._log_dir = self._log_dir or tempfile.mkdtemp(prefix="ddp_utils-")
            os.makedirs(self._log_dir, exist_ok=True)
            print(f"ddp_utils: the other ranks write to {self._log_dir}", file=sys.stderr)
        assert self._log_dir is not None
        self.files[rank] = os.path.join(self._log_dir, f"rank{rank}.log")
        log = os.open(self.files[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        return [log, os.dup(log)]


def _terminal() -> list[int]:
    return [_dup_or_null(1, os.O_WRONLY), _dup_or_null(2, os.O_WRONLY)]


def _dup_or_null(number: int, flags: int) -> int:
    """Return a copy of an open file of this process, /dev/null where it has been closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, flags)
