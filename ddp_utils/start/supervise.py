"""How does the parent wait for its ranks, and what does it do when one of them, or a user, ends?

One loop over sockets and pipes, without threads: reports of the ranks, their output, their
ends, and signals to this process.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from ddp_utils.ground import settings
from ddp_utils.ground.errors import RankEnd, RankFailedError, StartError
from ddp_utils.start import server, verdict
from ddp_utils.start.entry import STACKS_SIGNAL, Job
from ddp_utils.start.output import LineForwarder, Outputs
from ddp_utils.start.starter import ServerHandle
from ddp_utils.start.transport import FrameReader, dumps, loads

__all__ = ["Supervisor"]

PATIENCE = 1.0
"""How long a lost peer waits for the report of the rank that it lost."""


@dataclass
class _Rank:
    """What the parent knows of one rank."""

    local_rank: int
    channel: socket.socket
    stacks: IO[bytes]
    forwarders: list[LineForwarder]
    reader: FrameReader = field(default_factory=FrameReader)
    reported: RankEnd | None = None
    payload: bytes = b""
    """The pickled value or exception."""
    end: RankEnd | None = None
    """Set once the process is gone."""
    told_to_end: bool = False

    def listen(self) -> bool:
        """Take in what has come over the channel; False where nothing more will come."""
        try:
            data = self.channel.recv(2**20)
        except (BlockingIOError, ConnectionResetError):
            return False
        for payload in self.reader.feed(data):
            self.reported, self.payload = loads(payload)
        return data != b""


class Supervisor:
    """Runs one job on one server."""

    def __init__(
        self, handle: ServerHandle, job: Job, outputs: Outputs, timeout: float | None = None
    ) -> None:
        self._server = handle
        self._job = job
        self._outputs = outputs
        self._timeout = timeout
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._replies = FrameReader()
        self._swept = False
        self._signal: int | None = None
        self._deadline: float | None = None
        self._stacks = ""

    def run(self) -> list[Any]:
        """Start the ranks, wait for all, and return their values by local rank.

        Raises:
            RankFailedError: a rank failed.
            KeyboardInterrupt: this process was interrupted; the ranks have ended.
        """
        with ExitStack() as stack:
            stack.callback(self._close)
            signals = stack.enter_context(_caught_signals())
            self._selector.register(
                signals, selectors.EVENT_READ, lambda: self._on_signals(os.read(signals, 64))
            )
            self._selector.register(self._server.control, selectors.EVENT_READ, self._on_server)
            self._start()
            self._wait()
            self._sweep()
        return self._conclude()

    def _start(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(dumps(self._job))
            file.flush()
            server.send(self._server.control, ("job",), [file.fileno()])
        for local_rank in range(self._job.nproc):
            ours, theirs = socket.socketpair()
            streams, forwarders = self._outputs.open(local_rank)
            stacks = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the rank's other files
            message = ("start", local_rank, self._server.forks)
            given = [theirs.fileno(), *streams, stacks.fileno()]
            server.send(self._server.control, message, given)
            theirs.close()
            for stream in streams:
                os.close(stream)
            rank = _Rank(local_rank, ours, stacks, forwarders)
            self._ranks.append(rank)
            self._watch(rank)

    def _watch(self, rank: _Rank) -> None:
        self._selector.register(rank.channel, selectors.EVENT_READ, lambda: self._on_report(rank))
        for forwarder in rank.forwarders:
            self._selector.register(
                forwarder.source, selectors.EVENT_READ, lambda f=forwarder: self._on_output(rank, f)
            )

    def _wait(self) -> None:
        """Run the loop until every rank's process is gone."""
        limit = None if self._timeout is None else time.monotonic() + self._timeout
        while any(rank.end is None for rank in self._ranks):
            now = time.monotonic()
            self._decide(now, limit)
            until = [moment for moment in (self._deadline, limit) if moment is not None]
            if self._waiting_for_cause() is not None:
                until.append(now + 0.05)
            self._turn(max(0.0, min(until) - now) if until else None)

    def _turn(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            key.data()

    def _decide(self, now: float, limit: float | None) -> None:
        """End the job where a rank has failed, and kill what has outstayed its grace."""
        if self._deadline is not None and now >= self._deadline:
            self._signal_all(signal.SIGKILL)
            self._deadline = None
        elif limit is not None and now >= limit and not self._stacks:
            self._stacks = self._collect_stacks()
            self._signal_all(signal.SIGKILL)
        elif self._is_over(now) and not any(rank.told_to_end for rank in self._ranks):
            self._end_all(signal.SIGTERM)

    def _is_over(self, now: float) -> bool:
        ends = [end for rank in self._ranks if (end := rank.end or rank.reported) is not None]
        if any(verdict.is_failure(end) and not end.lost_peer for end in ends):
            return True
        lost = self._waiting_for_cause()
        return lost is not None and now - self._job.started - lost.time > PATIENCE

    def _waiting_for_cause(self) -> RankEnd | None:
        """Return the first report of a lost peer: the rank that it lost may still be reporting."""
        lost = [rank.reported for rank in self._ranks if rank.reported and rank.reported.lost_peer]
        return min(lost, key=lambda end: end.time, default=None)

    def _end_all(self, number: int) -> None:
        """Ask the ranks to end, and give them the grace to do so."""
        self._signal_all(number)
        self._deadline = time.monotonic() + settings.GRACE.get(self._job.environ)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.end is None and (rank.reported is None or number == signal.SIGKILL):
                rank.told_to_end = True
                server.send(self._server.control, ("signal", rank.local_rank, number), [])

    def _on_signals(self, numbers: bytes) -> None:
        """Pass a first signal on; a second one ends everything at once."""
        for number in numbers:
            if self._signal is None:
                self._signal = number
                self._end_all(number)
            else:
                self._signal_all(signal.SIGKILL)

    def _on_server(self) -> None:
        try:
            data = self._server.control.recv(2**16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._server_is_gone()
            return
        for payload in self._replies.feed(data):
            what, *details = loads(payload)
            if what == "ended":
                self._on_end(*details)
            elif what == "swept":
                self._swept = True

    def _server_is_gone(self) -> None:
        """Its death ends every rank: the kernel sees to it."""
        self._selector.unregister(self._server.control)
        self._swept = True
        for rank in self._ranks:
            if rank.end is None:
                self._on_end(rank.local_rank, -signal.SIGKILL, time.monotonic())

    def _on_report(self, rank: _Rank) -> None:
        if rank.end is None and not rank.listen():
            self._selector.unregister(rank.channel)

    def _on_output(self, rank: _Rank, forwarder: LineForwarder) -> None:
        if rank.end is None and not forwarder.read():
            self._selector.unregister(forwarder.source)

    def _on_end(self, local_rank: int, code: int, moment: float) -> None:
        """Note that a rank's process is gone, after reading what it has still said."""
        rank = self._ranks[local_rank]
        if rank.channel in self._selector.get_map():
            self._selector.unregister(rank.channel)
        rank.channel.setblocking(False)  # what the rank has started may keep it open
        while rank.listen():
            pass
        for forwarder in rank.forwarders:
            if forwarder.source in self._selector.get_map():
                self._selector.unregister(forwarder.source)
            forwarder.finish()
        rank.end = self._end_of(rank, code, moment - self._job.started)
        rank.channel.close()

    def _end_of(self, rank: _Rank, code: int, moment: float) -> RankEnd:
        number = self._job.first_rank + rank.local_rank
        reported = rank.reported
        name = verdict.signal_name(-code) if code < 0 else None
        if reported is not None and (reported.kind != "returned" or code == 0 or rank.told_to_end):
            return reported
        if rank.told_to_end:
            return RankEnd(number, "ended", moment, None if name else code, name)
        kind: Literal["killed", "exited"] = "killed" if name else "exited"
        after = " after it had returned" if reported is not None else ""
        tail = self._outputs.tail(number)
        return RankEnd(number, kind, moment, None if name else code, name, after, tail)

    def _sweep(self) -> None:
        """Let the server clear away what the ranks have left behind."""
        grace = settings.GRACE.get(self._job.environ)
        failed = self._root() is not None or self._signal is not None
        if self._swept:
            return
        server.send(self._server.control, ("sweep", 0.0 if failed else grace, grace), [])
        while not self._swept:
            self._turn(None)

    def _close(self) -> None:
        """Close everything; on the way out of an exception the ranks go with the server."""
        self._selector.close()
        for rank in self._ranks:
            rank.channel.close()
            rank.stacks.close()
        if not self._swept:
            self._server.close()

    def _collect_stacks(self) -> str:
        """Return where every rank's threads are, also those that wait in a collective."""
        running = [rank for rank in self._ranks if rank.end is None]
        for rank in running:
            server.send(self._server.control, ("signal", rank.local_rank, STACKS_SIGNAL), [])
        settled = time.monotonic() + 2.0
        while time.monotonic() < settled and not all(_size(rank.stacks) for rank in running):
            self._turn(0.05)
        self._turn(0.1)
        texts = []
        for rank in running:
            rank.stacks.seek(0)
            text = rank.stacks.read().decode("utf-8", "replace").rstrip()
            texts.append(f"Stacks of rank {self._job.first_rank + rank.local_rank}:\n{text}")
        return "\n\n".join(texts)

    def _root(self) -> RankEnd | None:
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        if self._stacks:
            return next(end for end in ends if end.kind in ("ended", "killed"))
        return verdict.root_cause(ends)

    def _conclude(self) -> list[Any]:
        """Return the values, or raise what the job's end amounts to."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            self._server.close()
            os.kill(os.getpid(), self._signal)  # end as if it had not been caught
            raise SystemExit(128 + self._signal)
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        root = self._root()
        if root is None:
            return [None if not rank.payload else loads(rank.payload) for rank in self._ranks]
        if self._stacks:
            message = f"the ranks did not end within {self._timeout:g} s\n\n{self._stacks}"
            raise RankFailedError(message, rank=root.rank, failures=ends)
        failed = self._ranks[root.rank - self._job.first_rank]
        cause = loads(failed.payload) if failed.payload and root.kind == "raised" else None
        if isinstance(cause, StartError):
            raise cause  # the same on every rank, and not of its making
        message = verdict.tell(root, ends)
        raise RankFailedError(message, rank=root.rank, cause=cause, failures=ends) from cause


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


@contextmanager
def _caught_signals() -> Iterator[int]:
    """Yield a descriptor from which the numbers of SIGINT and SIGTERM can be read as they come.

    On the main thread only; what is ignored stays ignored.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for caught in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(caught) is not signal.SIG_IGN:
                before[caught] = signal.signal(
                    caught, lambda number, stack: os.write(write, bytes([number])) and None
                )
    try:
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
