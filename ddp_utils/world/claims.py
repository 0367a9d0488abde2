"""Which launcher's claim on this process counts, where several are there?

One pure function, :func:`decide`. The innermost launcher wins where one runs inside another; two
that contradict each other, and one that is there only in half, are errors that show what was
found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_utils.ground.errors import LauncherError
from ddp_utils.world import slurm
from ddp_utils.world.launchers import (
    MPI,
    SEEN,
    SLURM,
    TORCHRUN,
    Claim,
    half,
    read,
    require,
    whole_number,
)

__all__ = ["Decision", "decide", "whole_step"]

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Decision:
    """The claim that counts, None where no launcher started this process."""

    claim: Claim | None
    why: str
    """Why the variables of others do not count."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The same for some of them, by name."""


def decide(environ: Environ) -> Decision:
    """Decide which launcher's claim counts, from environment variables.

    Raises:
        LauncherError: half a launcher's variables, or two launchers that contradict.
    """
    torchrun = read(TORCHRUN, environ)
    if torchrun and "TORCHELASTIC_RUN_ID" in environ:  # whatever started torchrun is outside
        return Decision(require(TORCHRUN, environ), "torchrun, inside it, counts")
    step, no_step = _slurm_step(environ)
    mpi, no_mpi = _mpi_job(environ, in_slurm="SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ)
    outer, no_outer = _innermost(step, mpi)
    reasons = {**no_step, **no_mpi, **no_outer}
    if torchrun and _is_a_pods(torchrun, environ):
        reasons |= dict.fromkeys(torchrun.used, "the pod's, where PET_ variables count machines")
        torchrun = None
    if torchrun and outer and not _is_nested(torchrun, outer):
        _check_agreement(torchrun, outer)
        outer.facts = {**torchrun.facts, **outer.facts}
        outer.used |= torchrun.used
        torchrun = None
    if torchrun:
        why = "the launcher inside it, which sets RANK, counts"
        return Decision(require(TORCHRUN, environ), why, reasons)
    if outer is None:
        return Decision(None, "no launcher started this process", reasons)
    title = "srun's step" if outer.launcher is SLURM else outer.launcher.title
    return Decision(outer, f"{title} counts", reasons)


# What Slurm and MPI say


def _slurm_step(environ: Environ) -> tuple[Claim | None, dict[str, str]]:
    """Return the claim of a REAL srun step of more than one task, else why it is none."""
    claim = read(SLURM, environ)
    if claim is None:
        return None, {}
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    rank = claim.facts.get("rank")
    if rank is None:
        why = "an allocation (salloc, ssh to a node), not a task of srun"
    elif step is None and rank > 0:
        raise half(SLURM, claim.used, ["SLURM_STEP_ID"])
    elif step is None:
        why = "a batch script, not a task of srun"
    elif not step.isdecimal() or int(step) >= NO_STEP:
        why = "an interactive shell of Slurm, not a task of srun"
    elif _slurm_size(claim, environ) == 1 and rank == 0:
        why = "a step of one task, such as srun --pty: nothing to join"
    elif _is_heterogeneous(environ):
        why = "a heterogeneous job, whose ranks RANK and the like tell"
    else:
        return whole_step(claim, environ), {}
    return None, dict.fromkeys(SEEN_OF_SLURM, why)


SEEN_OF_SLURM = tuple(name for name in SEEN if name.startswith("SLURM_"))
NO_STEP = 0xFFFFFFF0
"""Slurm numbers the steps that are none of srun's (batch, interactive, extern) from the top."""


def _slurm_size(claim: Claim, environ: Environ) -> int | None:
    """Return the number of tasks, from nodes times tasks a node where nothing else says it."""
    per_node = environ.get("SLURM_NTASKS_PER_NODE")
    if "world_size" not in claim.facts and per_node and "num_nodes" in claim.facts:
        each = whole_number("SLURM_NTASKS_PER_NODE", per_node)
        claim.facts["world_size"] = claim.facts["num_nodes"] * each
        claim.used["SLURM_NTASKS_PER_NODE"] = per_node
    return claim.facts.get("world_size")


def _is_heterogeneous(environ: Environ) -> bool:
    """Whether a Slurm job has several components; an error unless its ranks are told otherwise."""
    for name in ("SLURM_HET_SIZE", "SLURM_PACK_SIZE"):
        size = environ.get(name, "")
        if not size.isdecimal() or int(size) < 2:
            continue
        if not environ.get("RANK"):
            raise LauncherError(
                f"a heterogeneous Slurm job ({name}={size}): each of its components may "
                "count its ranks from 0, so nobody can tell the world from here. Set RANK, "
                "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each task, or start "
                "torchrun in each component, or use one component."
            )
        return True
    return False


def whole_step(claim: Claim, environ: Environ) -> Claim:
    """Complete the claim of a real step with the tasks on this node."""
    lacking = [name for name in ("world_size", "local_rank") if name not in claim.facts]
    if lacking:
        raise half(SLURM, claim.used, [getattr(SLURM, name)[0] for name in lacking])
    size, node = claim.facts["world_size"], claim.facts.get("node_rank", 0)
    for name in SLURM.local_world_size:
        counts = slurm.expand_counts(environ[name]) if environ.get(name) else []
        if sum(counts) == size and node < len(counts):
            claim.facts["local_world_size"] = counts[node]
            claim.facts["num_nodes"] = len(counts)
            claim.used[name] = environ[name]
            break
    else:
        claim.facts["local_world_size"] = -(-size // max(1, claim.facts.get("num_nodes", 1)))
    return claim


def _mpi_job(environ: Environ, in_slurm: bool) -> tuple[Claim | None, dict[str, str]]:
    """Return the claim of an MPI launcher, else why its variables do not count."""
    for launcher in MPI:
        claim = read(launcher, environ)
        if claim is None:
            continue
        if in_slurm and launcher is MPI[-1] and claim.facts.get("world_size", 1) == 1:
            # srun --mpi=pmi2 sets these for every task, also for the one of a --pty shell.
            return None, dict.fromkeys(launcher.variables, "a Slurm step of one task")
        if not claim.complete:
            require(launcher, environ)
        return claim, {}
    return None, {}


# Where two launchers are there


def _innermost(step: Claim | None, mpi: Claim | None) -> tuple[Claim | None, dict[str, str]]:
    """Return the claim that counts of Slurm's and MPI's, and why the other does not."""
    if step is None or mpi is None:
        return step or mpi, {}
    if step.place == mpi.place:
        return step, dict.fromkeys(mpi.used, "says the same as srun's step")
    if step.facts["world_size"] == step.facts.get("num_nodes"):
        why = f"the step of the daemons that {mpi.launcher.title} runs, one a node"
        return mpi, dict.fromkeys(step.used, why)
    raise _contradiction(mpi, step)


def _is_a_pods(torchrun: Claim, environ: Environ) -> bool:
    """Whether RANK and WORLD_SIZE are Kubeflow's, beside the variables for the pod's torchrun.

    There RANK numbers pods, while WORLD_SIZE counts processes as far as the job's YAML names
    their number: the two make no pair.
    """
    machines = ("PET_NNODES", "PET_NODE_RANK")
    return "LOCAL_RANK" not in torchrun.used and all(environ.get(name) for name in machines)


def _is_nested(inner: Claim, outer: Claim) -> bool:
    """Whether a launcher of torchrun's kind started ranks inside each task of another."""
    if not inner.complete or "local_rank" not in inner.facts:
        return False
    more, remainder = divmod(inner.facts["world_size"], max(1, outer.facts["world_size"]))
    return more > 1 and remainder == 0


def _check_agreement(inner: Claim, outer: Claim) -> None:
    """Raise where what both say is not the same."""
    both = inner.facts.keys() & outer.facts.keys() & {"rank", "world_size", "local_rank"}
    if any(inner.facts[fact] != outer.facts[fact] for fact in both):
        raise _contradiction(inner, outer)


def _contradiction(inner: Claim, outer: Claim) -> LauncherError:
    shown = [
        f"{claim.launcher.title}: " + ", ".join(f"{k}={v}" for k, v in claim.used.items())
        for claim in (inner, outer)
    ]
    return LauncherError(
        f"two launchers contradict each other. {shown[0]}. {shown[1]}. Unset the variables of "
        f"the one that did not start this process, or set DDP_UTILS_LAUNCHER="
        f"{outer.launcher.name} (or {inner.launcher.name}) to say which to believe."
    )
