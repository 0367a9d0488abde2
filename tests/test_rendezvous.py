"""Ranks that look for each other: who comes, who does not, and what is wrong with whom.

Ranks that this package started play ranks of another launcher here, as that is fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import from_all_ranks

from ddp_utils import (
    LauncherError,
    RankFailedError,
    RendezvousError,
    World,
    get_rank,
    get_world_size,
    rendezvous,
)
from ddp_utils.process_group import shared_store
from ddp_utils.rendezvous import meet, roll_call
from ddp_utils.testing import run_distributed

Text = str | None
SECONDS = timedelta(seconds=30)


@pytest.fixture
def port(free_port: int) -> int:
    """Return a port that was free on rank zero a moment ago, the same one on all ranks."""
    ports = [free_port]
    dist.broadcast_object_list(ports)
    return ports[0]


def as_under_another_launcher(port: int, **changes: int | str) -> World:
    known: dict[str, int | str] = {
        "rank": get_rank(),
        "world_size": get_world_size(),
        "local_rank": get_rank(),
        "local_world_size": get_world_size(),
        "launcher": "mpi",
        "master_addr": "127.0.0.1",
        "master_port": port,
    }
    return World(**(known | changes))  # type: ignore[arg-type]


def error_of(call: Callable[[], object]) -> Text:
    try:
        call()
    except (RendezvousError, LauncherError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.distributed(world_size=3)
def test_all_ranks_come_and_share_a_store_and_may_do_so_again(port: int) -> None:
    world = as_under_another_launcher(port)
    meeting = meet(world, None, SECONDS)
    seen = roll_call(meeting, world, SECONDS)
    total = meeting.store.add("total", world.rank)
    meeting.store.wait(["done"]) if total < 3 else meeting.store.set("done", "")
    again = meet(world, None, SECONDS)  # a second group, at the same store
    roll_call(again, world, SECONDS)
    assert not again.store.check(["done"])
    assert (meeting.store.add("total", 0), seen) == (3, "127.0.0.1")


@pytest.mark.distributed(world_size=3)
@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("trouble", ["rank 0 on ", "no device for me"]),
        ("same rank", ["there is another rank 1", "MASTER_PORT"]),
        ("other size", ["it was told of", "WORLD_SIZE must be the same"]),
        ("same device", ["same device as rank", "GPU-1", "DDP_UTILS_OVERSUBSCRIBE=1"]),
    ],
)
def test_what_is_wrong_with_one_rank_is_an_error_on_all(
    what: str, texts: list[str], port: int
) -> None:
    """S11: two tasks with one device; R04: the same RANK everywhere, which hung."""
    changes: dict[str, int | str] = {}
    trouble, device = None, None
    if what == "trouble" and get_rank() == 0:
        trouble = LauncherError("no device for me")
    elif what == "same rank" and get_rank() == 2:
        changes["rank"] = 1
    elif what == "other size" and get_rank() == 2:
        changes["world_size"] = 8
    elif what == "same device":
        device = f"cuda GPU-{min(get_rank(), 1)}"
    world = as_under_another_launcher(port, **changes)
    meeting = meet(world, None, SECONDS)
    own = error_of(lambda: roll_call(meeting, world, SECONDS, device=device, trouble=trouble))
    errors = from_all_ranks(own)
    if what == "trouble":
        assert errors[0] == "LauncherError: no device for me"
        errors = errors[1:]
    (error,) = set(errors)
    assert error is not None
    assert error.startswith("RendezvousError")
    for text in texts:
        assert text in error


@pytest.mark.distributed(world_size=3)
def test_a_rank_that_comes_to_another_job_s_store_is_told_and_that_job_is_not(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks 0 and 1 are one job, rank 2 is rank 1 of another that was told the same port.
    world = as_under_another_launcher(port, rank=min(get_rank(), 1), world_size=2)
    monkeypatch.setenv("PMIX_NAMESPACE", "8" if get_rank() == 2 else "7")
    ready = shared_store()
    meeting = meet(world, None, SECONDS)
    if get_rank() == 1:
        ready.wait(["the stranger has come"], SECONDS)
    if get_rank() == 2:
        meeting.store.wait(["roll_call/job"], SECONDS)  # else it would be the stranger's store
    error = error_of(lambda: roll_call(meeting, world, SECONDS))
    ready.set("the stranger has come", "") if get_rank() == 2 else None
    ready.wait(["the stranger has come"], SECONDS)
    if get_rank() == 2:
        assert error is not None
        assert "of job 8 found the store of another job, 7, at 127.0.0.1:" in error
    else:
        assert error is None


@pytest.mark.distributed(world_size=2)
def test_env_as_init_method_is_what_the_launcher_says(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    world = as_under_another_launcher(port)
    meeting = meet(world, "env://", SECONDS)
    roll_call(meeting, world, SECONDS)
    if world.rank == 0:
        assert meeting.hosted_here
    assert sorted(from_all_ranks(meeting.store.add("came", 1))) == [1, 2]


@pytest.mark.distributed(world_size=3)
def test_who_does_not_come_is_named(port: int) -> None:
    world = as_under_another_launcher(port, world_size=5, local_world_size=5)
    meeting = meet(world, None, SECONDS)
    error = error_of(lambda: roll_call(meeting, world, timedelta(seconds=1)))
    assert error is not None
    assert "ranks 3, 4 of 5 did not come to 127.0.0.1:" in error


def lose_rank_zero(port: int) -> Text:
    world = as_under_another_launcher(port)
    meeting = meet(world, None, SECONDS)
    if world.rank == 0:
        meeting.store.wait(["roll_call/here/1"])
        os._exit(3)
    return error_of(lambda: roll_call(meeting, world, SECONDS))


def test_losing_rank_zero_during_the_roll_call_is_no_hang(free_port: int) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(lose_rank_zero, free_port, world_size=2)
    assert caught.value.rank == 0


def test_numbers_of_many_ranks_are_shortened() -> None:
    assert rendezvous.numbered(range(3)) == "ranks 0, 1, 2"
    assert rendezvous.numbered(range(1000)).endswith("8, 9 and 990 more")
