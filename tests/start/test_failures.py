"""However a rank ends, the parent names the true cause, and nothing is left.

The same tests for every start method. ``fresh`` is the server in an interpreter of its own,
which is used where this process cannot be forked.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_utils import RankFailedError, get_rank, launch

METHODS = [
    "server",
    pytest.param("fresh", marks=pytest.mark.slow),
    pytest.param("spawn", marks=pytest.mark.slow),
]


@pytest.fixture(params=METHODS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """``launch`` on two ranks, by one start method."""
    method = "server" if request.param == "fresh" else request.param
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    if request.param == "fresh":
        from ddp_utils.start import starter

        starter._close_idle()
        other.start()  # with a second thread this process is not forked

    def start(fn: Callable[..., Any], *args: Any, nproc: int = 2) -> list[Any]:
        return launch(fn, args, nproc=nproc, start_method=method)

    yield start
    if request.param == "fresh":
        stop.set()
        other.join()


class CustomError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"custom {code}")
        self.code = code


class UnpicklableError(Exception):
    def __init__(self, first: object, second: object) -> None:
        super().__init__("needs two arguments, so that unpickling it fails")


def rank_one(how: str) -> Any:
    """Rank one ends in some way while rank zero waits for it in a collective."""
    if get_rank() == 1:
        WAYS[how]()
        return 5
    dist.all_reduce(torch.ones(1))
    return None


def fails_after_destroying_the_group() -> None:
    try:
        raise CustomError(7)
    finally:
        dist.destroy_process_group()


def raises(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


WAYS: dict[str, Callable[[], Any]] = {
    "raise": lambda: raises(CustomError(7))(),
    "destroy": fails_after_destroying_the_group,
    "own ConnectionResetError": lambda: raises(ConnectionResetError("the dataset's own"))(),
    "unpicklable": lambda: raises(UnpicklableError(1, 2))(),
    "KeyboardInterrupt": lambda: raises(KeyboardInterrupt())(),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(1)": lambda: os._exit(1),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "return": lambda: None,
}

TOLD = {
    "raise": "CustomError: custom 7",
    "destroy": "CustomError: custom 7",
    "own ConnectionResetError": "ConnectionResetError: the dataset's own",
    "unpicklable": "UnpicklableError: needs two arguments",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "sys.exit(0)": "left by sys.exit(0)",
    "sys.exit(3)": "exited with code 3",
    "os._exit(1)": "exited with code 1",
    "SIGKILL": "killed by SIGKILL",
    "SIGSEGV": "killed by SIGSEGV",
    "return": "returned",
}


@pytest.mark.parametrize("how", list(WAYS))
def test_the_rank_that_failed_is_the_cause(run: Callable[..., list[Any]], how: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        run(rank_one, how)
    error = caught.value
    assert error.rank == 1
    first_line = str(error).splitlines()[0]
    assert first_line.startswith("rank 1 of 2, ")
    assert TOLD[how] in first_line
    assert [end.rank for end in error.failures] == [0, 1]
    assert str(error).count("Traceback (most recent call last)") <= 1


def test_the_exception_object_comes_back(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailedError) as caught:
        run(rank_one, "raise")
    assert isinstance(caught.value.cause, CustomError)
    assert caught.value.cause.code == 7
    assert caught.value.__cause__ is caught.value.cause


def test_an_exception_that_does_not_pickle_is_told_as_text(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailedError, match="needs two arguments") as caught:
        run(rank_one, "unpicklable")
    assert caught.value.cause is None


def test_a_kill_hints_at_memory(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailedError, match="out of memory"):
        run(rank_one, "SIGKILL")


def raise_everywhere() -> None:
    dist.barrier()
    raise CustomError(get_rank())


def test_all_ranks_raise(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailedError, match="CustomError") as caught:
        run(raise_everywhere)
    earliest = min(caught.value.failures, key=lambda end: end.time)
    assert caught.value.rank == earliest.rank
    assert isinstance(caught.value.cause, CustomError)


def return_something(what: str) -> Any:
    values = {"lambda": lambda: 1, "tensor": torch.ones(3, requires_grad=True) * 2}
    return values[what] if what in values else bytes(200 * 2**20)


def test_a_value_that_does_not_pickle(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailedError, match="returned a function that cannot be sent"):
        run(return_something, "lambda")


def test_large_values_and_tensors(run: Callable[..., list[Any]]) -> None:
    assert [len(value) for value in run(return_something, "200 MiB")] == [200 * 2**20] * 2
    assert run(return_something, "tensor")[1].tolist() == [2, 2, 2]


def test_exit_by_all_ranks_is_success(run: Callable[..., list[Any]]) -> None:
    assert run(sys.exit, 0) == [None, None]


def work_alone() -> int:
    if get_rank() == 0:
        time.sleep(2.5)  # longer than any patience of the parent's
    return get_rank()


def test_a_rank_that_works_on_alone_is_no_failure(run: Callable[..., list[Any]]) -> None:
    assert run(work_alone) == [0, 1]


def test_called_again_and_with_other_sizes(run: Callable[..., list[Any]]) -> None:
    assert run(get_rank, nproc=3) == [0, 1, 2]
    assert run(get_rank, nproc=2) == [0, 1]


class Model:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, x: int) -> int:
        return self.factor * x


def double(fn: Callable[[int], int]) -> Callable[[int], int]:
    @functools.wraps(fn)
    def doubled(x: int) -> int:
        return 2 * fn(x)

    return doubled


def plain(x: int) -> int:
    return x


def test_what_runs_is_what_was_given_and_not_what_has_its_name(
    run: Callable[..., list[Any]],
) -> None:
    assert run(Model(4).times, 7) == [28, 28]
    assert run(functools.partial(plain, 3)) == [3, 3]
    assert run(double(plain), 5) == [10, 10]


class OnlyInTheRank(Exception):
    def __reduce__(self) -> Any:
        return (_made_in_a_rank_only, ())


def _made_in_a_rank_only() -> Exception:
    if os.environ.get("RANK") is None:
        raise ModuleNotFoundError("no plug-in here")
    return OnlyInTheRank("the true cause")


def fail_with_what_the_parent_cannot_import() -> None:
    raise OnlyInTheRank("the true cause")


def test_an_exception_that_only_ranks_can_make_is_told(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailedError, match="OnlyInTheRank: the true cause") as caught:
        run(fail_with_what_the_parent_cannot_import)
    assert caught.value.cause is None


class Noted(Exception):
    def __str__(self) -> str:
        raise RuntimeError("a message that cannot be made")


def fail_with_a_broken_message() -> None:
    error = Noted()
    if sys.version_info >= (3, 11):
        error.add_note("see the manual")
    raise error


def test_a_message_that_cannot_be_made_and_a_note(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(RankFailedError, match="Noted") as caught:
        run(fail_with_a_broken_message)
    assert "see the manual" not in str(caught.value).splitlines()[0]


def servers_descriptors() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/fd"))


def test_many_starts_leave_nothing_open(run: Callable[..., list[Any]]) -> None:
    first, *_ = [max(run(servers_descriptors)) for _ in range(2)]
    last = [max(run(servers_descriptors, nproc=2)) for _ in range(6)][-1]
    assert last <= first + 8  # the ranks of one job, and not of all before


def no_thread_hangs_the_rank() -> int:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return 3


def test_a_daemon_thread_in_a_rank(run: Callable[..., list[Any]]) -> None:
    assert run(no_thread_hangs_the_rank) == [3, 3]


@pytest.mark.slow
def test_the_right_cause_in_100_of_100_runs() -> None:
    for _ in range(50):
        for how in ("raise", "destroy"):
            with pytest.raises(RankFailedError) as caught:
                launch(rank_one, (how,), nproc=2)
            assert caught.value.rank == 1
            assert isinstance(caught.value.cause, CustomError)


@pytest.mark.parametrize("args", ["data", b"data", 5])
def test_one_argument_that_is_no_tuple_is_told_how_to_be_one(args: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"({args!r},)")):
        launch(print, args, nproc=2)
