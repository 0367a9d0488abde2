"""What does one rank do for one test?

It runs a pytest session of its own for that test alone, configured like the parent's, in which
fixtures of every scope are made anew. Its reports go into a file as they come.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_utils import process_group
from ddp_utils.start.verdict import comes_from_a_lost_peer
from ddp_utils.testing.found_plugins import arguments_for_rank
from ddp_utils.testing.records import Exit, Files, Phase, Subtest, Trouble, Warned
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["LeftBehindError", "Request", "run_test"]

PATIENCE = 2.0
"""How long a rank whose test is over because of an exception waits for the others', before
those are ended: they may wait for it in a place that does not notice that it has gone."""


@dataclass(frozen=True)
class Request:
    """What a rank is told about its test."""

    test: str
    """The test's file as an absolute path, then the rest of its node id."""
    options: dict[str, Any]
    """The parent's options, as far as they make sense in a rank."""
    plugins: dict[str, str] | None
    """The installed plugins that the parent has found, by name."""
    folder: str
    """Where the files of all ranks are."""
    tmp: str
    """What ``tmp_path`` is made in."""
    captures: bool
    """Whether output goes into files."""
    debugs: bool
    """Whether rank zero may stop in a debugger."""
    workerinput: dict[str, Any]


class LeftBehindError(Exception):
    """Raised by a rank whose test failed while others still run theirs."""


def run_test(request: Request) -> None:
    """Run the test on this rank.

    Raises:
        LeftBehindError: It failed, and other ranks do not come to an end: they must be ended.
    """
    files = Files(request.folder, get_rank())
    store, world_size = process_group.shared_store(), get_world_size()
    session = _Session(request, files)
    with ExitStack() as stack:
        stack.enter_context(_stacks_when_ended(files))
        if request.captures:
            stack.enter_context(_output_into(files))
        stack.enter_context(_measured(request.options))
        session.run()
    files.mark_done()
    if session.raised:
        process_group.leave(store, files.rank, "exited")
        if not request.debugs and not _all_done(files, world_size):
            raise LeftBehindError


def _all_done(files: Files, world_size: int) -> bool:
    """Wait until all ranks are done, or patience is over."""
    deadline = time.monotonic() + PATIENCE
    while not files.all_done(world_size):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def _stacks_when_ended(files: Files) -> Iterator[None]:
    """Write down where this rank was if it is told to end."""
    with open(files.path("stacks"), "w") as file:
        faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGTERM)


@contextmanager
def _output_into(files: Files) -> Iterator[None]:
    """Send what this process and its children write into two files."""
    saved = os.dup(1), os.dup(2)
    for number, kind in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(files.path(kind), flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    try:
        yield
    finally:
        _flush()
        for number, original in zip((1, 2), saved, strict=True):
            os.dup2(original, number)
            os.close(original)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _measures(options: dict[str, Any]) -> bool:
    """Whether pytest-cov is there and at work."""
    return options.get("cov_source", []) != [] and not options.get("no_cov")


def _measured_sources(options: dict[str, Any]) -> list[str] | None:
    """Return what coverage is told to measure; ``--cov`` alone, True among them, is everything."""
    sources = options["cov_source"]
    return None if sources is None or True in sources else list(sources)


@contextmanager
def _measured(options: dict[str, Any]) -> Iterator[None]:
    """Measure coverage as pytest-cov would; it combines what is saved beside its own data."""
    if not _measures(options):
        yield
        return
    import coverage

    inherited = coverage.Coverage.current()
    if inherited is not None:
        inherited.stop()  # the parent's, in a rank that was forked from it
    measurement = coverage.Coverage(
        source=_measured_sources(options),
        branch=options.get("cov_branch"),
        config_file=options.get("cov_config") or True,
        data_suffix=True,
    )
    measurement.start()
    try:
        yield
    finally:
        measurement.stop()
        measurement.save()


class _Session:
    """A pytest session for one test, and the plugin in it that tells the parent of it."""

    def __init__(self, request: Request, files: Files) -> None:
        self._request = request
        self._files = files
        self._errors: dict[str, BaseException | None] = {}
        self._told = False
        self.raised = False
        """Whether an exception, other than a skip, cut this rank's test short."""

    def run(self) -> None:
        """Collect the test and run it."""
        try:
            config = self._configure()
            status = config.hook.pytest_cmdline_main(config=config)
        except pytest.UsageError as error:
            self._trouble(str(error))
            return
        except BaseException as error:  # whatever it is, the parent has to be told
            self._trouble("".join(traceback.format_exception(error)).strip())
            return
        if not self._told:
            self._trouble(
                f"{self._request.test} is not among the tests that this rank has collected "
                f"(pytest ended with {status}). Tests, and the names of their parameters, have to "
                "be the same each time they are collected."
            )

    def _configure(self) -> pytest.Config:
        options = dict(self._request.options)
        if _measures(options):
            options["no_cov"] = True  # measured without that plugin
        debugs = self._request.debugs and self._files.rank == 0
        options["usepdb"] = bool(options.get("usepdb")) and debugs
        options["trace"] = bool(options.get("trace")) and debugs
        # A rank that was not forked from pytest has imported this package without its hook.
        ignored = "ignore::pytest.PytestAssertRewriteWarning"
        options["pythonwarnings"] = [*(options.get("pythonwarnings") or []), ignored]
        with arguments_for_rank(self._request.plugins) as arguments:
            arguments = [self._request.test, "-p", "no:terminal", *arguments]
            config = pytest.Config.fromdictargs(options, arguments)
        config.workerinput = self._request.workerinput  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        config.pluginmanager.register(self, "ddp_utils-in-rank")
        if debugs:
            config.pluginmanager.unblock("terminalreporter")
            config.pluginmanager.register(_Terminal(config), "terminalreporter")
        return config

    def _trouble(self, text: str) -> None:
        self._told = self.raised = True
        self._files.append(Trouble(text))

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config._tmp_path_factory = _SharedTemporaryFolders(Path(self._request.tmp))  # type: ignore[attr-defined]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._trouble(str(report.longrepr))

    def pytest_internalerror(self, excrepr: object) -> None:
        self._trouble(str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._told = self.raised = True
        if isinstance(excinfo.value, pytest.exit.Exception):
            self._files.append(Exit(excinfo.value.msg, excinfo.value.returncode))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        self._errors[call.when] = None if call.excinfo is None else call.excinfo.value
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        if type(report) is not pytest.TestReport:
            self._files.append(Subtest(data))
            return
        self._told = True
        error = self._errors.get(str(report.when))
        skips = isinstance(error, pytest.skip.Exception)
        self.raised = self.raised or (error is not None and not skips)
        lost_peer = error is not None and comes_from_a_lost_peer(error)
        _flush()
        written = self._files.sizes()
        raised = error is not None
        self._files.append(Phase(data, time.monotonic(), raised, lost_peer, written))

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._config = session.config

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if when != "runtest":
            return  # configuration and collection warn in the parent as well
        category = warning_message.category
        name = f"{category.__module__}:{category.__qualname__}"
        text, filename = str(warning_message.message), warning_message.filename
        self._files.append(
            Warned(text, name, filename, warning_message.lineno, when, nodeid, location)
        )

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        """The parent watches the time of all ranks."""
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        return True


class _Terminal:
    """As much of a terminal reporter as the debugger asks for."""

    def __init__(self, config: pytest.Config) -> None:
        from _pytest.config import create_terminal_writer

        self._tw = create_terminal_writer(config, sys.stdout)


class _SharedTemporaryFolders:
    """Stands in for pytest's factory: the same call makes the same folder on every rank."""

    _basetemp = None  # pytest has nothing to clean up here; the parent has
    _given_basetemp = None
    _retention_policy = "all"

    def __init__(self, base: Path) -> None:
        self._base = base
        self._count: dict[str, int] = {}

    def getbasetemp(self) -> Path:
        """Return the folder in which all others are made."""
        return self._base

    def mktemp(self, basename: str, numbered: bool = True) -> Path:
        """Make a folder, the same one on every rank that makes the same calls."""
        if Path(basename).name != basename:
            raise ValueError(f"{basename} is not a normalized and relative path")
        number = self._count.get(basename, 0)
        self._count[basename] = number + 1
        if not numbered and number:
            raise FileExistsError(str(self._base / basename))
        path = self._base / (f"{basename}{number}" if numbered else basename)
        path.mkdir(mode=0o700, exist_ok=True)
        return path
