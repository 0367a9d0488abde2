"""What does the process do that starts ranks, waits for them, and clears up after them?

It has one thread and no state of the user's that it would touch. It is the parent of all ranks
of a job: it ends them when its own parent is gone, and whatever they started ends up as its
children, so that nothing outlives a job. One job at a time.
"""

from __future__ import annotations

import array
import gc
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

from ddp_utils.start import entry
from ddp_utils.start.transport import FrameReader, dumps, frame, loads

__all__ = ["main", "receive", "send", "serve"]

IGNORED = (signal.SIGINT, signal.SIGPIPE, *entry.ENDING)
"""The server ends with its parent and never before: who else would end the ranks?"""


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
        except Exception:
            pass  # the rank that needs it will raise the same, where it can be told
    serve(socket.socket(fileno=control_fd))


def serve(control: socket.socket) -> NoReturn:
    """Start ranks at the word of the process at the other end, until that is gone."""
    try:
        _reset_signals()
        sys.settrace(None)  # a debugger or a coverage tool is at work in the parent, not here
        sys.setprofile(None)
        become_reaper()
        gc.freeze()  # a collection in a rank would touch, and so copy, every shared page
        Server(control).run()
    finally:
        kill_descendants(signal.SIGKILL)
        os._exit(0)


def _reset_signals() -> None:
    """Drop the parent's handlers, and ignore what must not end this process."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


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
            os.dup2(null, number, inheritable=number < 3)
    os.close(null)


def become_reaper() -> None:
    """Let orphans among the descendants become children of this process (Linux)."""
    if sys.platform == "linux":
        import ctypes

        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


class Server:
    """The loop: messages from the parent, ends of children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, int] = {}  # pid -> local rank
        self._kept: list[Any] = []  # what started them
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
        return True

    def _take_job(self, job_fd: int) -> None:
        self._job = entry.read_job(job_fd)
        self._job_fd = job_fd

    def _start(self, local_rank: int, forks: bool, *descriptors: int) -> None:
        assert self._job is not None
        start = self._fork if forks else self._execute
        process = start(self._job, local_rank, descriptors)
        self._kept.append(process)
        self._ranks[process.pid] = local_rank
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell("started", local_rank, process.pid)

    def _fork(self, job: entry.Job, local_rank: int, descriptors: tuple[int, ...]) -> Any:
        if job.uses_ddp:
            _load_for_ddp()
        rank = job.first_rank + local_rank
        process = multiprocessing.get_context("fork").Process(
            target=self._in_rank, args=(job, local_rank, descriptors), name=f"rank {rank}"
        )
        process.start()
        return process

    def _in_rank(self, job: entry.Job, local_rank: int, descriptors: tuple[int, ...]) -> None:
        for descriptor in (self._wake_read, self._wake_write, self._job_fd):
            os.close(descriptor)
        self._control.close()
        channel, stdin, stdout, stderr, stacks = descriptors
        entry.run_forked(job, local_rank, (channel, stdin, stdout, stderr, stacks), os.getppid())

    def _execute(self, job: entry.Job, local_rank: int, descriptors: tuple[int, ...]) -> Any:
        channel, stdin, stdout, stderr, stacks = descriptors
        numbers = (os.dup(self._job_fd), channel, stacks)
        code = (
            f"import sys; sys.path[:] = {job.path!r}; from ddp_utils.start.entry import main; "
            f"main({', '.join(map(str, numbers))}, {local_rank})"
        )
        try:
            return subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-c", code],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=numbers,
                cwd=job.cwd,
                env=job.environ_of(local_rank),
                restore_signals=True,
            )
        finally:
            os.close(numbers[0])

    def _signal(self, local_rank: int, number: int) -> None:
        for pid, other in self._ranks.items():
            if other == local_rank:
                os.kill(pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            local_rank = self._ranks.pop(pid, None)
            if local_rank is not None:
                code = os.waitstatus_to_exitcode(status)
                self._tell("ended", local_rank, code, time.monotonic())

    def _sweep(self, wait: float, grace: float) -> None:
        """End what the ranks have left behind: leave it ``wait`` seconds, then ``grace``."""
        if not _gone_within(wait):
            kill_descendants(signal.SIGTERM)
            if not _gone_within(grace):
                kill_descendants(signal.SIGKILL)
                _gone_within(grace)
        self._reap()
        self._ranks.clear()
        self._kept.clear()
        if self._job_fd >= 0:
            os.close(self._job_fd)
        self._job, self._job_fd = None, -1
        self._tell("swept")


def _load_for_ddp() -> None:
    """Import here, once, what the first wrapped model of each rank would import: a second each."""
    from ddp_utils.ground._torch_private import load_what_ddp_loads

    try:
        load_what_ddp_loads()
    except Exception:
        pass  # the rank that needs it will raise the same, where it can be told


def _gone_within(seconds: float) -> bool:
    """Wait for all descendants to end; they are reaped here, so that zombies do not count."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)


def kill_descendants(number: int) -> None:
    """Send a signal to every process that descends from this one."""
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def descendants(root: int) -> list[int]:
    """Return the pids of all processes below ``root`` (Linux; elsewhere none)."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found, front = [], [root]
    while front:
        front = [child for pid in front for child in children.get(pid, [])]
        found += front
    return found


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
    if sys.flags.optimize:
        flags.append("-" + "O" * sys.flags.optimize)
    if sys.flags.isolated:
        flags.append("-I")
    return flags
