"""Ranks that look for each other: who comes, who does not, and what is wrong with whom.

Ranks that this package started play ranks of another launcher here, as that is fast.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

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


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


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


def come(port: int) -> tuple[int, Text]:
    world = as_under_another_launcher(port)
    meeting = meet(world, None, SECONDS)
    seen = roll_call(meeting, world, SECONDS)
    total = meeting.store.add("total", world.rank)
    meeting.store.wait(["done"]) if total < 3 else meeting.store.set("done", "")
    again = meet(world, None, SECONDS)  # a second group, at the same store
    roll_call(again, world, SECONDS)
    assert not again.store.check(["done"])
    return meeting.store.add("total", 0), seen


def test_all_ranks_come_and_share_a_store_and_may_do_so_again() -> None:
    assert run_distributed(come, free_port(), world_size=3) == [(3, "127.0.0.1")] * 3


def come_with(port: int, what: str) -> Text:
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
    return error_of(lambda: roll_call(meeting, world, SECONDS, device=device, trouble=trouble))


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("trouble", ["rank 0 on ", "no device for me"]),
        ("same rank", ["there is another rank 1", "MASTER_PORT"]),
        ("other size", ["it was told of", "WORLD_SIZE must be the same"]),
        ("same device", ["same device as rank", "GPU-1", "DDP_UTILS_OVERSUBSCRIBE=1"]),
    ],
)
def test_what_is_wrong_with_one_rank_is_an_error_on_all(what: str, texts: list[str]) -> None:
    """S11: two tasks with one device; R04: the same RANK everywhere, which hung."""
    errors = run_distributed(come_with, free_port(), what, world_size=3)
    if what == "trouble":
        assert errors[0] == "LauncherError: no device for me"
        errors = errors[1:]
    (error,) = set(errors)
    assert error is not None
    assert error.startswith("RendezvousError")
    for text in texts:
        assert text in error


def two_jobs(port: int) -> Text:
    """Ranks 0 and 1 are one job, rank 2 is rank 1 of another that was told the same port."""
    world = as_under_another_launcher(port, rank=min(get_rank(), 1), world_size=2)
    os.environ["PMIX_NAMESPACE"] = "8" if get_rank() == 2 else "7"
    ready = shared_store()
    try:
        meeting = meet(world, None, SECONDS)
        if get_rank() == 1:
            ready.wait(["the stranger has come"], SECONDS)
        error = error_of(lambda: roll_call(meeting, world, SECONDS))
        ready.set("the stranger has come", "") if get_rank() == 2 else None
        ready.wait(["the stranger has come"], SECONDS)
    finally:
        del os.environ["PMIX_NAMESPACE"]
    return error


def test_a_rank_that_comes_to_another_job_s_store_is_told_and_that_job_is_not() -> None:
    first, second, stranger = run_distributed(two_jobs, free_port(), world_size=3)
    assert (first, second) == (None, None)
    assert stranger is not None
    assert "of job 8 found the store of another job, 7, at 127.0.0.1:" in stranger


def meet_at_env(port: int) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = as_under_another_launcher(port)
    meeting = meet(world, "env://", SECONDS)
    roll_call(meeting, world, SECONDS)
    if world.rank == 0:
        assert meeting.hosted_here
    return meeting.store.add("came", 1)


def test_env_as_init_method_is_what_the_launcher_says() -> None:
    assert sorted(run_distributed(meet_at_env, free_port(), world_size=2)) == [1, 2]


def come_too_few(port: int) -> Text:
    world = as_under_another_launcher(port, world_size=5, local_world_size=5)
    meeting = meet(world, None, SECONDS)
    return error_of(lambda: roll_call(meeting, world, timedelta(seconds=1)))


def test_who_does_not_come_is_named() -> None:
    for error in run_distributed(come_too_few, free_port(), world_size=3):
        assert error is not None
        assert "ranks 3, 4 of 5 did not come to 127.0.0.1:" in error


def lose_rank_zero(port: int) -> Text:
    world = as_under_another_launcher(port)
    meeting = meet(world, None, SECONDS)
    if world.rank == 0:
        meeting.store.wait(["roll_call/here/1"])
        os._exit(3)
    return error_of(lambda: roll_call(meeting, world, SECONDS))


def test_losing_rank_zero_during_the_roll_call_is_no_hang() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(lose_rank_zero, free_port(), world_size=2)
    assert caught.value.rank == 0


@contextmanager
def service(answer: bytes | None) -> Iterator[int]:
    """A program that is no store, on a port; with None it says nothing at all."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connections.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()


def place(rank: int, **changes: int | str | None) -> World:
    known: dict[str, int | str | None] = {"rank": rank, "world_size": 2, "local_rank": rank}
    known |= {"local_world_size": 2, "launcher": "mpi", "master_addr": "127.0.0.1"}
    return World(**(known | changes))  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_an_error_of_rank_zero_at_once() -> None:
    with service(None) as port, pytest.raises(RendezvousError) as caught:
        meet(place(0, master_port=port), None, SECONDS)
    for text in ("rank 0 on ", f"127.0.0.1:{port}", "Address already in use", "MASTER_PORT"):
        assert text in str(caught.value)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_of_another_program_is_an_error_of_the_others(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for ever for a program that accepts and says nothing."""
    monkeypatch.setattr(rendezvous, "SHORT", timedelta(seconds=1))
    with service(answer) as port, pytest.raises(RendezvousError) as caught:
        meet(place(1, master_port=port), None, SECONDS)
    assert "what listens there is no store of torch" in str(caught.value)
    assert f"127.0.0.1:{port}" in str(caught.value)


def test_an_address_that_does_not_resolve_is_an_error_at_once() -> None:
    """R13: a misspelt MASTER_ADDR, waited for for half an hour."""
    with pytest.raises(RendezvousError) as caught:
        meet(place(1, master_addr="no-such-host.invalid", master_port=29500), None, None)
    for text in ("rank 1 on ", "no-such-host.invalid", "29500", "does not resolve"):
        assert text in str(caught.value)


def test_a_rank_zero_that_cannot_be_reached_is_told_with_place_and_reason() -> None:
    with pytest.raises(RendezvousError) as caught:
        meet(place(1, master_port=free_port()), None, timedelta(seconds=0.2))
    for text in ("rank 1 on ", "could not reach rank 0 at 127.0.0.1:", "refused"):
        assert text in str(caught.value)


def test_srun_s_own_address_stands_in_for_a_node_name_that_does_not_resolve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    world = place(1, launcher="slurm", master_addr="no-such-host.invalid", master_port=1)
    assert rendezvous._host_to_try(world, SECONDS) == ("127.0.0.1", SECONDS)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")  # the user's own is never replaced
    with pytest.raises(RendezvousError):
        rendezvous._host_to_try(world, SECONDS)


def test_the_store_of_one_machine_listens_on_loopback_only() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        with rendezvous.listen(host, 0) as listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    with rendezvous.listen("n1", 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_a_machine_without_ipv6_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_server

    def without_ipv6(address: tuple[str, int], **options: object) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(address, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with rendezvous.listen("n1", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_rank_zero_on_a_machine_that_is_not_the_master_s_is_told_if_that_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R04: RANK=0 everywhere, a world of one on each machine, and a hang."""
    monkeypatch.setattr(rendezvous, "_is_here", lambda host: False)
    with service(None) as port, pytest.raises(RendezvousError) as caught:
        rendezvous.host_store("127.0.0.1", port)
    assert "Was RANK=0 (or NODE_RANK=0) given to several machines" in str(caught.value)
    rendezvous.host_store("127.0.0.1", free_port())  # nobody there: a service in front, perhaps


def test_whether_an_address_is_this_machine_s() -> None:
    assert rendezvous._is_here("127.0.0.1")
    assert rendezvous._is_here("localhost")
    assert not rendezvous._is_here("192.0.2.77")


def test_an_ipv6_address_needs_no_brackets() -> None:
    """R08: ``tcp://::1:29500`` cannot be parsed; a store object has nothing to parse."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    store = rendezvous.host_store("::1", port)
    world = place(1, master_addr="::1", master_port=port)
    guest, address = rendezvous.join_store(world, SECONDS)
    guest.set("key", "value")
    assert (store.get("key"), address) == (b"value", "::1")


def test_libuv_is_not_asked_for_where_the_wheels_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: on Windows torch 2.4 to 2.6 has no libuv."""
    asked: list[object] = []
    monkeypatch.setattr(
        rendezvous.dist, "TCPStore", lambda *_, **options: asked.append(options["use_libuv"])
    )
    rendezvous._client("127.0.0.1", 1)
    monkeypatch.setattr(rendezvous.sys, "platform", "win32")
    rendezvous._client("127.0.0.1", 1)
    assert asked == [True, False]


def test_a_waiting_rank_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_WORD", 0.0)
    monkeypatch.delenv("DDP_UTILS_QUIET", raising=False)
    with pytest.raises(RendezvousError):
        meet(place(1, master_port=free_port()), None, timedelta(seconds=0.1))
    assert "rank 1 on " in (said := capfd.readouterr().err)
    assert "has waited 0 s for rank 0 at 127.0.0.1:" in said


def test_numbers_of_many_ranks_are_shortened() -> None:
    assert rendezvous.numbered(range(3)) == "ranks 0, 1, 2"
    assert rendezvous.numbered(range(1000)).endswith("8, 9 and 990 more")
