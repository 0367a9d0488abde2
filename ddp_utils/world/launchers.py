"""Which launchers are there, and what do the variables of each say about a process?

One table, and a reader that knows what is missing where a launcher is there only in half. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddp_utils.ground.errors import LauncherError
from ddp_utils.world.machines import MACHINE_VARIABLES

__all__ = [
    "LAUNCHERS",
    "MPI",
    "SEEN",
    "SLURM",
    "TORCHRUN",
    "Claim",
    "Launcher",
    "half",
    "read",
    "require",
    "whole_number",
]

Environ = Mapping[str, str]
FACTS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")


@dataclass(frozen=True)
class Launcher:
    """Under which variables one launcher says each fact, the best source first."""

    name: str
    """As in ``World.launcher`` and ``DDP_UTILS_LAUNCHER``."""
    title: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables of this launcher."""
        return tuple(name for fact in FACTS for name in getattr(self, fact))


TORCHRUN = Launcher(
    "torchrun",
    "torchrun's kind of variables",
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # the second: DeepSpeed's launcher
    node_rank=("GROUP_RANK", "NODE_RANK"),  # the second: Ray Train
    num_nodes=("GROUP_WORLD_SIZE", "NNODES"),
)
SLURM = Launcher(
    "slurm",
    "srun",
    rank=("SLURM_PROCID",),
    # The job's own sizes come last: a step may be smaller than its job.
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    node_rank=("SLURM_NODEID",),
    num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
)
MPI = (
    Launcher(
        "mpi",
        "Open MPI's mpirun",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is no node's rank: it counts the processes on one node.
        num_nodes=("OMPI_MCA_orte_num_nodes",),
    ),
    Launcher(
        "mpi",
        "MVAPICH's mpirun_rsh",
        rank=("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        world_size=("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
    ),
    Launcher(
        "mpi",
        "an MPI launcher that speaks PMI (MPICH, Intel MPI, PALS)",
        rank=("PMI_RANK", "PALS_RANKID"),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
    ),
)
LAUNCHERS = (TORCHRUN, SLURM, *MPI)
SEEN = (
    *dict.fromkeys(name for launcher in LAUNCHERS for name in launcher.variables),
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_ID",
    "PMIX_RANK",
    *MACHINE_VARIABLES,
)
"""Every variable that :func:`detect` looks at or explains, without repeats."""


@dataclass
class Claim:
    """What one launcher's variables say about this process."""

    launcher: Launcher
    facts: dict[str, int]
    used: dict[str, str]

    @property
    def place(self) -> tuple[int, int]:
        """Rank and world size."""
        return self.facts["rank"], self.facts["world_size"]

    @property
    def complete(self) -> bool:
        """Whether it says at least rank and world size."""
        return {"rank", "world_size"} <= self.facts.keys()


def read(launcher: Launcher, environ: Environ) -> Claim | None:
    """Return what a launcher's variables say, None where none is there that only it sets."""
    marks = launcher.rank + launcher.world_size + launcher.local_rank
    if not any(environ.get(name) for name in marks):
        return None
    claim = Claim(launcher, {}, {})
    for fact in FACTS:
        names = (name for name in getattr(launcher, fact) if environ.get(name))
        name = next((name for name in names if not _is_no_number(name, environ[name])), None)
        if name is not None:
            claim.facts[fact] = whole_number(name, environ[name])
            claim.used[name] = environ[name]
    return claim


def _is_no_number(name: str, text: str) -> bool:
    """Whether a variable is a list by node, or a range of machines as torchrun takes it."""
    return name.endswith("_PER_NODE") or (name == "NNODES" and ":" in text)


def whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LauncherError(f"{name}={text!r} is not a whole number") from None


def require(launcher: Launcher, environ: Environ) -> Claim:
    """Return a launcher's claim, or raise an error that lists found and missing variables."""
    claim = read(launcher, environ) or Claim(launcher, {}, {})
    needed = ["rank", "world_size"]
    if launcher is not TORCHRUN:
        needed.append("local_rank")
    missing = [getattr(launcher, fact)[0] for fact in needed if fact not in claim.facts]
    address = ("MASTER_ADDR", "MASTER_PORT")
    if launcher is TORCHRUN and claim.facts.get("world_size") != 1:
        missing += [name for name in address if not environ.get(name)]
    if missing:
        shown = {**claim.used, **{name: environ[name] for name in address if name in environ}}
        raise half(launcher, shown, missing)
    return claim


def half(launcher: Launcher, found: Mapping[str, str], missing: Iterable[str]) -> LauncherError:
    shown = ", ".join(f"{name}={value}" for name, value in found.items())
    return LauncherError(
        f"the environment names {launcher.title} only in half: found {shown or 'nothing'}; "
        f"missing {', '.join(missing)}. Start with the launcher, which sets them all, or set "
        "the missing ones, or set DDP_UTILS_LAUNCHER=none to ignore what was found."
    )
