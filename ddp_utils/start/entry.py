"""What are the first and the last lines of a rank?

Between them: the script is imported afresh, the group is made, the function is called. What
comes of it is sent to the parent before anything is taken down, so that the cause of a failure
is told before its effects on other ranks can be.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import io
import mmap
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ddp_utils.ground import gloo_threads, settings
from ddp_utils.ground.errors import RankEnd, StartError
from ddp_utils.models import stop_signals
from ddp_utils.start import verdict
from ddp_utils.start.function import Function, Main, import_main
from ddp_utils.start.transport import dumps, frame, loads

__all__ = ["ENDING", "Job", "main", "run"]

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Asks a rank for the stacks of its threads, also while it waits in a collective."""

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a whole process group that end a rank, unless it has other plans, and no server."""

NOT_FOR_RANKS = {settings.LAUNCHER.name}
"""Who started a rank is known; set in a script that a rank starts, it still counts there."""

REPEAT = 2.0
"""A terminal and the parent may both pass on one Ctrl-C: within so many seconds it is one."""


@dataclass(frozen=True)
class Job:
    """What all ranks of one start are told."""

    function: Function
    arguments: bytes
    main: Main | None
    uses_ddp: bool
    all_results: bool
    first_rank: int
    nproc: int
    world_size: int
    node_rank: int
    num_nodes: int
    backend: str | None
    timeout: float | None
    stop_signals: tuple[int, ...]
    ignored: tuple[int, ...]
    """Signals that the parent ignores, as under nohup."""
    master_addr: str = ""
    master_port: int = 0
    started: float = field(default_factory=time.monotonic)
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    argv: list[str] = field(default_factory=lambda: list(sys.argv))

    def environ_of(self, local_rank: int) -> dict[str, str]:
        """Return one rank's environment: the parent's, and what torchrun would set."""
        inherited = {name: self.environ[name] for name in self.environ.keys() - NOT_FOR_RANKS}
        return inherited | {
            settings.STARTED_BY_US: "1",
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def read_job(descriptor: int) -> Job:
    """Return the job from its file, whose position is shared with other readers."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        job = loads(content)
    assert isinstance(job, Job)
    return job


_left_group: list[object] = []
"""The group that this rank has left. Its connections close with the process, or without this."""


def main(job_fd: int, channel_fd: int, stacks_fd: int, local_rank: int, server: int) -> None:
    """Run one rank in an interpreter that was started for it."""
    job = read_job(job_fd)
    os.close(job_fd)
    with socket.socket(fileno=channel_fd) as channel:
        code = run(job, local_rank, channel, stacks_fd, server)
    gloo_threads.let_them_rest()
    sys.exit(code)


def run_forked(
    job: Job, local_rank: int, descriptors: tuple[int, int, int, int, int], server: int
) -> None:
    """Run one rank in a process that the server has just forked for it."""
    channel, *standard, stacks = descriptors
    for target, source in enumerate(standard):
        os.dup2(source, target)
        os.close(source)
    # The parent's stream objects may be anything, a test's or a notebook's.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = _writer(1, errors="strict")
    sys.stderr = _writer(2, errors="backslashreplace")
    atexit._clear()  # those of the parent are not this rank's to run
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = run(job, local_rank, socket.socket(fileno=channel), stacks, server)
    running = [thread for thread in threading.enumerate() if not thread.daemon]
    for thread in running:  # in the order in which an interpreter ends
        if thread is not threading.current_thread():
            _left_group.clear()  # its peers must not wait for this thread
            thread.join()
    atexit._run_exitfuncs()
    sys.exit(code)


def _writer(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors=errors)


def run(job: Job, local_rank: int, channel: socket.socket, stacks_fd: int, server: int) -> int:
    """Call the job's function as one rank, tell the parent how it went, return the exit code."""
    end_with(server)
    for number in (signal.SIGINT, *ENDING):
        usual = _interrupt_once() if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in job.ignored else usual)
    if job.first_rank + local_rank > 0:
        os.setpgid(0, 0)  # rank zero keeps the terminal: elsewhere its first read would stop it
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed rank has still said its lines
    report = _Report(channel, job.first_rank + local_rank, job.started)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the server has blocked them
        _settle_in(job, local_rank)
        function, arguments = _find(job)
        return _call(job, function, arguments, report)
    except SystemExit as error:
        return report.exited(error)
    except BaseException as error:
        return report.raised(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()


def end_with(server: int) -> None:
    """Let the kernel end this process when the server that started it is gone."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)


def _settle_in(job: Job, local_rank: int) -> None:
    """Make this process look as if the script had been started in it, as this rank."""
    os.environ.clear()
    os.environ.update(job.environ_of(local_rank))
    if job.num_nodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.chdir(job.cwd)
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    from ddp_utils.start import inherited

    inherited.forget_state()
    from ddp_utils.process_group import set_threads

    set_threads(job.nproc)


def _interrupt_once() -> Any:
    """Return a SIGINT handler for which a repeat is the same Ctrl-C."""
    last = -REPEAT

    def interrupt(number: int, stack: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= REPEAT:
            raise KeyboardInterrupt

    return interrupt


def _find(job: Job) -> tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
    if job.main is not None:
        from ddp_utils.start.inherited import logging_set_up_anew

        with logging_set_up_anew():
            import_main(job.main)
    return job.function.find(), loads(job.arguments)


def _call(
    job: Job, function: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]], report: _Report
) -> int:
    from ddp_utils import process_group
    from ddp_utils.talk import stacks

    process_group.init_distributed(job.backend, timeout=job.timeout)
    if settings.DEBUG.get():
        stacks.watch()  # also for a script that calls only torch's own collectives
    stop_signals.when_armed(lambda numbers: report.tell("armed", numbers))
    if job.stop_signals:
        stop_signals.arm(job.stop_signals)
    store = process_group.shared_store()
    how = "exited"
    try:
        args, kwargs = arguments
        value = function(*args, **kwargs)
        if stop_signals.first_signal() is not None:
            report.tell("stopped", None)
        payload = _pack(value, report.rank) if job.all_results or report.rank == 0 else b""
        report.returned(payload)
        how = "returned"
    except SystemExit as error:
        if error.code in (None, 0):
            _left_group.append(process_group.leave(store, report.rank, how))
        raise
    _left_group.append(process_group.leave(store, report.rank, how))
    return 0


def _pack(value: Any, rank: int) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that cannot be sent to the process "
            f"that started it ({error}). Return plain values, arrays or tensors."
        ) from None


class _Report:
    """Tells the parent how this rank ended."""

    def __init__(self, channel: socket.socket, rank: int, started: float) -> None:
        self.rank = rank
        self._channel = channel
        self._started = started

    def returned(self, payload: bytes) -> None:
        self.tell(RankEnd(self.rank, "returned", self._now(), exit_code=0), payload)

    def exited(self, error: SystemExit) -> int:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        number = code if isinstance(code, int) else int(code is not None)
        text = "" if number == 0 else verdict.user_traceback(error)
        self.tell(RankEnd(self.rank, "exited", self._now(), exit_code=number, traceback=text), b"")
        return number

    def raised(self, error: BaseException) -> int:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        short = isinstance(error, StartError)
        end = RankEnd(
            self.rank,
            "raised",
            self._now(),
            exit_code=code,
            summary=str(error) if short else verdict.summary(error),
            traceback="" if short else verdict.user_traceback(error),
            lost_peer=verdict.comes_from_a_lost_peer(error),
        )
        self.tell(end, _pickled_exception(error))
        return code

    def _now(self) -> float:
        return time.monotonic() - self._started

    def tell(self, what: RankEnd | str, detail: object) -> None:
        try:
            self._channel.sendall(frame(dumps((what, detail))))
        except OSError:
            pass  # the parent has gone, and this process is about to go with it


def _pickled_exception(error: BaseException) -> bytes:
    """Return the exception as bytes that can be read again, or nothing where that fails."""
    try:
        payload = dumps(error)
        loads(payload)
    except Exception:
        return b""
    return payload
