"""Stores: a port that is taken, a host that is not there, a program that is no store."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from ddp_utils import RendezvousError, World, stores
from ddp_utils.rendezvous import meet

SECONDS = timedelta(seconds=30)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


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
    monkeypatch.setattr(stores, "ANSWER", timedelta(seconds=1))
    with service(answer) as port, pytest.raises(RendezvousError) as caught:
        meet(place(1, master_port=port), None, SECONDS)
    assert "what listens there is no store of torch" in str(caught.value)
    assert f"127.0.0.1:{port}" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_does_not_resolve_is_an_error_at_once(rank: int) -> None:
    """R13: a misspelt MASTER_ADDR, waited for for half an hour."""
    with pytest.raises(RendezvousError) as caught:
        meet(place(rank, master_addr="no-such-host.invalid", master_port=29500), None, None)
    for text in (f"rank {rank} on ", "no-such-host.invalid", "29500", "does not resolve"):
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
    assert stores.host_to_try(world, SECONDS) == ("127.0.0.1", SECONDS)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")  # the user's own is never replaced
    with pytest.raises(RendezvousError):
        stores.host_to_try(world, SECONDS)


def test_the_store_of_one_machine_listens_on_loopback_only() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        with stores.listen(host, 0) as listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    with stores.listen("n1", 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_a_machine_without_ipv6_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_server

    def without_ipv6(address: tuple[str, int], **options: object) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(address, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with stores.listen("n1", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_rank_zero_on_a_machine_that_is_not_the_master_s_is_told_if_that_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R04: RANK=0 everywhere, a world of one on each machine, and a hang."""
    monkeypatch.setattr(stores, "_is_here", lambda host: False)
    with service(None) as port, pytest.raises(RendezvousError) as caught:
        stores.host_store("127.0.0.1", port)
    assert "Was RANK=0 (or NODE_RANK=0) given to several machines" in str(caught.value)
    stores.host_store("127.0.0.1", free_port())  # nobody there: a service in front, perhaps


def test_whether_an_address_is_this_machine_s() -> None:
    assert stores._is_here("127.0.0.1")
    assert stores._is_here("localhost")
    assert not stores._is_here("192.0.2.77")


def test_an_ipv6_address_needs_no_brackets() -> None:
    """R08: ``tcp://::1:29500`` cannot be parsed; a store object has nothing to parse."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    store = stores.host_store("::1", port)
    world = place(1, master_addr="::1", master_port=port)
    guest, address = stores.join_store(world, SECONDS)
    guest.set("key", "value")
    assert (store.get("key"), address) == (b"value", "::1")


def test_libuv_is_not_asked_for_where_the_wheels_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: on Windows torch 2.4 to 2.6 has no libuv."""
    asked: list[object] = []
    monkeypatch.setattr(
        stores.dist, "TCPStore", lambda *_, **options: asked.append(options["use_libuv"])
    )
    stores._client("127.0.0.1", 1, SECONDS)
    monkeypatch.setattr(stores.sys, "platform", "win32")
    stores._client("127.0.0.1", 1, SECONDS)
    assert asked == [True, False]


def test_a_waiting_rank_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "FIRST_WORD", 0.0)
    monkeypatch.delenv("DDP_UTILS_QUIET", raising=False)
    with pytest.raises(RendezvousError):
        meet(place(1, master_port=free_port()), None, timedelta(seconds=0.1))
    assert "rank 1 on " in (said := capfd.readouterr().err)
    assert "has waited 0 s for rank 0 at 127.0.0.1:" in said
