"""How do the ranks of a job find each other, and are all of them there?

They meet at a store: one that somebody hosts already (torchrun's agent, this package's parent),
else one that rank zero hosts. Whatever is wrong with one rank there is told to all of them, and
who does not come is named.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from ddp_utils.ground.errors import DistributedError, RendezvousError
from ddp_utils.stores import (
    PATIENCE,
    Waiting,
    check_resolves,
    first_line,
    host_store,
    host_to_try,
    join_store,
    resolve,
    show_presence,
    stay_until_all_have_left,
    who,
)
from ddp_utils.world.addresses import is_loopback, job_name
from ddp_utils.world.world import World

__all__ = ["Meeting", "meet", "roll_call"]

LINGER = timedelta(seconds=10)
"""How long rank zero stays to tell the ranks that are late why the job has failed."""


@dataclass
class Meeting:
    """A place where all ranks of a job can leave word for each other."""

    store: dist.Store
    """Fresh for each group that this process joins."""
    master_ip: str | None = None
    """The address under which this rank reached the store, None where it hosts it."""
    hosted_here: bool = False
    """Whether the store ends with this process."""


_known: dict[tuple[object, ...], tuple[dist.Store, Meeting]] = {}
"""Stores by where they are. They live as long as the process: a group that is made after another
has been left meets at the same store again, which somebody slower may still be using."""
_times_met = 0


def meet(world: World, init_method: str | None, timeout: timedelta | None) -> Meeting:
    """Return where the ranks of a job meet, one time more. Every rank has to come.

    Raises:
        RendezvousError: the address does not resolve, the port is somebody else's, or rank zero
            cannot be reached in time.
    """
    global _times_met
    key = (init_method, world.master_addr, world.master_port, world.rank, world.world_size)
    if key not in _known:
        known = _meet(world, init_method, timeout or PATIENCE)
        _known[key] = (known.store, known)
    store, known = _known[key]
    _times_met += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    fresh = dist.PrefixStore(f"ddp_utils_group_{attempt}_{_times_met}", store)
    return replace(known, store=fresh)


def _meet(world: World, init_method: str | None, patience: timedelta) -> Meeting:
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if init_method not in (None, "env://") or (agent and world.launcher == "torchrun"):
        return _meet_as_torch_does(world, init_method or "env://", patience)
    if world.master_addr is None or world.master_port is None:
        raise RendezvousError(
            f"rank {world.rank} of {world.world_size} ({world.launcher}) knows no address where "
            "the ranks meet: set MASTER_ADDR and MASTER_PORT"
        )
    if world.launcher == "spawn":
        store, address = join_store(world, patience)
        return Meeting(store, address)
    if world.rank == 0:
        host_to_try(world, patience)  # an error here too where nobody could find this rank
        store = host_store(world.master_addr, world.master_port)
        stay_until_all_have_left(store, world)
        return Meeting(store, hosted_here=True)
    store, address = join_store(world, patience)
    show_presence(store, address, world)
    return Meeting(store, address)


def _meet_as_torch_does(world: World, init_method: str, patience: timedelta) -> Meeting:
    if init_method == "env://":
        check_resolves(world)
    try:
        found = dist.rendezvous(init_method, world.rank, world.world_size, timeout=patience)
        store, _, _ = next(iter(found))
    except (RuntimeError, OSError) as error:
        raise RendezvousError(
            f"{who(world)} could not meet the others at {init_method} "
            f"({world.master_addr}:{world.master_port}): {first_line(error)}"
        ) from error
    return Meeting(store, resolve(world.master_addr) if world.master_addr else None)


def roll_call(
    meeting: Meeting,
    world: World,
    timeout: timedelta | None,
    *,
    device: str | None = None,
    trouble: DistributedError | None = None,
) -> str | None:
    """Wait until all ranks are at the store, and learn of any rank's trouble there.

    Args:
        meeting: What :func:`meet` returned.
        world: Who this rank is.
        timeout: How long to wait.
        device: What identifies this rank's accelerator among all, where ranks must not share.
        trouble: What this rank has found wrong with itself.

    Returns:
        The address under which other machines reach rank zero's. It is a loopback one only if
        all ranks reached it so; None if nobody knows.

    Raises:
        DistributedError: ``trouble``, on this rank; as :class:`RendezvousError` on the others.
        RendezvousError: two ranks have the same number or the same device, or some did not come;
            raised alike on all ranks that are there.
    """
    store = dist.PrefixStore("roll_call", meeting.store)
    try:
        told = _call(store, meeting, world, timeout or PATIENCE, device, trouble)
        if told is None and trouble is None:
            return _best_master_ip(store)
    except dist.DistError as error:
        told = (
            f"{who(world)} lost rank 0 at {world.master_addr}:{world.master_port} before all "
            f"ranks had come ({first_line(error)}): see what rank 0 says"
        )
    raise trouble or RendezvousError(told)


def _call(
    store: dist.Store,
    meeting: Meeting,
    world: World,
    patience: timedelta,
    device: str | None,
    trouble: DistributedError | None,
) -> str | None:
    """Return what is wrong with any rank, once all are there or one has told."""
    _check_same_job(store, world)
    text = str(trouble) if trouble is not None else _conflict(store, world, device)
    if meeting.master_ip is not None:
        kind = "loopback" if is_loopback(meeting.master_ip) else "network"
        store.compare_set(f"master_ip/{kind}", "", meeting.master_ip)
    if text is not None:
        store.compare_set("trouble", "", f"{who(world)}: {text}")
        store.set("done", "trouble")
    elif store.add("came", 1) == world.world_size:
        store.set("done", "all")
    waiting = Waiting(world, patience)
    while not store.check(["done"]):
        if waiting.over("the other ranks: only some of them have come"):
            raise RendezvousError(_absentees(store, world, patience))
    if not store.check(["trouble"]):
        return None
    told = store.get("trouble").decode()
    _tell_the_late(store, world, meeting.hosted_here)
    return told


def _check_same_job(store: dist.Store, world: World) -> None:
    """Raise where the store is another job's, without telling that job, which is well."""
    own = job_name(world.launcher, os.environ) or "unknown"
    known = store.compare_set("job", "", own).decode()
    if known != own:
        raise RendezvousError(
            f"{who(world)} of job {own} found the store of another job, {known}, at "
            f"{world.master_addr}:{world.master_port}. Set MASTER_PORT to another port for one "
            "of them."
        )


def _best_master_ip(store: dist.Store) -> str | None:
    for key in ("master_ip/network", "master_ip/loopback"):
        if store.check([key]):
            return store.get(key).decode()
    return None


def _tell_the_late(store: dist.Store, world: World, hosted_here: bool) -> None:
    """Let rank zero, which hosts the store, stay until the others know of the trouble."""
    told = store.add("told", 1)
    deadline = time.monotonic() + LINGER.total_seconds()
    while hosted_here and told < world.world_size and time.monotonic() < deadline:
        time.sleep(0.02)
        told = store.add("told", 0)


def _conflict(store: dist.Store, world: World, device: str | None) -> str | None:
    """Return what this rank has in common with another that only one may have."""
    me = f"{world.rank}/{world.world_size} {socket.gethostname()} {os.getpid()}"
    first = store.compare_set(f"here/{world.rank}", "", me).decode()
    if first != me:
        return (
            f"there is another rank {world.rank} at {world.master_addr}:{world.master_port} "
            f"({first}). Either two processes were given the same rank, or another job uses the "
            "same MASTER_PORT."
        )
    size = store.compare_set("world_size", "", str(world.world_size)).decode()
    if size != str(world.world_size):
        return (
            f"it was told of {world.world_size} ranks, and another rank at {world.master_addr}:"
            f"{world.master_port} of {size}: WORLD_SIZE must be the same for all"
        )
    if device is None:
        return None
    other = store.compare_set(f"device/{device}", "", str(world.rank)).decode()
    if other == str(world.rank):
        return None
    return (
        f"it has the same device as rank {other} ({device}). Start as many ranks as there are "
        "devices, give each task a device of its own (srun --gpus-per-task=1), or set "
        "DDP_UTILS_OVERSUBSCRIBE=1 to let ranks share devices."
    )


def _absentees(store: dist.Store, world: World, patience: timedelta) -> str:
    absent = [rank for rank in range(world.world_size) if not store.check([f"here/{rank}"])]
    return (
        f"{numbered(absent)} of {world.world_size} did not come to {world.master_addr}:"
        f"{world.master_port} within {patience.total_seconds():.0f} s, which {who(world)} did. "
        "Were they started, with the same MASTER_ADDR and MASTER_PORT, and did they fail "
        "before?"
    )


def numbered(ranks: Iterable[int], most: int = 10) -> str:
    """Return ``rank 3`` or ``ranks 1, 2, 5``, shortened if there are many.

    >>> numbered([3]), numbered(range(100), most=2)
    ('rank 3', 'ranks 0, 1 and 98 more')
    """
    known = list(ranks)
    shown = ", ".join(map(str, known[:most]))
    rest = f" and {len(known) - most} more" if len(known) > most else ""
    return f"rank{'s' if len(known) > 1 else ''} {shown}{rest}"
