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
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, Literal, NoReturn

from ddp_utils.ground import settings
from ddp_utils.ground.errors import RankEnd, RankFailedError, StartError
from ddp_utils.start import server, verdict
from ddp_utils.start.caught_signals import catching_signals
from ddp_utils.start.entry import REPEAT, STACKS_SIGNAL, Job
from ddp_utils.start.machines import OtherMachines
from ddp_utils.start.output import Forwarder, Outputs
from ddp_utils.start.starter import ServerHandle
from ddp_utils.start.transport import FrameReader, dumps, loads

__all__ = ["JobStopped", "Supervisor"]

PATIENCE = 1.0
"""How long a lost peer waits for the report of the rank that it lost, in seconds."""

FAR_PATIENCE = 5.0
"""The same where the other rank may be on another machine."""


class JobStopped(SystemExit):
    """All ranks have left because they were asked to stop: the command ends with 143.

    That is what schedulers expect. ``values`` are what the ranks returned.
    """

    def __init__(self, values: list[Any]) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.values = values


@dataclass
class _Rank:
    """What the parent knows of one rank."""

    local_rank: int
    channel: socket.socket
    stacks: IO[bytes]
    forwarders: list[Forwarder]
    reader: FrameReader = field(default_factory=FrameReader)
    reported: RankEnd | None = None
    payload: bytes = b""
    """The pickled value or exception."""
    end: RankEnd | None = None
    """Set once the process is gone."""
    told_to_end: bool = False
    armed: tuple[int, ...] = ()
    """Signals that do not end the rank but ask it to save and leave."""
    stopped: bool = False
    """Whether it has left because of such a signal."""

    def listen(self) -> bool:
        """Take in what has come over the channel; False where nothing more will come."""
        try:
            data = self.channel.recv(2**20)
        except (BlockingIOError, ConnectionResetError):
            return False
        for payload in self.reader.feed(data):
            what, detail = loads(payload)
            if what == "armed":
                self.armed = detail
            elif what == "stopped":
                self.stopped = True
            else:
                self.reported, self.payload = what, detail
        return data != b""


class Supervisor:
    """Runs one job on one server."""

    def __init__(
        self,
        handle: ServerHandle,
        job: Job,
        outputs: Outputs,
        *,
        timeout: float | None = None,
        machines: OtherMachines | None = None,
    ) -> None:
        self._server = handle
        self._job = job
        self._outputs = outputs
        self._timeout = timeout
        self._machines = machines
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._replies = FrameReader()
        self._swept = False
        self._signal: int | None = None
        self._signalled_at = 0.0
        self._ending = False
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
            self._caught = stack.enter_context(catching_signals())
            self._selector.register(self._caught.descriptor, selectors.EVENT_READ, self._on_signals)
            self._selector.register(self._server.control, selectors.EVENT_READ, self._on_server)
            if self._machines is not None:
                self._machines.watch(self._selector)
            self._start()
            self._wait()
            self._sweep()
            self._agree_on_the_end()
        return self._conclude()

    def _start(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(dumps(self._job))
            file.flush()
            self._tell_server("job", descriptors=[file.fileno()])
        for local_rank in range(self._job.nproc):
            ours, theirs = socket.socketpair()
            streams, forwarders = self._outputs.open(local_rank)
            stacks = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the rank's other files
            given = [theirs.fileno(), *streams, stacks.fileno()]
            self._tell_server("start", local_rank, self._server.forks, descriptors=given)
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
            self._ending = True
            self._signal_all(signal.SIGKILL)
            self._deadline = None
        elif limit is not None and now >= limit and not self._stacks:
            self._stacks = self._collect_stacks()
            self._signal_all(signal.SIGKILL)
        elif not self._ending and self._is_over(now):
            self._end_all(signal.SIGTERM)

    def _is_over(self, now: float) -> bool:
        if self._machines is not None and self._machines.trouble is not None:
            return True
        ends = [end for rank in self._ranks if (end := rank.end or rank.reported) is not None]
        if any(verdict.is_failure(end) and not end.lost_peer for end in ends):
            return True
        lost = self._waiting_for_cause()
        patience = PATIENCE if self._machines is None else FAR_PATIENCE
        return lost is not None and now - self._job.started - lost.time > patience

    def _waiting_for_cause(self) -> RankEnd | None:
        """Return the first report of a lost peer: the rank that it lost may still be reporting."""
        lost = [rank.reported for rank in self._ranks if rank.reported and rank.reported.lost_peer]
        return min(lost, key=lambda end: end.time, default=None)

    def _end_all(self, number: int) -> None:
        """Ask the ranks to end, and give them the grace to do so."""
        self._ending = True
        self._signal_all(number)
        self._deadline = time.monotonic() + settings.GRACE.get(self._job.environ)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.end is None and (rank.reported is None or number == signal.SIGKILL):
                rank.told_to_end = True
                # For an armed rank its SIGTERM is a request to save, which this is not.
                given = signal.SIGHUP if number in rank.armed else number
                self._send_signal(rank, given)

    def _send_signal(self, rank: _Rank, number: int) -> None:
        self._tell_server("signal", rank.local_rank, number)

    def _tell_server(self, *message: Any, descriptors: Sequence[int] = ()) -> None:
        try:
            server.send(self._server.control, message, list(descriptors))
        except OSError:
            pass  # it is gone, with all ranks; the loop is about to see it

    def _on_signals(self) -> None:
        for number in self._caught.read():
            now = time.monotonic()
            if self._signal is not None and now - self._signalled_at < REPEAT and self._stops():
                continue  # a scheduler signals the whole group: one request
            again = self._signal is not None
            self._signal, self._signalled_at = number, now
            if again:
                self._ending = True
                self._signal_all(signal.SIGKILL)
            elif self._stops():
                self._ask_to_stop(number)
            else:
                self._end_all(number)
            if all(rank.end is not None for rank in self._ranks):
                self._tell_server("hurry")  # it may be waiting for what the ranks have left

    def _stops(self) -> bool:
        """Whether the signal that came asks the ranks to save and leave, since they are armed."""
        return any(self._signal in rank.armed for rank in self._ranks)

    def _ask_to_stop(self, number: int) -> None:
        """Pass a stop request on; the ranks may take their time."""
        for rank in self._ranks:
            if rank.end is None:
                self._send_signal(rank, number)
        grace = settings.STOP_GRACE.get(self._job.environ)
        self._deadline = None if grace is None else time.monotonic() + grace

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
        for number in rank.armed:
            self._caught.catch(number)

    def _on_output(self, rank: _Rank, forwarder: Forwarder) -> None:
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
        return RankEnd(number, kind, moment, None if name else code, name, after)

    def _sweep(self) -> None:
        """Let the server clear away what the ranks have left behind."""
        grace = settings.GRACE.get(self._job.environ)
        failed = self._root() is not None or self._ending
        if self._swept:
            return
        self._tell_server("sweep", 0.0 if failed else grace, grace)
        while not self._swept:
            self._turn(None)

    def _agree_on_the_end(self) -> None:
        """Tell the other machines how it ended here, and wait until all have ended well."""
        if self._machines is None:
            return
        root = self._root()
        if root is not None:
            self._machines.fail(f"on machine {self._job.node_rank}, {self._report(root)}")
        elif self._signal is not None:
            name = verdict.signal_name(self._signal)
            self._machines.fail(f"machine {self._job.node_rank} was ended by {name}")
        else:
            self._machines.finish()
            while not self._machines.all_done and self._machines.trouble is None:
                self._turn(None)

    def _report(self, root: RankEnd) -> str:
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        return verdict.tell(root, ends, self._job.world_size, self._outputs.tail(root.rank))

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
            self._send_signal(rank, STACKS_SIGNAL)
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
            return next((end for end in ends if end.kind in ("ended", "killed")), ends[0])
        return verdict.root_cause(ends)

    def _conclude(self) -> list[Any]:
        """Return the values, or raise what the job's end amounts to."""
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        root = self._root()
        if self._signal is not None and self._ending:
            self._end_by_signal(self._signal)
        elsewhere = None if self._machines is None else self._machines.trouble
        if elsewhere is not None and (root is None or root.lost_peer):
            rank = 0 if root is None else root.rank
            raise RankFailedError(elsewhere, rank=rank, failures=ends)
        if root is None:
            values = [_value(rank) for rank in self._ranks]
            if any(rank.stopped for rank in self._ranks):
                raise JobStopped(values)
            return values
        if self._stacks:
            message = f"the ranks did not end within {self._timeout:g} s\n\n{self._stacks}"
            raise RankFailedError(message, rank=root.rank, failures=ends)
        failed = self._ranks[root.rank - self._job.first_rank]
        cause = _exception(failed.payload) if root.kind == "raised" else None
        if isinstance(cause, StartError):
            raise cause  # the same on every rank, and not of its making
        message = self._report(root)
        raise RankFailedError(message, rank=root.rank, cause=cause, failures=ends) from cause

    def _end_by_signal(self, number: int) -> NoReturn:
        """End this process as the signal would have, had it not been caught."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        self._server.close()
        os.kill(os.getpid(), number)
        raise SystemExit(128 + number)


def _exception(payload: bytes) -> BaseException | None:
    """Return a rank's exception, None where this process cannot make it again."""
    try:
        error = loads(payload)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _value(rank: _Rank) -> Any:
    try:
        return loads(rank.payload) if rank.payload else None
    except Exception as error:
        raise StartError(
            f"local rank {rank.local_rank} returned a value that cannot be read here "
            f"({type(error).__name__}: {error}): its class must be importable in this process too"
        ) from error


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
