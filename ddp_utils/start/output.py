"""What becomes of the output of each rank?

Rank zero keeps the parent's own terminal. The others write into a pipe, from which whole lines
come out behind their rank, or into a file, or straight through.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import TextIO

from ddp_utils.ground.saying import say

__all__ = ["Forwarder", "Outputs"]

TAIL = 40
"""How many lines of a failed rank's file are shown."""

ATOMIC = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512

PIPE_SIZE = 2**16
LARGEST_PIPE = 2**20

LONGEST = 2**16
"""A line is cut after so many bytes, so that no output can fill the memory."""


class Forwarder:
    """Writes what comes out of one rank's pipe to a stream of this process, as it comes."""

    def __init__(self, source: int, stream_name: str) -> None:
        self.source = source
        self._stream_name = stream_name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Forward what is there now; False at the end of the pipe."""
        try:
            data = os.read(self.source, PIPE_SIZE)
        except BlockingIOError:
            return False
        self._take(data)
        return bool(data)

    def finish(self) -> None:
        """Forward what is left in the pipe now that its rank has ended, and close it.

        Not until the pipe's end: what the rank has started may hold it open, and write for ever.
        """
        os.set_blocking(self.source, False)
        for _ in range(LARGEST_PIPE // PIPE_SIZE):
            if not self.read():
                break
        self._end()
        os.close(self.source)

    def _take(self, data: bytes) -> None:
        self._write([self._decoder.decode(data)])

    def _end(self) -> None:
        self._write([self._decoder.decode(b"", final=True)])

    def _write(self, pieces: Iterable[str]) -> None:
        stream: TextIO | None = getattr(sys, self._stream_name)
        if stream is None:
            return
        try:
            for text in pieces:
                try:
                    stream.write(text)
                except UnicodeEncodeError as error:
                    stream.write(text.encode(error.encoding, "backslashreplace").decode())
                stream.flush()
        except (OSError, ValueError):
            pass  # the parent's stream is closed: the rank must not fail for it


class LineForwarder(Forwarder):
    """Writes it as whole lines behind a prefix."""

    def __init__(self, source: int, stream_name: str, prefix: str) -> None:
        super().__init__(source, stream_name)
        self._prefix = prefix
        self._rest = b""

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        self._write(_atomic(self._prefix, lines))

    def _end(self) -> None:
        if self._rest:
            self._write(_atomic(self._prefix, [self._rest]))


def _atomic(prefix: str, lines: list[bytes]) -> Iterator[str]:
    """Yield the lines in pieces that a pipe takes whole, since rank zero writes to it as well.

    Of a progress bar that overwrites itself, the last state is the line. A logger may have named
    the rank already.
    """
    piece = ""
    for line in lines:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
        text = f"{shown}\n" if shown.startswith(prefix) else f"{prefix}{shown}\n"
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

    def open(self, local_rank: int) -> tuple[list[int], list[Forwarder]]:
        """Return a rank's stdin, stdout and stderr, to be closed once it has them, and readers."""
        rank = self._first_rank + local_rank
        stdin = _dup_or_null(0, os.O_RDONLY) if rank == 0 else os.open(os.devnull, os.O_RDONLY)
        if rank != 0 and self._mode == "rank_zero":
            return [stdin, *self._file(rank)], []
        prefix = f"[rank {rank}] " if rank != 0 and self._mode == "prefix" else ""
        streams, forwarders = [stdin], []
        for number, name in ((1, "stdout"), (2, "stderr")):
            if not prefix and _is_descriptor(name, number):
                streams.append(_dup_or_null(number, os.O_WRONLY))
                continue
            source, sink = os.pipe()
            streams.append(sink)
            forwarders.append(
                LineForwarder(source, name, prefix) if prefix else Forwarder(source, name)
            )
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
            say(f"ddp_utils: the other ranks write to {self._log_dir}")
        assert self._log_dir is not None
        self.files[rank] = os.path.join(self._log_dir, f"rank{rank}.log")
        log = os.open(self.files[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        return [log, os.dup(log)]


def _is_descriptor(name: str, number: int) -> bool:
    """Whether a stream of this process writes to its usual descriptor.

    In a notebook, or where a test captures output, it does not, and only this process can write
    to it.
    """
    stream: TextIO | None = getattr(sys, name)
    try:
        return stream is None or stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False


def _dup_or_null(number: int, flags: int) -> int:
    """Return a copy of an open file of this process, /dev/null where it has been closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, flags)
