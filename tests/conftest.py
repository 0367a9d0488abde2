"""What every test of this package is held to, and how tests run scripts as users do."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest


def pytest_configure() -> None:
    """Hear Ctrl-C, as tests send it, also where a shell has started this in its background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the server of the ranks before a test has made threads, which would make it slow."""
    in_rank = session.config.pluginmanager.has_plugin("ddp_utils-in-rank")
    if session.items and not session.config.option.collectonly and not in_rank:
        from ddp_utils.start import starter

        starter.release(starter.acquire("auto"))


@pytest.fixture(autouse=True, scope="session")
def folders_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make, outside the folder of any test, the folders that outlive a test."""
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()  # removed as the process ends


@pytest.fixture(autouse=True)
def nothing_is_left_behind(folders_of_the_session: None) -> Iterator[None]:
    """Fail a test that leaves ranks, files of this package, or environment variables behind."""
    # A patch of its own: the fixture's would undo the test's changes only after the comparison.
    # Its folder has a short name, unlike tmp_path: sockets in it may have 107 bytes.
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)  # no other test's files
        patch.setattr(tempfile, "tempdir", None)
        before = _variables(), _files()
        yield
        assert (_variables(), _files()) == before
    servers = psutil.Process().children()
    assert [rank for server in servers for rank in server.children(recursive=True)] == []


def _variables() -> dict[str, str]:
    # Set by pytest, by torch, and by the import of scikit-learn.
    others = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    others |= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    return {name: value for name, value in os.environ.items() if name not in others}


def _files() -> set[str]:
    names = os.listdir(tempfile.gettempdir())
    return {name for name in names if name.startswith("ddp_utils")}


@pytest.fixture
def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Script:
    """A script as a user would have it, in a folder of its own."""

    path: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *args: str, python: tuple[str, ...] = (), **variables: str) -> Any:
        """Start it, with pipes, and return the process."""
        environ = {"DDP_UTILS_QUIET": "1", "DDP_UTILS_NPROC": "2"} | variables
        process = subprocess.Popen(
            [sys.executable, *python, *([] if python else [str(self.path)]), *args],
            cwd=self.path.parent,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(
        self, *args: str, python: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*args, python=python, **variables)
        try:
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that a failed test has left, and its ranks: the next test is not to blame."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Any]:
    """Write a script from its text: ``script('''...''')`` returns a :class:`Script`."""
    started: list[subprocess.Popen[str]] = []

    def write(text: str, name: str = "train.py") -> Script:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return Script(path, started)

    yield write
    for process in started:
        _kill(process)
