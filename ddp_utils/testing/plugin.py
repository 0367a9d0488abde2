"""How does pytest run a test that is marked ``distributed`` on several ranks?

For such a test the parent's own item does nothing but start the ranks, in its setup, and take
over what they report. Loading this plugin imports pytest and little else; torch is imported when
the first marked test runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from ddp_utils.ground.errors import RankFailedError
    from ddp_utils.testing.combine import Outcome  # noqa: F401  # in the text of an annotation
    from ddp_utils.testing.records import Record, Warned

MARKER = (
    "distributed(world_size=2, timeout=60, backend='gloo'): run the test on that many ranks; "
    "world_size may be a list, for one test with each. timeout is in seconds."
)
SIZE = "ddp_utils_world_size"
"""The parameter that stands for the world size where the mark has a list."""

TIMEOUT = 60.0

OUTCOMES = pytest.StashKey["dict[str, Outcome]"]()
LIMIT = pytest.StashKey[float]()
"""The limit that pytest-timeout would have set."""


class Marked(NamedTuple):
    """What a mark asks for."""

    sizes: tuple[int, ...]
    listed: bool
    timeout: float | None
    backend: str


def read_mark(mark: pytest.Mark) -> Marked:
    """Return what a mark asks for.

    Raises:
        TypeError, ValueError: It has arguments that it cannot have.
    """

    def read(
        world_size: int | Sequence[int] = 2, timeout: float | None = None, backend: str = "gloo"
    ) -> Marked:
        listed = isinstance(world_size, (list, tuple, range, set, frozenset))
        sizes = tuple(world_size) if listed else (world_size,)  # type: ignore[arg-type]
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"world_size={world_size!r}: a number of ranks, or a list of them")
        if not sizes or (timeout is not None and not timeout > 0):
            raise ValueError(f"world_size={world_size!r}, timeout={timeout!r}: not possible")
        return Marked(sizes, listed, timeout, backend)  # type: ignore[arg-type]

    return read(*mark.args, **mark.kwargs)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("distributed")
    if mark is None:
        return
    try:
        marked = read_mark(mark)
    except (TypeError, ValueError) as error:
        text = str(error).replace("read_mark.<locals>.read()", "pytest.mark.distributed()")
        pytest.fail(f"{metafunc.definition.nodeid}: {text}", pytrace=False)
    if marked.listed:
        metafunc.fixturenames.append(SIZE)
        names = [f"{size}rank{'s' if size > 1 else ''}" for size in marked.sizes]
        metafunc.parametrize(SIZE, marked.sizes, ids=names)


def _to_be_started(item: pytest.Item) -> pytest.Mark | None:
    """Return the mark of a test that has to be run on ranks, from a process that is none."""
    if item.config.pluginmanager.has_plugin("ddp_utils-in-rank"):
        return None
    return item.get_closest_marker("distributed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    mark = _to_be_started(item)
    if mark is not None:
        item.stash[OUTCOMES] = {}
        own: Any = item
        own.setup = partial(_run_on_ranks, item, mark)
        own.runtest = own.teardown = _nothing


def _nothing() -> None:
    """The ranks have done it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    outcome = item.stash.get(OUTCOMES, {}).get(call.when)
    if outcome is not None and call.excinfo is None:
        outcome.write_to(report)
    return report


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """The ranks are watched by the process that started them, which can show their stacks."""
    if _to_be_started(item) is None:
        return None
    item.stash[LIMIT] = settings.timeout
    return True


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    return None if _to_be_started(item) is None else True


def _run_on_ranks(item: pytest.Item, mark: pytest.Mark) -> None:
    """Run a test on its ranks, and keep what came of it for the reports of its phases."""
    from ddp_utils.testing.combine import combine
    from ddp_utils.testing.records import Files

    option = item.config.option
    if getattr(option, "setuponly", False) or getattr(option, "setupplan", False):
        return
    marked = read_mark(mark)
    size = _world_size(item, marked)
    base = _temporary_folder(item)
    with tempfile.TemporaryDirectory(prefix="ddp_utils-test-") as folder:
        files = [Files(folder, rank) for rank in range(size)]
        error = _start(item, marked, size, folder, str(base))
        records = [own.read() for own in files]
        item.stash[OUTCOMES] = combine(records, error, partial(_load, item.config), files)
    _clear_away(item, base)
    _pass_on(item, records)


def _world_size(item: pytest.Item, marked: Marked) -> int:
    if not marked.listed:
        return marked.sizes[0]
    callspec = getattr(item, "callspec", None)
    if callspec is None or SIZE not in callspec.params:
        pytest.fail(
            "a list of world sizes works where tests can be parametrized: not for a method of a "
            "unittest.TestCase, nor for a mark that is added after the collection",
            pytrace=False,
        )
    return int(callspec.params[SIZE])


def _start(
    item: pytest.Item, marked: Marked, size: int, folder: str, base: str
) -> RankFailedError | None:
    """Start the ranks and wait for them; return how the job failed, if it did."""
    from ddp_utils.ground.errors import RankFailedError, StartError
    from ddp_utils.start.function import file_mentions_ddp
    from ddp_utils.start.ranks import Options
    from ddp_utils.testing.found_plugins import found_by
    from ddp_utils.testing.in_rank import Request, run_test
    from ddp_utils.testing.run import start

    if file_mentions_ddp(str(item.path)):
        import ddp_utils.models.wrap  # noqa: F401  # so that it is loaded once for all ranks
    option = item.config.option
    debugs = bool(getattr(option, "usepdb", False) or getattr(option, "trace", False))
    request = Request(
        test="::".join([str(item.path), item.nodeid.partition("::")[2]]),
        options=_options(item.config),
        plugins=found_by(item.config),
        folder=folder,
        tmp=base,
        captures=option.capture in ("fd", "sys") and not debugs,
        debugs=debugs,
        workerinput=_workerinput(item.config),
    )
    limits = [limit for limit in (marked.timeout, item.stash.get(LIMIT, None)) if limit]
    try:
        with _terminal_for_ranks(item.config, debugs), pytest.MonkeyPatch.context() as patch:
            patch.setenv("DDP_UTILS_QUIET", "1")
            start(
                run_test,
                (request,),
                {},
                Options(nproc=size, backend=marked.backend, output="prefix"),
                None if debugs else min(limits, default=TIMEOUT),
            )
    except RankFailedError as error:
        return error
    except StartError as error:
        pytest.fail(str(error), pytrace=False)
    return None


NOT_FOR_RANKS: dict[str, Any] = {
    "capture": "no",  # the parent has given them files to write into
    "xmlpath": None,
    "log_file": None,
    "pastebin": None,
    "collectonly": False,
    "setupshow": False,
    "keyword": "",  # the choice has been made
    "markexpr": "",
    "deselect": None,
    "pyargs": False,
    "maxfail": 0,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "cacheclear": False,
    "stepwise": False,
    "stepwise_skip": False,
    "stepwise_reset": False,
    "numprocesses": None,
    "dist": "no",
    "tx": [],
}
"""Options that are the parent's business, and what ranks get in their place."""


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return the options for the ranks."""
    options = {name: value for name, value in vars(config.option).items() if _pickles(value)}
    options.pop("file_or_dir", None)  # an argument, and not what ranks are given
    options |= {name: value for name, value in NOT_FOR_RANKS.items() if name in options}
    inifile = config.inipath
    return options | {
        "rootdir": str(config.rootpath),
        "inifilename": None if inifile is None else str(inifile),
    }


def _pickles(value: object) -> bool:
    import pickle

    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _workerinput(config: pytest.Config) -> dict[str, Any]:
    """Return what tells other plugins that a process reports to another, as pytest-xdist does."""
    names = ("workerid", "workercount", "testrunuid")
    known = getattr(config, "workerinput", {"workerid": "master", "workercount": 1})
    return {name: known[name] for name in names if name in known}


@contextmanager
def _terminal_for_ranks(config: pytest.Config, debugs: bool) -> Iterator[None]:
    """Let rank zero have the terminal where a debugger may need it."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is None or not debugs:
        yield
        return
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


def _temporary_folder(item: pytest.Item) -> Path:
    """Make the folder in which all ranks' ``tmp_path`` is."""
    factory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    name = "".join(c if c.isalnum() else "_" for c in item.name)[:30]
    return Path(factory.mktemp(name, numbered=True))


def _clear_away(item: pytest.Item, base: Path) -> None:
    """Remove that folder where nothing is in it, or where the user wants that."""
    import shutil

    passed = all(outcome.outcome == "passed" for outcome in item.stash[OUTCOMES].values())
    if passed and item.config.getini("tmp_path_retention_policy") == "failed":
        shutil.rmtree(base, ignore_errors=True)
        return
    try:
        base.rmdir()
    except OSError:
        pass  # the test has used it


def _load(config: pytest.Config, data: dict[str, Any]) -> Any:
    return config.hook.pytest_report_from_serializable(config=config, data=data)


def _pass_on(item: pytest.Item, records: Sequence[Sequence[Record]]) -> None:
    """Do here what the ranks have asked for beside their reports."""
    from ddp_utils.testing.records import Exit, Subtest, Warned

    warned, failed = set(), 0
    for rank, ones in enumerate(records):
        for record in ones:
            if isinstance(record, Subtest):
                report = _load(item.config, record.report)
                failed += report.failed
                if rank == 0 or report.failed:
                    item.ihook.pytest_runtest_logreport(report=report)
            elif isinstance(record, Warned) and record not in warned:
                warned.add(record)
                _warn(item.config, record)
    call = item.stash[OUTCOMES]["call"]
    if failed and call.outcome == "passed":
        call.outcome, call.longrepr = "failed", f"contains {failed} failed subtests over the ranks"
    for record in (record for ones in records for record in ones):
        if isinstance(record, Exit):
            pytest.exit(record.reason, record.returncode)


def _warn(config: pytest.Config, record: Warned) -> None:
    """Put a rank's warning into the summary; of its class only the name has come here."""
    import sys
    import warnings

    module, _, name = record.category.partition(":")
    category = getattr(sys.modules.get(module), name, UserWarning)
    try:
        warning = category(record.text)
    except Exception:
        category, warning = UserWarning, UserWarning(record.text)
    message = warnings.WarningMessage(warning, category, record.filename, record.lineno)
    told = {"when": record.when, "nodeid": record.nodeid, "location": record.location}
    config.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **told})
