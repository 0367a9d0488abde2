"""Which server starts the ranks of a job, and is forking safe in it?

Best is a fork of this process, which has torch and the script's modules loaded. Where this
process has threads or a touched accelerator runtime, a fresh interpreter that imports them once.
Where even that cannot be forked, one interpreter for each rank.
"""

from __future__ import annotations

import ast
import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

from ddp_utils.ground.errors import StartError
from ddp_utils.start import server
from ddp_utils.start.function import this_main

__all__ = ["ServerHandle", "acquire", "release"]

ALWAYS = ["numpy", "torch", "torch.distributed", "ddp_utils.process_group"]


@dataclass
class ServerHandle:
    """This process's end of a server."""

    control: socket.socket
    pid: int
    forks: bool
    specs: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    argv: list[str] | None = None
    """What modules of the script that read their options at import have read in the server."""

    def close(self) -> None:
        """Let the server end, and wait until it has."""
        _in_use.discard(self.control)
        self.control.close()
        if self.process is not None:
            self.process.wait()
            return
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass

    def is_stale(self) -> bool:
        """Whether a module that the server holds has been replaced or reloaded here since."""
        if self.argv is not None and self.argv != sys.argv:
            return True
        return any(
            getattr(sys.modules.get(name), "__spec__", None) is not spec
            for name, spec in self.specs.items()
        )


_idle: list[ServerHandle] = []
_lock = threading.Lock()
_prepared = False


def acquire(method: str) -> ServerHandle:
    """Return a server for one job, by ``"auto"``, ``"server"`` or ``"spawn"``.

    Raises:
        StartError: ``"server"`` is asked for where ranks cannot be forked.
    """
    handle = _acquire(method)
    _in_use.add(handle.control)
    return handle


def _acquire(method: str) -> ServerHandle:
    _prepare()
    forks = method != "spawn" and sys.platform == "linux"
    if method == "server" and not forks:
        raise StartError('start_method="server" works on Linux only; use "auto" or "spawn"')
    for handle in _take_idle(forks):
        if not handle.is_stale() and _is_alive(handle):
            return handle
        handle.close()
    if not forks:
        return _fresh([], forks=False)
    handle = _forked() or _fresh([*ALWAYS, *_test_runner(), *_imports_of_main()], forks=True)
    if handle is None or not handle.forks:
        if method == "server":
            raise StartError("ranks cannot be forked here: importing torch starts threads")
        return handle or _fresh([], forks=False)
    return handle


def release(handle: ServerHandle) -> None:
    """Keep a server for the next start, or end it where there is one already."""
    with _lock:
        _in_use.discard(handle.control)
        if handle.control.fileno() >= 0 and not any(other.forks == handle.forks for other in _idle):
            _idle.append(handle)
            return
    handle.close()


def _take_idle(forks: bool) -> list[ServerHandle]:
    with _lock:
        taken = [handle for handle in _idle if handle.forks == forks]
        _idle[:] = [handle for handle in _idle if handle.forks != forks]
    return taken


def _prepare() -> None:
    global _prepared
    if not _prepared:
        _prepared = True
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_close_idle)


def _forget() -> None:
    """In a fork of this process: these servers are not ours, and must see their parent's end."""
    for handle in _idle:
        handle.control.close()
    for control in _in_use:
        control.close()
    _idle.clear()
    _in_use.clear()


def _close_idle() -> None:
    for handle in _take_idle(True) + _take_idle(False):
        handle.close()


_in_use: set[socket.socket] = set()


def _is_alive(handle: ServerHandle) -> bool:
    """Whether an idle server is still there: it says nothing, so anything to read is its end."""
    handle.control.setblocking(False)
    try:
        return handle.control.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        handle.control.setblocking(True)


def _forked() -> ServerHandle | None:
    """Fork a server off this process, or return None where that is not safe.

    The question is asked after the fork: NumPy's OpenBLAS ends its threads around one, and
    whatever other thread is left then could have held a lock that its copy will wait for.
    """
    if threading.active_count() > 1:
        return None
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            server.cover_descriptors(theirs.fileno())
            server.serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    handle = ServerHandle(ours, pid, True, _specs())
    if server.thread_count() == 1:
        reply = server.receive(ours)
        if reply is not None and not reply[0][1]:
            return handle
    os.kill(pid, signal.SIGKILL)
    handle.close()
    return None


def _specs() -> dict[str, Any]:
    """Return what identifies each loaded module: reloading or replacing one changes it."""
    specs = {name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}
    return {name: spec for name, spec in specs.items() if spec is not None and name != "__main__"}


def _fresh(preload: list[str], forks: bool) -> ServerHandle:
    """Start a server in a new interpreter.

    Raises:
        StartError: it did not come up.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        number = server.above_standard(theirs.fileno())
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; sys.argv[:] = {sys.argv!r}; import signal; "
        "signal.signal(signal.SIGINT, signal.SIG_IGN); from ddp_utils.start.server import main; "
        f"main({number}, {preload!r})"
    )
    process = subprocess.Popen(
        [sys.executable, *server.interpreter_flags(), "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[number],
    )
    os.close(number)
    handle = ServerHandle(ours, process.pid, forks, process=process, argv=list(sys.argv))
    reply = server.receive(ours)
    if reply is None:
        handle.close()
        raise StartError(
            f"the process that starts the ranks ended at once, with code {process.returncode}"
        )
    _, poisoned, threads = reply[0]
    if forks and (poisoned or threads > 1):
        handle.close()
        return _fresh(ALWAYS, forks=True) if preload != ALWAYS else _fresh([], forks=False)
    handle.specs = {name: spec for name, spec in _specs().items() if name in preload}
    return handle


def _test_runner() -> list[str]:
    """Return what ranks of a test need, where tests run here."""
    return [name for name in sys.modules if name.partition(".")[0] in ("_pytest", "pluggy")]


def _imports_of_main() -> list[str]:
    """Return the modules that the script imports in its first lines, as far as loaded here.

    They are imported once in the server instead of once in each rank.
    """
    main = this_main()
    module: types.ModuleType = sys.modules["__main__"]
    path = getattr(module, "__file__", None)
    if main is None or main.only_runs_others or path is None:
        return []
    with open(path, "rb") as file:
        try:
            statements = ast.parse(file.read()).body
        except SyntaxError:
            return []
    names: list[str] = []
    for statement in statements:
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names.append(statement.module)
    return [name for name in names if name in sys.modules and name not in ALWAYS]
