"""How does this process come into a process group, and how does it leave?

A group that was here already is used and left alone; one that is made here is ended here.
What the ranks say to each other without a collective goes through :func:`shared_store`.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_utils.ground import settings
from ddp_utils.ground._torch_private import default_store
from ddp_utils.ground.errors import RendezvousError
from ddp_utils.world import devices
from ddp_utils.world.world import World, current_world, detect_world, get_device

__all__ = [
    "agreed_seed",
    "init_distributed",
    "set_threads",
    "shared_store",
    "shutdown_distributed",
]

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
        RendezvousError: The master address does not resolve.
        ValueError: This torch has no such backend.

    Example:
        >>> world = init_distributed()
        >>> world.world_size
        1
        >>> shutdown_distributed()
    """
    global _made_here
    if dist.is_initialized():
        return current_world()
    world = detect_world(os.environ)
    device = get_device()
    backend = _checked_backend(backend or devices.backend_for(device.type))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    options = _init_options(world, backend, init_method, device, _seconds(timeout))
    with _gloo_interface(world):
        dist.init_process_group(backend, **options)  # type: ignore[arg-type]
    _made_here = dist.group.WORLD
    agreed_seed()
    if world.rank == 0 and world.world_size > 1 and not settings.QUIET.get():
        print(_start_line(world, backend, device), file=sys.stderr, flush=True)
    return current_world()


def shutdown_distributed() -> None:
    """Leave the process group if :func:`init_distributed` made it; else do nothing.

    Not a collective: each rank leaves when it is done.
    """
    global _made_here
    made, _made_here = _made_here, None
    if made is not None and dist.is_initialized() and dist.group.WORLD is made:
        dist.destroy_process_group()


def leave(store: dist.Store, rank: int, how: str) -> None:
    """Leave the group, with word for those who may still wait for this rank on the store.

    ``store`` is :func:`shared_store` as it was inside the group, which may be gone by now.
    Peers that wait in a collective notice by themselves: their connection closes.
    """
    try:
        store.set(f"left/{rank}", how)
    except RuntimeError:
        pass  # whoever kept the store has gone; so has everybody who could wait
    shutdown_distributed()


def shared_store() -> dist.Store:
    """Return the store that all ranks of the group share, under a prefix of this package's own.

    With it ranks can leave word for each other without a collective. Needs a process group.
    """
    return dist.PrefixStore("ddp_utils", default_store())


def agreed_seed() -> int:
    """Return one random 63-bit number that is the same on all ranks of the group.

    Whoever asks first decides: no rank waits for another. Without a group, a fresh number.
    """
    proposal = secrets.randbits(63)
    if not dist.is_initialized():
        return proposal
    return int(shared_store().compare_set("seed", "", str(proposal)))


def set_threads(local_world_size: int) -> None:
    """Share this machine's usable cores between the ranks on it, unless the user has decided.

    Without this N ranks would each use all cores and slow each other down.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, usable_cores() // local_world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def _init_options(
    world: World,
    backend: str,
    init_method: str | None,
    device: torch.device,
    timeout: timedelta | None,
) -> dict[str, object]:
    """Return the arguments of ``init_process_group`` that say where the ranks meet."""
    options: dict[str, object] = {"rank": world.rank, "world_size": world.world_size}
    if timeout is not None:
        options["timeout"] = timeout
    if device.type != "cpu":
        options["device_id"] = device
    if init_method is not None:
        options["init_method"] = init_method
    elif world.launcher == "spawn":
        options["store"] = _store_of_our_parent(world, timeout)
    elif world.world_size == 1:
        options["store"] = dist.HashStore()
    else:
        _check_master(world)
        options["init_method"] = "env://"
    return options


def _store_of_our_parent(world: World, timeout: timedelta | None) -> dist.Store:
    assert world.master_addr is not None
    assert world.master_port is not None
    return dist.TCPStore(
        world.master_addr,
        world.master_port,
        is_master=False,
        timeout=timeout or timedelta(minutes=5),
    )


def _check_master(world: World) -> None:
    """Raise at once for an address that does not resolve, instead of at the timeout."""
    try:
        socket.getaddrinfo(world.master_addr, world.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(
            f"rank {world.rank} on {socket.gethostname()}: MASTER_ADDR={world.master_addr!r} "
            f"(port {world.master_port}) does not resolve to an address ({error}). Set "
            "MASTER_ADDR to the name or address of the machine that runs rank 0."
        ) from None


@contextmanager
def _gloo_interface(world: World) -> Iterator[None]:
    """Let gloo listen on loopback only, where all ranks are on this machine.

    gloo reads the variable when it makes a device. In a rank that this package started it
    stays, so that groups made later are closed to the network too.
    """
    name = "GLOO_SOCKET_IFNAME"
    alone = world.launcher == "spawn" or world.world_size == 1
    if name in os.environ or world.num_nodes > 1 or not alone or sys.platform != "linux":
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        if world.launcher != "spawn":
            del os.environ[name]


def _start_line(world: World, backend: str, device: torch.device) -> str:
    nodes = "1 node" if world.num_nodes == 1 else f"{world.num_nodes} nodes"
    return (
        f"ddp_utils: {world.world_size} ranks on {nodes}, launcher {world.launcher}, "
        f"backend {backend}, {device.type} devices, {torch.get_num_threads()} threads a rank"
    )
