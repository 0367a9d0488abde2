"""Logging once, and not once on every rank."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from ddp_utils import get_logger, get_rank
from ddp_utils.testing import run_distributed
from ddp_utils.world import world as world_module
from ddp_utils.world.world import World


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.seen]


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    logging.getLogger("train").addHandler(handler)
    yield handler
    logging.getLogger("train").removeHandler(handler)


@pytest.fixture
def as_rank_three() -> Iterator[None]:
    token = world_module.SIMULATED.set(World(rank=3, world_size=4))
    yield
    world_module.SIMULATED.reset(token)


def log_everything() -> None:
    log = get_logger("train.loop")
    log.debug("debug")
    log.info("info %d", 1)
    log.info("mine: %s", "a%d", all_ranks=True)
    log.warning("warning")
    log.log(logging.ERROR, "error")
    log.debug("debug on all", all_ranks=True)


def test_rank_zero_logs_from_info_on(records: Records) -> None:
    log_everything()
    assert records.messages == ["info 1", "[rank 0] mine: a%d", "warning", "error"]


def test_others_log_from_warning_on_with_their_rank(records: Records, as_rank_three: None) -> None:
    log_everything()
    assert records.messages == ["[rank 3] mine: a%d", "[rank 3] warning", "[rank 3] error"]


def test_the_rank_is_asked_for_at_each_record(records: Records) -> None:
    log = get_logger("train.early")
    log.info("before")
    token = world_module.SIMULATED.set(World(rank=2, world_size=4))
    log.info("not here")
    log.warning("here")
    world_module.SIMULATED.reset(token)
    assert records.messages == ["before", "[rank 2] here"]


def test_records_have_rank_and_world_size_and_the_users_line(
    records: Records, as_rank_three: None
) -> None:
    get_logger("train").warning("x", extra={"step": 5})
    (record,) = records.seen
    formatter = logging.Formatter("%(rank)d/%(world_size)d %(step)d %(funcName)s %(filename)s")
    assert formatter.format(record) == (
        "3/4 5 test_records_have_rank_and_world_size_and_the_users_line test_loggers.py"
    )


def test_exceptions_are_logged_with_their_traceback(records: Records) -> None:
    try:
        raise KeyError("k")
    except KeyError:
        get_logger("train").exception("failed")
    assert records.seen[0].exc_info is not None


def state_of_all_loggers() -> dict[str, Any]:
    known = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    return {
        name: (logger.level, logger.handlers[:], logger.propagate, logger.disabled, logger.filters)
        for name, logger in known.items()
        if isinstance(logger, logging.Logger)
    }


def test_no_other_logger_is_touched() -> None:
    logging.getLogger("library")
    before = state_of_all_loggers()
    log = get_logger("mine")
    log.setLevel(logging.DEBUG)
    log.info("hello")
    after = state_of_all_loggers()
    assert after.pop("mine", None) in (None, (0, [], True, False, []))
    assert after == before
    assert logging.getLogger("mine") is not log
    assert logging.getLoggerClass() is logging.Logger
    log.setLevel(logging.INFO)


def test_without_any_handler_records_go_to_stderr_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    get_logger("alone").info("epoch %d", 3)
    assert capsys.readouterr().err == "INFO:alone:epoch 3\n"


def test_with_a_handler_of_the_users_nothing_is_printed_twice(
    records: Records, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    get_logger("train.x").info("once")
    assert records.messages == ["once"]
    assert capsys.readouterr().err == ""


def test_levels_can_be_set_and_all_logging_disabled(records: Records) -> None:
    log = get_logger("train.levels")
    assert not log.isEnabledFor(logging.DEBUG)
    log.setLevel(logging.DEBUG)
    log.debug("now")
    logging.disable(logging.ERROR)
    log.warning("never")
    logging.disable(logging.NOTSET)
    log.setLevel(logging.ERROR)
    log.warning("never")
    log.setLevel(logging.INFO)
    assert records.messages == ["now"]


def test_the_same_name_is_the_same_logger_and_travels() -> None:
    log = get_logger("train.same")
    assert get_logger("train.same") is log
    assert pickle.loads(pickle.dumps(log)) is log
    assert copy.deepcopy({"log": log})["log"] is log


def log_on_ranks() -> None:
    logging.getLogger().handlers.clear()  # pytest's, which a rank has from its parent
    get_logger("ranks").info("once")
    get_logger("ranks").info("each", all_ranks=True)
    get_logger("ranks").warning("careful")
    logging.getLogger("ranks").info("never: nobody has configured that one")


def test_on_real_ranks_each_line_is_there_as_often_as_it_should(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_UTILS_QUIET", "1")
    run_distributed(log_on_ranks)
    lines = capfd.readouterr().err.splitlines()
    assert sorted(line.rpartition(":")[2] for line in lines) == [
        "[rank 0] each",
        "[rank 1] careful",
        "[rank 1] each",
        "careful",
        "once",
    ]
    assert get_rank() == 0
