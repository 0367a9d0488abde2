"""How does this process come into a process group, and how does it leave?

A group that was here already is used and left alone; one that is made here is ended here.
What the ranks say to each other without a collective goes through :func:`shared_store`.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_utils.ground import gloo_threads, settings
from ddp_utils.ground._torch_private import default_store
from ddp_utils.ground.errors import DistributedError, LauncherError, RendezvousError
from ddp_utils.ground.saying import say
from ddp_utils.rendezvous import meet, roll_call
from ddp_utils.world import devices, interfaces
from ddp_utils.world.addresses import is_loopback
from ddp_utils.world.cores import share_of_cores, usable_cores
from ddp_utils.world.world import World, current_world, detect_world, get_device

__all__ = [
    "agreed_seed",
    "find_rank",
    "init_distributed",
    "introduce",
    "set_threads",
    "shared_store",
    "shutdown_distributed",
    "whereabouts",
]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's own for gloo, for what waits at the store."""

LONGEST_JOIN = timedelta(minutes=1)
"""How long the slowest rank may take to connect to the others once the first one is through."""

_groups_made = itertools.count()
_made_here: dist.ProcessGroup | None = None


def init_distributed(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: float | timedelta | None = None,
) -> World:
    """Bring this process into the process group, and return who it is in there.

    For scripts that keep their own structure; ``distributed_main`` calls it by itself. It may be
    called any number of times, and uses a group that is there already. Without a launcher it
    makes a group of one rank, without an agreed port.

    Args:
        backend: A backend by torch's name. By default gloo on the CPU, and on an accelerator its
            own beside gloo (``"cpu:gloo,cuda:nccl"``).
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``; by default what the
            launcher says.
        timeout: Of collectives, in seconds or as a ``timedelta``; by default
            ``DDP_UTILS_TIMEOUT``, else torch's.

    Raises:
        LauncherError: The environment names a launcher only in half.
        RendezvousError: An address or a port is wrong, or some ranks did not come.
        ValueError: This torch has no such backend.

    Example:
        >>> world = init_distributed()
        >>> world.world_size
        1
        >>> shutdown_distributed()
    """
    global _made_here
    if settings.STARTED_BY_US not in os.environ:
        gloo_threads.rest_at_exit()
    if dist.is_initialized():
        return current_world()
    world = detect_world(os.environ)
    wait = _seconds(timeout)
    if world.launcher in ("slurm", "mpi"):  # torchrun and this package's own start do it themselves
        set_threads(world.local_world_size, _cores_per_task(world))
    backend = _checked_backend(backend or devices.backend_for(devices.accelerator_type()))
    store, device, interface = _come_together(world, init_method, wait)
    options: dict[str, object] = {} if wait is None else {"timeout": wait}
    if device.type != "cpu":
        options["device_id"] = device
    options |= {"store": store, "rank": world.rank, "world_size": world.world_size}
    with _gloo_uses(interface, for_good=world.world_size > 1):
        dist.init_process_group(backend, **options)  # type: ignore[arg-type]
    _made_here = dist.group.WORLD
    _say_joined(world.world_size)
    agreed_seed()
    introduce()
    if world.rank == 0 and world.world_size > 1 and not settings.QUIET.get():
        lines = [_start_line(world, backend, device), *_remarks(world, device)]
        say("\n".join(f"ddp_utils: {line}" for line in lines))
    return current_world()


def shutdown_distributed() -> None:
    """Leave the process group if :func:`init_distributed` made it; else do nothing.

    Not a collective: each rank leaves when it is done.

    Example:
        >>> world = init_distributed()
        >>> world.world_size
        1
        >>> shutdown_distributed()
    """
    _leave_group()


def _leave_group() -> dist.ProcessGroup | None:
    """Leave the group if it was made here, and return it: collecting it closes its connections."""
    global _made_here
    made, _made_here = _made_here, None
    if made is not None and dist.is_initialized() and dist.group.WORLD is made:
        _let_all_join()
        dist.destroy_process_group()
    return made


def leave(store: dist.Store, rank: int, how: str) -> dist.ProcessGroup | None:
    """Leave the group, with word for those who may still wait for this rank on the store.

    ``store`` is :func:`shared_store` as it was inside the group, which may be gone by now.
    Peers that wait in a collective notice by themselves: their connection closes with the
    returned object, or with the process, which is faster where it is about to end.
    """
    try:
        store.set(f"left/{rank}", how)
    except RuntimeError:
        pass  # whoever kept the store has gone; so has everybody who could wait
    return _leave_group()


def _say_joined(world_size: int) -> None:
    store = shared_store()
    if store.add("joined", 1) == world_size:
        store.set("all joined", "")


def _let_all_join() -> None:
    """Wait until the others have made the group, which a closed connection would spoil for them.

    A rank that has nothing to do may be through before the last one has connected to the rest.
    """
    try:
        shared_store().wait(["all joined"], LONGEST_JOIN)
    except RuntimeError:
        pass  # the store is gone, or a rank died while joining: whoever waits for it will tell


def shared_store() -> dist.Store:
    """Return the store that all ranks of the group share, under a prefix of this package's own.

    With it ranks can leave word for each other without a collective. Needs a process group.
    """
    return dist.PrefixStore("ddp_utils", default_store())


def introduce() -> None:
    """Leave word in the store of where this rank runs, for messages about it."""
    store, key = shared_store(), f"who/{dist.get_rank()}"
    if not store.check([key]):
        world = current_world()
        word = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "node_rank": world.node_rank,
            "local_rank": world.local_rank,
        }
        store.set(key, json.dumps(word))


def whereabouts(rank: int) -> str:
    """Say on which host and as which process a rank runs, if it has left word."""
    store = shared_store()
    if not store.check([f"who/{rank}"]):
        return f"rank {rank}: has not left word of where it runs"
    who = json.loads(store.get(f"who/{rank}"))
    return f"rank {rank}: host {who['host']}, pid {who['pid']}"


def find_rank(node_rank: int, local_rank: int) -> int | None:
    """Return the rank that has left word to be there, or None if none has."""
    store = shared_store()
    for rank in range(dist.get_world_size()):
        if store.check([f"who/{rank}"]):
            who = json.loads(store.get(f"who/{rank}"))
            if (who["node_rank"], who["local_rank"]) == (node_rank, local_rank):
                return rank
    return None


def agreed_seed() -> int:
    """Return one random 63-bit number that is the same on all ranks of the group.

    Whoever asks first decides: no rank waits for another. Without a group, a fresh number.
    """
    proposal = secrets.randbits(63)
    if not dist.is_initialized():
        return proposal
    return int(shared_store().compare_set("seed", "", str(proposal)))


def set_threads(local_world_size: int, per_task: int | None = None) -> None:
    """Share this machine's usable cores between the ranks on it, unless the user has decided.

    Without this N ranks would each use all cores and slow each other down. ``per_task`` is the
    number that the launcher was asked for.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = share_of_cores(
            local_world_size,
            usable=usable_cores(),
            available=usable_cores(os.getppid()),
            per_task=per_task,
        )
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def _cores_per_task(world: World) -> int | None:
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(asked) if world.launcher == "slurm" and asked.isdecimal() else None


def _seconds(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        timeout = settings.TIMEOUT.get()
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    return timedelta(seconds=timeout)


def _checked_backend(backend: str) -> str:
    names = [part.rpartition(":")[2].lower() for part in backend.split(",")]
    lacking = [name for name in names if not dist.is_backend_available(name)]
    if lacking:
        known = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
        raise ValueError(
            f"backend {backend!r}: this torch ({torch.__version__}) has no {lacking[0]!r}. "
            f"It has: {', '.join(known)}. Leave backend out to get the one for the device."
        )
    return backend


def _come_together(
    world: World, init_method: str | None, wait: timedelta | None
) -> tuple[dist.Store, torch.device, str | None]:
    """Return the job's store, this rank's device and gloo's interface, once all ranks are there.

    What is wrong with one rank alone is told to all of them at the store. Ranks that this
    package started on one machine need no roll call: their parent sees what becomes of them.
    """
    if init_method is None and world.world_size == 1:
        return dist.HashStore(), _own_device(), "lo"
    if world.launcher == "spawn" and world.num_nodes == 1:
        return _store_of_our_parent(world, wait), _own_device(), "lo"
    meeting = meet(world, init_method, wait)
    device, trouble = torch.device("cpu"), None
    try:
        _check_interface()
        device = _own_device()
    except DistributedError as error:
        trouble = error
    shared = settings.OVERSUBSCRIBE.get()
    identity = None if shared else devices.identity(device)
    master_ip = roll_call(meeting, world, wait, device=identity, trouble=trouble)
    meeting.store.set_timeout(wait or DEFAULT_TIMEOUT)
    return meeting.store, device, _interface(world, master_ip)


def _own_device() -> torch.device:
    """Return this rank's device, made the current one of its type."""
    device = get_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def _store_of_our_parent(world: World, timeout: timedelta | None) -> dist.Store:
    assert world.master_addr is not None
    assert world.master_port is not None
    store = dist.TCPStore(
        world.master_addr,
        world.master_port,
        is_master=False,
        timeout=timeout or timedelta(minutes=5),
    )
    # A group made after another has been left must not find that one's addresses.
    fresh = dist.PrefixStore(f"group_{next(_groups_made)}", store)
    holder = int(fresh.compare_set(f"held/{world.rank}", "", str(os.getpid())))
    if holder != os.getpid():
        raise LauncherError(
            f"process {holder} is rank {world.rank} already, and this one, {os.getpid()}, was "
            "started with its variables, perhaps by it. A script that a rank starts, and that is "
            "to be on its own, needs DDP_UTILS_LAUNCHER=none in its environment."
        )
    return fresh


def _check_interface() -> None:
    """Raise for a ``GLOO_SOCKET_IFNAME`` that gloo could not use, in words that help."""
    value = os.environ.get(interfaces.GLOO)
    wrong = interfaces.wrong_interface(value, interfaces.interface_addresses()) if value else None
    if wrong is not None:
        raise RendezvousError(f"{interfaces.GLOO}={value}: {wrong}")


def _interface(world: World, master_ip: str | None) -> str | None:
    """Return the interface for gloo: loopback on one machine, else the one towards rank zero.

    ``master_ip`` is how other machines see rank zero's, where the name of a machine often stands
    for loopback. None leaves the choice to gloo.
    """
    host = master_ip or world.master_addr
    if host is None or (world.num_nodes == 1 and not is_loopback(host)):
        return None
    own = interfaces.source_address(host, world.master_port or 0)
    if own is None:
        return None
    return interfaces.choose_interface(own, interfaces.interface_addresses())


@contextmanager
def _gloo_uses(interface: str | None, *, for_good: bool) -> Iterator[None]:
    """Let gloo listen on one interface, unless the user has named another.

    gloo reads the variable when it makes a group. In a rank it stays, for groups made later; a
    process that is alone keeps its environment.
    """
    known = {name for _, name in socket.if_nameindex()}
    if interface not in known or interfaces.GLOO in os.environ or sys.platform != "linux":
        yield
        return
    os.environ[interfaces.GLOO] = str(interface)
    try:
        yield
    finally:
        if not for_good:
            del os.environ[interfaces.GLOO]


def _start_line(world: World, backend: str, device: torch.device) -> str:
    nodes = "1 node" if world.num_nodes == 1 else f"{world.num_nodes} nodes"
    return (
        f"{world.world_size} ranks on {nodes}, launcher {world.launcher}, "
        f"backend {backend}, {device.type} devices, {torch.get_num_threads()} threads a rank"
    )


def _remarks(world: World, device: torch.device) -> list[str]:
    """Return what looks like a mistake about devices, though it may be meant."""
    visible = devices.visible_devices(device.type)
    found = (
        devices.idle_devices(world.launcher, world.local_world_size, visible),
        devices.shown_too_late(visible, os.environ),
    )
    return [each for each in found if each is not None]
