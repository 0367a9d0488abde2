"""Who am I among the ranks?

:func:`detect_world` decides it from the environment, purely; :func:`current_world` puts a
living process group before that. Every other module asks here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ddp_utils.ground import settings
from ddp_utils.ground.errors import LauncherError
from ddp_utils.world import devices

__all__ = [
    "World",
    "current_world",
    "detect_world",
    "get_device",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_rank_zero",
]


@dataclass(frozen=True)
class World:
    """Who this process is, in the words of ``torch.distributed``.

    With three machines of four GPUs each, the process for the second GPU of the third machine
    is ``World(rank=9, world_size=12, local_rank=1, local_world_size=4, node_rank=2,
    num_nodes=3, ...)``.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"
    """``none`` (nothing started this process), ``spawn`` (this package), ``torchrun``,
    ``slurm`` or ``mpi``."""
    master_addr: str | None = None
    master_port: int | None = None
    evidence: tuple[str, ...] = ()
    """The variables that decided, then those that were seen and ignored, with the reason."""


SIMULATED: ContextVar[World | None] = ContextVar("ddp_utils.simulated_world", default=None)
"""What ``ddp_utils.testing.simulated_world`` puts before everything else."""

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def detect_world(environ: Mapping[str, str]) -> World:
    """Decide from environment variables alone who a process is.

    Raises:
        LauncherError: half a launcher's variables, or two launchers that contradict.

    >>> detect_world({}).world_size
    1
    >>> detect_world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    ...               "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).node_rank
    1
    """
    forced = settings.LAUNCHER.get(environ)
    if settings.STARTED_BY_US in environ:
        return replace(_from_torchrun(environ), launcher="spawn")
    if forced == "none":
        return World(evidence=("DDP_UTILS_LAUNCHER=none",))
    if forced == "torchrun" or any(name in environ for name in ("RANK", "LOCAL_RANK")):
        return _from_torchrun(environ)
    return World(evidence=("no launcher's variables",))


def _from_torchrun(environ: Mapping[str, str]) -> World:
    found = [name for name in TORCHRUN if name in environ]
    missing = [name for name in TORCHRUN if name not in environ]
    if missing:
        raise LauncherError(
            f"the environment names a launcher only in half: found {', '.join(found) or 'nothing'}"
            f", missing {', '.join(missing)}. Start with torchrun, which sets them all, set the "
            "missing ones, or set DDP_UTILS_LAUNCHER=none to ignore them."
        )
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local_rank = int(environ["LOCAL_RANK"])
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    if not 0 <= rank < world_size:
        raise LauncherError(f"RANK={rank} is outside a world of WORLD_SIZE={world_size}")
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=int(environ.get("GROUP_RANK", (rank - local_rank) // local_world_size)),
        num_nodes=int(environ.get("GROUP_WORLD_SIZE", max(1, world_size // local_world_size))),
        launcher="torchrun",
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        evidence=tuple(f"{name}={environ[name]}" for name in found),
    )


def current_world() -> World:
    """Return who this process is now: a living process group first, then the environment."""
    simulated = SIMULATED.get()
    if simulated is not None:
        return simulated
    if not is_distributed():
        return detect_world(os.environ)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = detect_world(os.environ)
    if (world.rank, world.world_size) == (rank, world_size):
        return world
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        evidence=("a process group that this package did not make: taken for one machine",),
    )


def is_distributed() -> bool:
    """Whether this process is in a process group now."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return this process's rank, 0 where nothing is distributed.

    Right at import time in a started rank, before the group exists, inside it and after it.
    """
    if SIMULATED.get() is None and is_distributed():
        return dist.get_rank()
    return current_world().rank


def get_world_size() -> int:
    """Return the number of ranks on all machines together."""
    if SIMULATED.get() is None and is_distributed():
        return dist.get_world_size()
    return current_world().world_size


def get_local_rank() -> int:
    """Return this process's rank among those on its machine."""
    return current_world().local_rank


def get_local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return current_world().local_world_size


def get_node_rank() -> int:
    """Return the number of this machine, counted from 0."""
    return current_world().node_rank


def is_rank_zero(local: bool = False) -> bool:
    """Whether this is rank zero of the world, or with ``local=True`` of its machine."""
    return (get_local_rank() if local else get_rank()) == 0


def get_device() -> torch.device:
    """Return the device of this rank: one of the visible accelerators, else the CPU.

    >>> get_device()  # doctest: +SKIP
    device(type='cuda', index=1)
    """
    world = current_world()
    device_type = devices.accelerator_type()
    return devices.choose_device(
        world.local_rank,
        world.local_world_size,
        device_type=device_type,
        visible=devices.visible_devices(device_type),
        oversubscribe=settings.OVERSUBSCRIBE.get(),
    )
