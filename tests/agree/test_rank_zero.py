"""Sections that one rank runs, and turns in which rank zero goes first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import collectives_in

from ddp_utils import (
    RankFailedError,
    RankZeroError,
    all_reduce_mean,
    any_rank,
    barrier,
    get_rank,
    rank_zero_first,
    rank_zero_only,
    rank_zero_print,
)
from ddp_utils.process_group import shared_store
from ddp_utils.testing import run_distributed
from ddp_utils.world import world as world_module
from ddp_utils.world.world import World


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(BaseException) as error:  # noqa: PT011  # the text is compared
        call()
    return f"{error.type.__name__}: {error.value}"


@pytest.fixture
def as_rank_one_of_two() -> Any:
    """Be rank 1 of 2 machines with one rank each, in no group."""
    token = world_module.SIMULATED.set(
        World(rank=1, world_size=2, node_rank=1, num_nodes=2, launcher="none")
    )
    yield
    world_module.SIMULATED.reset(token)


def sleep_until(key: str) -> None:
    while not shared_store().check([key]):
        time.sleep(0.01)


# -- rank_zero_only, without a group ------------------------------------------------------------


@rank_zero_only
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def test_alone_this_is_rank_zero() -> None:
    assert add(2, b=3) == 5
    assert rank_zero_only(broadcast=True)(add)(1) == 2
    assert rank_zero_only(add, local=True)(1) == 2
    with rank_zero_first(), rank_zero_first(local=True):
        pass
    with pytest.raises(KeyError), rank_zero_first():
        raise KeyError
    assert (add.__name__, add.__doc__) == ("add", "Add two numbers.")


def test_who_runs_is_decided_at_each_call(as_rank_one_of_two: None) -> None:
    assert add(2) is None
    assert rank_zero_only(lambda: 5, local=True)() == 5


def test_methods_and_callables_of_all_kinds(as_rank_one_of_two: None) -> None:
    class Writer:
        @rank_zero_only
        def write(self) -> str:
            return "written"

        @staticmethod
        @rank_zero_only(local=True)
        def here() -> str:
            return "here"

    assert (Writer().write(), Writer().here()) == (None, "here")
    assert rank_zero_only(print)("nothing") is None


def test_what_only_returns_something_still_to_be_run_is_refused() -> None:
    async def later() -> None: ...

    def one_by_one() -> Any:
        yield 1

    for fn in (later, one_by_one):
        with pytest.raises(TypeError, match="still to be run"):
            rank_zero_only(fn)
    with pytest.raises(TypeError, match="broadcast=True needs a function, and dict is a class"):
        rank_zero_only(dict, broadcast=True)  # type: ignore[call-overload]


def test_printing_alone(capsys: pytest.CaptureFixture[str]) -> None:
    rank_zero_print("a", 1, sep="-", end="!\n")
    assert capsys.readouterr().out == "a-1!\n"


def test_others_print_nothing(as_rank_one_of_two: None, capsys: pytest.CaptureFixture[str]) -> None:
    rank_zero_print("a")
    assert capsys.readouterr().out == ""


# -- rank_zero_only, with a group ---------------------------------------------------------------


@pytest.mark.distributed(world_size=2)
def test_without_broadcast_it_never_communicates_and_refuses_collectives() -> None:
    rank = get_rank()

    results, texts = [], []

    def sections() -> None:
        results.append(add(rank, 5))
        if rank == 0:  # the other rank does not even call it
            texts.append(error_of(rank_zero_only(lambda: 1 / 0)))
            texts.append(error_of(rank_zero_only(lambda: all_reduce_mean(1.0))))
            texts.append(error_of(rank_zero_only(lambda: barrier())))
            texts.append(error_of(rank_zero_only(lambda: rank_zero_first().__enter__())))

    assert collectives_in(sections) == []
    barrier()

    if rank == 1:
        assert results == [None]
        return
    assert results == [5]
    assert texts[0].startswith("ZeroDivisionError")
    names = ("all_reduce_mean", "barrier", "rank_zero_first")
    test = "test_without_broadcast_it_never_communicates_and_refuses_collectives"
    for text, operation in zip(texts[1:], names, strict=True):
        assert text.startswith(f"OneRankSectionError: rank 0 called {operation} at {__file__}:")
        assert (
            f"inside the rank_zero_only {test}.<locals>.sections.<locals>.<lambda> ({__file__}:"
            in text
        )


def end_the_job() -> None:
    rank_zero_only(lambda: all_reduce_mean(1.0))()
    barrier()


def test_a_collective_in_a_section_ends_the_job_with_its_error() -> None:
    with pytest.raises(RankFailedError, match="OneRankSectionError") as error:
        run_distributed(end_the_job)
    assert error.value.rank == 0


@pytest.mark.distributed(world_size=[2, 3])
def test_with_broadcast_all_get_rank_zeros_value_or_its_error() -> None:
    rank = get_rank()
    calls: list[str] = []

    @rank_zero_only(broadcast=True)
    def measure(name: str) -> dict[str, Any]:
        calls.append(name)
        return {"rank": get_rank(), "weights": torch.ones(1000)}

    @rank_zero_only(broadcast=True)
    def fail() -> None:
        raise FileNotFoundError(2, "no such file", "data.bin")

    @rank_zero_only(broadcast=True)
    def leave() -> None:
        raise SystemExit(3)

    result = measure("first")
    results = [
        result["rank"],
        result["weights"].sum().item(),
        calls,
        error_of(fail),
        error_of(leave),
        error_of(rank_zero_only(lambda: all_reduce_mean(1.0), broadcast=True)),
        error_of(rank_zero_only(lambda: lambda: 1, broadcast=True)),
        rank_zero_only(get_rank, broadcast=True, local=True)(),
        error_of(rank_zero_only(fail, broadcast=True, local=True)),
    ]
    assert all_reduce_mean(rank) == (dist.get_world_size() - 1) / 2
    if rank == 0:
        assert results[:3] == [0, 1000.0, ["first"]]
        assert results[3].startswith("FileNotFoundError")
        assert results[4] == "SystemExit: 3"
        assert results[5].startswith("OneRankSectionError: rank 0 called all_reduce_mean")
        assert "pickle" in results[6]
        return
    assert results[:3] == [0, 1000.0, []]
    causes = ("FileNotFoundError: ", "SystemExit: 3", "OneRankSectionError")
    for text, what in zip(results[3:6], causes, strict=True):
        assert text.startswith("RankZeroError: rank 0 raised in the rank_zero_only test_with_broad")
        assert f"for which rank {rank} waited ({__file__}:" in text
        assert what in text
    assert "rank 0 could not take part in broadcast(src=0)" in results[6]
    assert results[7] == 0
    assert results[8].startswith("RankZeroError")


# -- rank_zero_first ----------------------------------------------------------------------------


@pytest.mark.distributed(world_size=[2, 3])
def test_rank_zero_goes_first_and_its_error_is_everybodys() -> None:
    rank = get_rank()
    with rank_zero_first():
        if rank == 0:
            assert not shared_store().check(["made"])
            shared_store().set("made", "")
        made = shared_store().check(["made"])
        with rank_zero_first():  # a library's own
            refused = error_of(lambda: any_rank(True))

    def fail() -> None:
        with rank_zero_first():
            if rank == 0:
                raise OSError(28, "no space left")

    failed = error_of(fail)
    assert made is True
    assert refused.startswith(f"OneRankSectionError: rank {rank} called any_rank")
    if rank == 0:
        assert f"inside rank_zero_first ({__file__}:" in refused
        assert failed == "OSError: [Errno 28] no space left"
    else:
        assert failed.startswith("RankZeroError: rank 0 raised in rank_zero_first, for which")
        assert "OSError: [Errno 28] no space left" in failed


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("with_the_gil", [False, True])
def test_rank_zero_may_work_longer_than_the_groups_timeout(with_the_gil: bool) -> None:
    make_a_group_as_others_do(seconds=1)
    started = time.monotonic()
    with rank_zero_first():
        if get_rank() == 0:
            if with_the_gil:
                hold_the_gil(2.5)
            else:
                time.sleep(2.5)
    waited = time.monotonic() - started
    any_rank(False)
    assert waited >= 2.4


def hold_the_gil(seconds: float) -> None:
    """Stay in one C call that lets no other Python thread run."""
    import ctypes

    usleep = ctypes.PyDLL(None).usleep  # PyDLL: with the GIL
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        usleep(999_000)


def die_in_turn(how: str) -> None:
    with rank_zero_first():
        if get_rank() == 0:
            os._exit(3) if how == "exit" else os.kill(os.getpid(), 9)


@pytest.mark.parametrize(("how", "text"), [("exit", "exited with code 3"), ("kill", "SIGKILL")])
def test_rank_zeros_death_is_found_by_whoever_waits_for_the_process(how: str, text: str) -> None:
    with pytest.raises(RankFailedError, match=text) as error:
        run_distributed(die_in_turn, how)
    assert error.value.rank == 0


@pytest.mark.distributed(world_size=2)
def test_a_rank_zero_that_has_left_is_not_waited_for() -> None:
    def section() -> None:
        with rank_zero_first():
            pass

    if get_rank() == 0:
        return
    text = error_of(section)
    assert text.startswith("AbsentRanksError: rank 0 has returned without coming to rank_zero_fir")


@pytest.mark.distributed(world_size=4)
@pytest.mark.parametrize("num_nodes", [2, 3])  # some launchers leave it to be guessed
def test_with_local_each_machine_has_its_own_rank_zero(num_nodes: int) -> None:
    # Each pair of ranks is told that it is a machine of its own, and goes first on it.
    rank = get_rank()
    world = World(rank, 4, rank % 2, 2, rank // 2, num_nodes, "torchrun")
    world_module.SIMULATED.set(world)
    with rank_zero_first(local=True):
        order = shared_store().add(f"came/{world.node_rank}", 1)
        if rank == 0:
            sleep_until("machine 1 is through")
    if rank == 3:
        shared_store().set("machine 1 is through", "")

    @rank_zero_only(broadcast=True, local=True)
    def name() -> str:
        if rank == 2:
            raise LookupError("on machine 1 alone")
        return f"of {get_rank()}"

    own = rank_zero_only(get_rank, broadcast=True, local=True)()
    alone = rank_zero_only(get_rank, local=True)()
    text = error_of(name)
    assert order == [1, 2, 1, 2][rank]
    assert alone == [0, None, 2, None][rank]
    assert own == [0, 0, 2, 2][rank]
    if rank == 2:
        assert text == "LookupError: on machine 1 alone"
    else:
        assert text.startswith("RankZeroError: rank 2 raised in the rank_zero_only")


@pytest.mark.distributed(world_size=2)
def test_the_error_of_the_others_names_its_cause_for_machines_too() -> None:
    def section() -> None:
        with rank_zero_first():
            if get_rank() == 0:
                raise ValueError("not this")

    with pytest.raises((RankZeroError, ValueError)) as caught:
        section()
    assert caught.type is [ValueError, RankZeroError][get_rank()]
    if get_rank() == 1:
        assert caught.value.effect_of == 0  # type: ignore[union-attr]


SCRIPT = """
    import torch.distributed as dist
    from ddp_utils import get_rank, rank_zero_first

    with rank_zero_first():
        print("rank", get_rank(), "of", dist.get_world_size(), flush=True)
"""


@pytest.mark.slow
def test_under_a_launcher_it_makes_the_group(script: Any) -> None:
    run = script(SCRIPT).run(
        "train.py", python=("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["rank 0 of 2", "rank 1 of 2"]


def make_a_group_as_others_do(seconds: float) -> None:
    """Leave our group, and make one as a script does that knows nothing of this package."""
    rank = get_rank()
    store = shared_store()
    if rank == 0:
        port = dist.TCPStore("127.0.0.1", 0, is_master=True)
        store.set("port", str(port.port))
    number = int(store.get("port"))
    mine = port if rank == 0 else dist.TCPStore("127.0.0.1", number, is_master=False)
    dist.destroy_process_group()
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=mine, rank=rank, world_size=2, timeout=timeout)


@pytest.mark.distributed(world_size=2)
def test_a_group_that_somebody_else_made_serves_as_well() -> None:
    for _ in range(3):
        barrier()  # in the first group, whose store goes with it
    make_a_group_as_others_do(seconds=20)
    with rank_zero_first():
        pass
    barrier()
    results = [all_reduce_mean(get_rank()), rank_zero_only(get_rank, broadcast=True)()]
    barrier()
    assert results == [0.5, 0]
