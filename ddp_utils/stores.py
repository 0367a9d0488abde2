"""How is a store hosted for the ranks of a job, and how is one reached?

At a known address and port: whoever cannot listen there, or finds something else there, is told
so with the place and the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ddp_utils.ground import settings
from ddp_utils.ground.errors import RendezvousError
from ddp_utils.ground.saying import say
from ddp_utils.world.addresses import is_loopback
from ddp_utils.world.world import World

__all__ = [
    "PATIENCE",
    "Waiting",
    "check_resolves",
    "first_line",
    "host_store",
    "host_to_try",
    "join_store",
    "listen",
    "notice_a_lost_machine",
    "resolve",
    "show_presence",
    "stay_until_all_have_left",
    "who",
]

PATIENCE = timedelta(minutes=10)
"""How long ranks wait for each other before the group exists, where no timeout was given."""
ANSWER = timedelta(seconds=5)
"""How long a store may take to answer once it has accepted a connection, on a busy machine."""
ANSWER_PER_RANK = timedelta(milliseconds=5)
"""And so much more for each rank: it answers them one after another."""
NOT_OWN_ADDRESS = timedelta(minutes=1)
"""How long ranks wait at an address that is only likely to be the master's."""
FIRST_WORD = 15.0
"""After so many seconds a waiting rank says on stderr what it waits for; then ever more rarely."""


def host_store(host: str, port: int) -> dist.TCPStore:
    """Return a store that listens at a port of this machine, on loopback only if that is asked.

    Raises:
        RendezvousError: the port is taken, here or on the machine that the host names.
    """
    _check_only_rank_zero(host, port)
    try:
        listener = listen(host, port)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 on {socket.gethostname()} cannot listen at {host}:{port}: {error.strerror}. "
            "Another job or program has the port. Set MASTER_PORT to a free one, the same for "
            "all ranks."
        ) from None
    return dist.TCPStore(
        "::1" if listener.getsockname()[0] == "::1" else "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=sys.platform != "win32",  # the wheels for Windows come without it
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on loopback if ``host`` is that, else on all interfaces."""
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        return socket.create_server((address, port), family=family, backlog=4096)
    try:
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
        )
    except (OSError, ValueError) as error:  # no IPv6 here, in one of several ways
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
    return socket.create_server(("", port), backlog=4096)


def _check_only_rank_zero(host: str, port: int) -> None:
    """Raise where the address is another machine's, and somebody listens there.

    RANK=0 on every machine would make worlds of one each, which wait for their others. That the
    address is not this machine's is no error by itself: it may be that of a service in front.
    """
    if _is_here(host):
        return
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return
    raise RendezvousError(
        f"rank 0 on {socket.gethostname()} would host the store, but another process listens at "
        f"{host}:{port}, which is no address of this machine. Was RANK=0 (or NODE_RANK=0) given "
        "to several machines, or is MASTER_ADDR not that of the machine that runs rank 0?"
    )


def _is_here(host: str) -> bool:
    """Whether one of a host's addresses is this machine's, or none is known."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def join_store(world: World, patience: timedelta) -> tuple[dist.TCPStore, str]:
    """Return the store that another process hosts at the master's address, and that address.

    Raises:
        RendezvousError: see :func:`meet`.
    """
    assert world.master_port is not None
    host, patience = host_to_try(world, patience)
    address = _wait_until_reachable(world, host, patience)
    try:
        limit = ANSWER + world.world_size * ANSWER_PER_RANK
        store = _in_time(lambda: _client(address, world.master_port or 0, limit), limit)
    except (RuntimeError, TimeoutError) as error:
        raise RendezvousError(
            f"{who(world)} reached {host}:{world.master_port}, but what listens there is no store "
            f"of torch ({first_line(error)}): the port belongs to another program. Set "
            "MASTER_PORT to a free port, the same for all ranks."
        ) from None
    return store, address


def _client(address: str, port: int, limit: timedelta) -> dist.TCPStore:
    return dist.TCPStore(
        address, port, is_master=False, timeout=limit, use_libuv=sys.platform != "win32"
    )


def _in_time(make: Callable[[], dist.TCPStore], limit: timedelta) -> dist.TCPStore:
    """Return what ``make`` returns; torch itself waits for ever on a port that says nothing."""
    outcome: list[dist.TCPStore | Exception] = []

    def run() -> None:
        try:
            outcome.append(make())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True, name="ddp_utils.join_store")
    thread.start()
    thread.join(limit.total_seconds())
    if not outcome:
        raise TimeoutError(f"no answer within {limit.total_seconds():.3g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def host_to_try(world: World, patience: timedelta) -> tuple[str, timedelta]:
    """Return the master's host, or under Slurm srun's own address where that does not resolve.

    Where node names do not resolve, the address of the machine that ran srun often is that of
    task 0 (in a batch job it is the first node), but not always: so it is given less time.
    """
    assert world.master_addr is not None
    if resolve(world.master_addr) is not None:
        return world.master_addr, patience
    fallback = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if world.launcher == "slurm" and fallback and not os.environ.get("MASTER_ADDR"):
        return fallback, min(patience, NOT_OWN_ADDRESS)
    check_resolves(world)
    return world.master_addr, patience


def check_resolves(world: World) -> None:
    """Raise at once for an address that does not resolve, instead of at the timeout."""
    if world.master_addr is None or resolve(world.master_addr) is not None:
        return
    raise RendezvousError(
        f"{who(world)}: the address where the ranks meet, {world.master_addr!r} (port "
        f"{world.master_port}), does not resolve. Set MASTER_ADDR to a name that all machines "
        "know, or to the address, of the machine that runs rank 0."
    )


def resolve(host: str) -> str | None:
    """Return one address of a host, None where its name does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _wait_until_reachable(world: World, host: str, patience: timedelta) -> str:
    """Return the address under which something listens at the master's port, once it does."""
    waiting = Waiting(world, patience)
    while True:
        try:
            with socket.create_connection((host, world.master_port or 0), timeout=5) as probe:
                return str(probe.getpeername()[0])
        except OSError as error:
            reason = error.strerror or str(error)
        if waiting.over(f"rank 0 at {host}:{world.master_port} ({reason})"):
            raise RendezvousError(
                f"{who(world)} could not reach rank 0 at {host}:{world.master_port} within "
                f"{patience.total_seconds():.0f} s ({reason}). Is rank 0 running, does it run on "
                "that machine, and may this one reach the port? MASTER_ADDR and MASTER_PORT say "
                "where it is."
            )


class Waiting:
    """Paces a loop that polls, says now and then what it waits for, and knows when to stop."""

    def __init__(self, world: World, patience: timedelta) -> None:
        self._world = world
        self._start = time.monotonic()
        self._limit = patience.total_seconds()
        self._pause = 0.005
        self._next_word = FIRST_WORD

    def over(self, what: str) -> bool:
        """Sleep for a while; return whether the time is up."""
        waited = time.monotonic() - self._start
        if waited >= self._limit:
            return True
        if waited >= self._next_word and not settings.QUIET.get():
            self._next_word *= 2
            say(f"ddp_utils: {who(self._world)} has waited {waited:.0f} s for {what}")
        time.sleep(self._pause)
        self._pause = min(0.5, self._pause * 1.5)
        return False


def who(world: World) -> str:
    """Return how a message names this rank."""
    return f"rank {world.rank} on {socket.gethostname()}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; torch appends its C++ stack."""
    return str(error).partition("\n")[0]


# How rank zero stays until the others have left

_presence: list[socket.socket] = []
"""What another rank holds open to rank zero, as long as it lives."""


def stay_until_all_have_left(store: dist.Store, world: World) -> None:
    """Keep this process, which hosts the store, from ending before the other ranks do.

    Without it ranks that are still at work would lose the store with rank zero, and with it the
    means to make a group, and NCCL's watchdog its ground. A count of goodbyes would not do: a
    rank that is killed never says one. So every other rank holds a connection to rank zero, over
    which nothing is sent and which the kernel closes at the other's end, whatever that end is;
    and rank zero, at its own end, waits for the last to close. It does not wait if it fails.
    """
    assert world.master_addr is not None
    listener = listen(world.master_addr, 0)
    dist.PrefixStore("ddp_utils_presence", store).set("port", str(listener.getsockname()[1]))
    atexit.register(_wait_for_the_last, listener, os.getpid())


def show_presence(store: dist.Store, address: str, world: World) -> None:
    try:
        port = int(dist.PrefixStore("ddp_utils_presence", store).get("port"))
    except dist.DistError as error:
        raise RendezvousError(
            f"{who(world)} found a store at {world.master_addr}:{world.master_port} that is not "
            f"of rank 0 of this job ({first_line(error)}): another job has the port. Set "
            "MASTER_PORT to a free one, the same for all ranks."
        ) from None
    with contextlib.suppress(OSError):  # a port that is shut to us: rank zero will not wait
        _presence.append(socket.create_connection((address, port), 3))


def _wait_for_the_last(listener: socket.socket, owner: int) -> None:
    """Return when all connections that came in over ``listener`` are closed."""
    failed = getattr(sys, "last_value", None) is not None  # an exception has ended this process
    if failed or os.getpid() != owner:
        return
    listener.setblocking(False)
    present: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while True:
            present.append(listener.accept()[0])
            notice_a_lost_machine(present[-1])
    for each in present:
        with contextlib.suppress(OSError):
            each.recv(1)  # nothing ever comes: it returns at the other's end
    listener.close()


def notice_a_lost_machine(connection: socket.socket) -> None:
    """Let the kernel end a connection within half a minute after its machine was lost."""
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
