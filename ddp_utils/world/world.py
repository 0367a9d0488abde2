"""Who am I among the ranks?

:func:`detect_world` decides it from the environment, purely; :func:`current_world` puts a
living process group before that. Every other module asks here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_utils.ground import settings
from ddp_utils.world import devices
from ddp_utils.world.detection import Detection, detect

__all__ = [
    "World",
    "current_world",
    "detect_world",
    "from_detection",
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


def detect_world(environ: Mapping[str, str]) -> World:
    """Decide from environment variables alone who a process is.

    In this order: a rank that this package started; ``DDP_UTILS_LAUNCHER``; torchrun and what
    sets the same variables; a step of ``srun`` with more than one task; MPI launchers; machines
    named by hand (``NNODES``, ``NODE_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``: here the launcher
    is ``none``, and the process stands for its machine until it starts ranks); alone.

    Raises:
        LauncherError: half a launcher's variables, or two launchers that contradict.

    >>> detect_world({}).world_size
    1
    >>> detect_world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    ...               "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).node_rank
    1
    """
    return from_detection(detect(environ))


def from_detection(found: Detection) -> World:
    """Return the world that a detection found."""
    return World(
        **found.facts,
        launcher=found.launcher,
        master_addr=found.master_addr,
        master_port=found.master_port,
        evidence=found.evidence,
    )


def current_world() -> World:
    """Return who this process is now: a living process group first, then the environment.

    >>> current_world().world_size  # no launcher, no group
    1
    """
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
    """Whether this process is in a process group now.

    >>> is_distributed()
    False
    """
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return this process's rank, 0 where nothing is distributed.

    Right at import time in a started rank, before the group exists, inside it and after it.

    >>> get_rank()
    0
    """
    if SIMULATED.get() is None and is_distributed():
        return dist.get_rank()
    return current_world().rank


def get_world_size() -> int:
    """Return the number of ranks on all machines together.

    >>> get_world_size()  # no launcher, no group
    1
    """
    if SIMULATED.get() is None and is_distributed():
        return dist.get_world_size()
    return current_world().world_size


def get_local_rank() -> int:
    """Return this process's rank among those on its machine.

    >>> get_local_rank()
    0
    """
    return current_world().local_rank


def get_local_world_size() -> int:
    """Return the number of ranks on this machine.

    >>> get_local_world_size()  # no launcher, no group
    1
    """
    return current_world().local_world_size


def get_node_rank() -> int:
    """Return the number of this machine, counted from 0.

    >>> get_node_rank()
    0
    """
    return current_world().node_rank


def is_rank_zero(local: bool = False) -> bool:
    """Whether this is rank zero of the world, or with ``local=True`` of its machine.

    >>> is_rank_zero(), is_rank_zero(local=True)
    (True, True)
    """
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
        bound=devices.has_devices_of_its_own(world.launcher, world.local_rank, os.environ),
        oversubscribe=settings.OVERSUBSCRIBE.get(),
    )
