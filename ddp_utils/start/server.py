"""What does the process do that starts ranks, waits for them, and clears up after them?

It has one thread and no state of the user's that it would touch. It is the parent of all ranks
of a job: it ends them when its own parent is gone, and whatever they started ends up as its
children, so that nothing outlives a job. One job at a time.
"""

from __future__ import annotations

import array
import fcntl
import gc
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from typing import Any, NoReturn

from ddp_utils.start import entry
from ddp_utils.start.descendants import (
    become_reaper,
    gone_within,
    kill_descendants,
    reap_others,
)
from ddp_utils.start.transport import FrameReader, dumps, frame, loads

__all__ = [
    "above_standard",
    "cover_descriptors",
    "interpreter_flags",
    "main",
    "receive",
    "send",
    "serve",
    "thread_count",
]


class _Forked:
    """A rank in a fork of this process."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def exit_code(self) -> int | None:
        code: int | None = self._process.exitcode
        if code is not None:
            self._process.close()  # and with it two descriptors
        return code


class _Executed:
    """A rank in an interpreter of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()


def send(control: socket.socket, message: tuple[Any, ...], descriptors: list[int]) -> None:
    """Send a message with open files attached."""
    data = frame(dumps(message))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    sent = control.sendmsg([data], [rights] if descriptors else [])
    control.sendall(data[sent:])


def receive(control: socket.socket) -> tuple[tuple[Any, ...], list[int]] | None:
    """Wait for a message and its open files; None when the other side is gone."""
    reader = FrameReader()
    descriptors: list[int] = []
    need = 8
    while True:
        data, new, _, _ = socket.recv_fds(control, need, 16)
        if not data:
            return None
        descriptors += new
        if need == 8 and len(data) == 8:
            need = int.from_bytes(data, "big")
        for payload in reader.feed(data):
            return loads(payload), descriptors


def main(control_fd: int, preload: list[str]) -> NoReturn:
    """Serve as an interpreter of its own, after importing the modules named in ``preload``."""
    for name in preload:
        try:
            __import__(name)
        except BaseException:  # a module may call sys.exit
            pass  # the rank that needs it will raise the same, where it can be told
    serve(socket.socket(fileno=control_fd))


def serve(control: socket.socket) -> NoReturn:
    """Start ranks at the word of the process at the other end, until that is gone."""
    try:
        _shut_out_signals()
        sys.settrace(None)  # a debugger or a coverage tool is at work in the parent, not here
        sys.setprofile(None)
        become_reaper()
        Server(control).run()
    except BaseException:
        traceback.print_exc()
    finally:
        kill_descendants(signal.SIGKILL)
        os._exit(0)


def _shut_out_signals() -> None:
    """Drop the parent's handlers, and let nothing end this process: who would end the ranks?

    What would end it is blocked, not ignored: a signal to a rank that has just been forked then
    waits until the rank is ready for it.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT, *entry.ENDING])


def cover_descriptors(keep: int) -> None:
    """Put /dev/null in the place of every open file inherited from the parent, but ``keep``.

    Closed, their numbers would be given to new files, which the inherited objects that own the
    numbers would close when they are collected.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number not in (keep, null, 2):
            try:
                os.fstat(number)
            except OSError:
                continue  # the listing's own descriptor
            try:
                os.dup2(null, number, inheritable=number < 3)
            except OSError:  # it is above a limit on open files that was lowered after its opening
                os.close(number)  # then no new file can get its number
    os.close(null)


class Server:
    """The loop: messages from the parent, ends of children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, _Forked | _Executed] = {}  # by local rank, while they run
        self._job: entry.Job | None = None
        self._job_fd = -1
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda number, stack: None)
        signal.set_wakeup_fd(self._wake_write)

    def run(self) -> None:
        """Answer until the parent is gone."""
        from ddp_utils.ground._torch_private import fork_is_poisoned

        poisoned = "torch" in sys.modules and fork_is_poisoned()
        self._tell("ready", poisoned, threads_after_a_fork())
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake_read:
                        os.read(self._wake_read, 4096)
                        self._reap()
                    elif not self._obey():
                        return

    def _tell(self, *message: Any) -> None:
        try:
            send(self._control, message, [])
        except OSError:
            pass  # the parent is gone; the loop is about to see it

    def _obey(self) -> bool:
        received = receive(self._control)
        if received is None:
            return False
        (what, *details), descriptors = received
        if what == "job":
            self._take_job(*details, *descriptors)
        elif what == "start":
            self._start(*details, *descriptors)
        elif what == "signal":
            self._signal(*details)
        elif what == "sweep":
            self._sweep(*details)
        # "hurry" has done its work by cutting a sweep short
        return True

    def _take_job(self, job_fd: int) -> None:
        self._job = entry.read_job(job_fd)
        self._job_fd = job_fd

    def _start(self, local_rank: int, forks: bool, *descriptors: int) -> None:
        assert self._job is not None
        start = self._fork if forks else self._execute
        self._ranks[local_rank] = start(self._job, local_rank, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def _fork(self, job: entry.Job, local_rank: int, descriptors: tuple[int, ...]) -> _Forked:
        _warm_up(job.uses_ddp)
        rank = job.first_rank + local_rank
        process = multiprocessing.get_context("fork").Process(
            target=self._in_rank,
            args=(job, local_rank, descriptors, os.getpid()),
            name=f"rank {rank}",
        )
        process.start()
        return _Forked(process)

    def _in_rank(
        self, job: entry.Job, local_rank: int, descriptors: tuple[int, ...], server: int
    ) -> None:
        for descriptor in (self._wake_read, self._wake_write, self._job_fd):
            os.close(descriptor)
        self._control.close()
        channel, stdin, stdout, stderr, stacks = descriptors
        entry.run_forked(job, local_rank, (channel, stdin, stdout, stderr, stacks), server)

    def _execute(self, job: entry.Job, local_rank: int, descriptors: tuple[int, ...]) -> _Executed:
        channel, stdin, stdout, stderr, stacks = descriptors
        numbers = tuple(above_standard(number) for number in (self._job_fd, channel, stacks))
        code = (
            f"import sys; sys.path[:] = {job.path!r}; from ddp_utils.start.entry import main; "
            f"main({', '.join(map(str, numbers))}, {local_rank}, {os.getpid()})"
        )
        try:
            process = subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-c", code],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=numbers,
                cwd=job.cwd,
                env=job.environ_of(local_rank),
            )
        finally:
            for number in numbers:
                os.close(number)
        return _Executed(process)

    def _signal(self, local_rank: int, number: int) -> None:
        if local_rank in self._ranks:  # not reaped, so that its pid is nobody else's
            os.kill(self._ranks[local_rank].pid, number)

    def _reap(self) -> None:
        """Tell of the ranks that have ended, and take leave of orphans."""
        for local_rank, rank in list(self._ranks.items()):
            code = rank.exit_code()
            if code is not None:
                del self._ranks[local_rank]
                self._tell("ended", local_rank, code, time.monotonic())
        reap_others({rank.pid for rank in self._ranks.values()})

    def _sweep(self, wait: float, grace: float) -> None:
        """End what the ranks have left behind: leave it ``wait`` seconds, then ``grace``.

        Any word from the parent meanwhile, and its end, means that there is no time for that.
        """
        self._reap()
        if not gone_within(wait, unless=self._control):
            kill_descendants(signal.SIGTERM)
            if not gone_within(grace, unless=self._control):
                kill_descendants(signal.SIGKILL)
                gone_within(grace)
        self._ranks.clear()
        if self._job_fd >= 0:
            os.close(self._job_fd)
        self._job, self._job_fd = None, -1
        self._tell("swept")


@cache
def _warm_up(for_ddp: bool) -> None:
    """Do here, once, what each rank would do first, and keep pages of its own for.

    The first wrapped model of a rank would import for a second.
    """
    try:
        from ddp_utils.ground._torch_private import load_what_ddp_loads
        from ddp_utils.start import inherited
        from ddp_utils.talk import stacks  # noqa: F401  # for the ranks

        inherited.forget_state()  # torch reads its own source lines here
        if for_ddp:
            load_what_ddp_loads()
    except Exception:
        pass  # the rank that needs it will raise the same, where it can be told
    gc.freeze()  # a collection in a rank would touch, and so copy, every shared page


def above_standard(descriptor: int) -> int:
    """Return a copy of a descriptor whose number is not that of a standard stream."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def thread_count() -> int:
    """Return how many threads this process has, those of libraries included."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def threads_after_a_fork() -> int:
    """Return how many threads are left here when forking.

    NumPy's OpenBLAS ends its threads around a fork, so that only a fork can tell.
    """
    if thread_count() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return thread_count()


def interpreter_flags() -> list[str]:
    """Return the command-line flags that make a new interpreter like this one."""
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in sys._xoptions.items()
    ]
    letters = {
        "O": sys.flags.optimize,
        "b": sys.flags.bytes_warning,
        "B": sys.flags.dont_write_bytecode,
        "I": sys.flags.isolated,
        "E": sys.flags.ignore_environment,
        "s": sys.flags.no_user_site,
        "S": sys.flags.no_site,
        "P": getattr(sys.flags, "safe_path", False),
    }
    return flags + ["-" + letter * int(count) for letter, count in letters.items() if count]
