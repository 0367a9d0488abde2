"""Which launcher started this process, as which rank, and on what grounds?

One pure function, :func:`detect`, over a mapping of environment variables. The innermost launcher
wins where one runs inside another; two that contradict each other, and one that is there only in
half, are errors that show what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddp_utils.ground import settings
from ddp_utils.ground.errors import LauncherError
from ddp_utils.world import addresses, slurm
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
from ddp_utils.world.machines import detect_machines, machine_of_rank_0

__all__ = ["Detection", "Ignored", "detect"]

Environ = Mapping[str, str]
ReadFile = Callable[[str], str]


@dataclass(frozen=True)
class Ignored:
    """A variable that was seen and did not count, with the reason."""

    name: str
    value: str
    why: str


@dataclass
class Detection:
    """What :func:`detect` found, and on what grounds."""

    launcher: str = "none"
    facts: dict[str, int] = field(default_factory=dict)
    """By the names of ``World``'s fields; what is missing has ``World``'s default."""
    master_addr: str | None = None
    master_port: int | None = None
    decided: dict[str, str] = field(default_factory=dict)
    """The variables that decided, with their values."""
    ignored: list[Ignored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was assumed where no variable says it."""

    @property
    def evidence(self) -> tuple[str, ...]:
        """All of it as lines."""
        return (
            *(f"{name}={value}" for name, value in self.decided.items()),
            *(f"assumed: {note}" for note in self.notes),
            *(f"ignored: {each.name}={each.value} ({each.why})" for each in self.ignored),
        )


def detect(environ: Environ, read_file: ReadFile | None = None) -> Detection:
    """Decide from environment variables who started this process and as which rank.

    Args:
        environ: The variables.
        read_file: How to read the file that ``SLURM_HOSTFILE`` names.

    Raises:
        LauncherError: half a launcher's variables, two launchers that contradict, or values
            that cannot be.
    """
    forced = settings.LAUNCHER.get(environ)
    if settings.STARTED_BY_US in environ and forced != "none":  # ranks are started without that
        found = _started_by_us(environ)
    elif forced:
        found = _forced(environ, forced, read_file or _read_file)
    else:
        found = _undirected(environ, read_file or _read_file)
    _check_facts(found)
    return found


def _started_by_us(environ: Environ) -> Detection:
    claim = require(TORCHRUN, environ)
    found = _from_torchrun(claim, environ)
    found.launcher = "spawn"
    found.ignored = _ignore(environ, found.decided, "this package started this process")
    return found


def _forced(environ: Environ, forced: str, read_file: ReadFile) -> Detection:
    why = f"{settings.LAUNCHER.name}={forced}"
    if forced in ("none", "spawn"):
        found = Detection() if forced == "none" else _by_hand(environ)
    elif forced == "torchrun":
        found = _from_torchrun(require(TORCHRUN, environ), environ)
    elif forced == "slurm":
        found = _from_slurm(require(SLURM, environ), environ, read_file)
    else:
        launcher = next((each for each in MPI if each.rank[0] in environ), MPI[0])
        found = _from_mpi(require(launcher, environ), environ)
    found.decided = {settings.LAUNCHER.name: environ[settings.LAUNCHER.name]} | found.decided
    found.ignored = _ignore(environ, found.decided, why)
    return found


def _undirected(environ: Environ, read_file: ReadFile) -> Detection:
    """Decide where no one has said which launcher to believe."""
    torchrun = read(TORCHRUN, environ)
    if torchrun and "TORCHELASTIC_RUN_ID" in environ:  # whatever started torchrun is outside
        found = _from_torchrun(require(TORCHRUN, environ), environ)
        found.ignored = _ignore(environ, found.decided, "torchrun, inside it, counts")
        return found
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
        found = _from_torchrun(require(TORCHRUN, environ), environ)
        why = "the launcher inside it, which sets RANK, counts"
    elif outer and outer.launcher is SLURM:
        found, why = _from_slurm(outer, environ, read_file), "srun's step counts"
    elif outer:
        found, why = _from_mpi(outer, environ), f"{outer.launcher.title} counts"
    else:
        found, why = _by_hand(environ), "no launcher started this process"
    found.ignored = _ignore(environ, found.decided, why, reasons)
    return found


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
    elif _slurm_size(claim, environ) == 1:
        why = "a step of one task, such as srun --pty: nothing to join"
    elif _is_heterogeneous(environ):
        why = "a heterogeneous job, whose ranks RANK and the like tell"
    else:
        return _whole_step(claim, environ), {}
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
                f"a heterogeneous Slurm job ({name}={size}): its components count their ranks "
                "from 0 each, so nobody can tell the world from here. Set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each task, or start torchrun in "
                "each component, or use one component."
            )
        return True
    return False


def _whole_step(claim: Claim, environ: Environ) -> Claim:
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


# From a claim to a detection


def _from_torchrun(claim: Claim, environ: Environ) -> Detection:
    found = _take(claim, environ)
    facts = found.facts
    rank, size = claim.place
    here = found.master_addr is not None and addresses.is_loopback(found.master_addr)
    if "local_rank" not in facts and here:
        facts |= {"local_rank": rank, "local_world_size": size}
        found.notes.append("all ranks on this machine: MASTER_ADDR is loopback, no LOCAL_RANK")
    elif "local_rank" not in facts:
        facts |= {"local_rank": 0, "local_world_size": 1}
        found.notes.append("one rank a machine: there is no LOCAL_RANK")
    if "local_world_size" not in facts:
        facts["local_world_size"] = _guess_local_world_size(facts)
        found.notes.append(f"{facts['local_world_size']} ranks a machine: no LOCAL_WORLD_SIZE")
    return _complete(found)


def _guess_local_world_size(facts: Mapping[str, int]) -> int:
    """Return the likely number of ranks on this machine, all machines taken for alike."""
    if facts.get("num_nodes", 0) > 0:
        return max(1, facts["world_size"] // facts["num_nodes"])
    before = facts["rank"] - facts["local_rank"]
    return before if before > facts["local_rank"] else facts["world_size"]


def _from_slurm(claim: Claim, environ: Environ, read_file: ReadFile) -> Detection:
    if "local_world_size" not in claim.facts:  # forced, so not looked at before
        claim = _whole_step(claim, environ)
    found = _complete(_take(claim, environ))
    if found.facts["world_size"] == 1:
        return found
    meeting = addresses.of_slurm_step(environ, found.facts["num_nodes"], read_file)
    return _meet_at(found, meeting)


def _from_mpi(claim: Claim, environ: Environ) -> Detection:
    if "local_rank" not in claim.facts:
        raise half(claim.launcher, claim.used, claim.launcher.local_rank[:1])
    claim.facts.setdefault("local_world_size", claim.facts["world_size"])
    found = _complete(_take(claim, environ))
    if found.facts["world_size"] == 1:
        return found
    one_machine = found.facts["local_world_size"] == found.facts["world_size"]
    first = addresses.Address()
    if not one_machine:
        first = machine_of_rank_0(environ, found.facts["num_nodes"])
    meeting = addresses.of_mpi_job(environ, one_machine, claim.launcher.title, first)
    return _meet_at(found, meeting)


def _by_hand(environ: Environ) -> Detection:
    """Return what a process is that nothing started: alone, or the first of its machine."""
    machines = detect_machines(environ)
    if machines.num_nodes == 1:
        return Detection(decided=dict(machines.used))
    place = (machines.node_rank, machines.num_nodes)
    keys = ("rank", "world_size", "node_rank", "num_nodes")
    return Detection(
        facts=dict(zip(keys, place * 2, strict=True)) | {"local_rank": 0, "local_world_size": 1},
        master_addr=machines.master_addr,
        master_port=machines.master_port,
        decided=dict(machines.used),
    )


def _take(claim: Claim, environ: Environ) -> Detection:
    address = addresses.given(environ)
    return Detection(
        launcher=claim.launcher.name,
        facts=dict(claim.facts),
        master_addr=address.host,
        master_port=address.port,
        decided=claim.used | address.used,
    )


def _meet_at(found: Detection, meeting: addresses.Address) -> Detection:
    found.master_addr, found.master_port = meeting.host, meeting.port
    found.decided |= meeting.used
    found.notes += meeting.notes
    return found


def _complete(found: Detection) -> Detection:
    """Fill in nodes from ranks, where the launcher counts only ranks."""
    facts = found.facts
    rank, size = facts["rank"], facts["world_size"]
    each = max(1, facts["local_world_size"])
    nodes = facts.get("num_nodes")
    if nodes is None:  # at least as many as the last one known here, where they differ in ranks
        nodes = max(1, -(-size // each), min(size, facts.get("node_rank", 0) + 1))
        facts["num_nodes"] = nodes
    if "node_rank" not in facts:
        facts["node_rank"] = min(rank // each, nodes - 1)
        if nodes > 1:
            found.notes.append("the ranks fill one machine after the other")
    return found


def _check_facts(found: Detection) -> None:
    """Raise for numbers that cannot be, such as a rank outside its world."""
    facts = found.facts
    pairs = (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes"))
    wrong = [
        f"{small.replace('_', ' ')} {facts[small]} of {facts[size]}"
        for small, size in pairs
        if small in facts and not 0 <= facts[small] < facts[size]
    ]
    if facts and facts["local_world_size"] > facts["world_size"]:
        wrong.append(f"{facts['local_world_size']} ranks here of {facts['world_size']} in all")
    if wrong:
        shown = ", ".join(f"{name}={value}" for name, value in found.decided.items())
        raise LauncherError(
            f"the environment says what cannot be: {'; '.join(wrong)}. Found {shown}. Ranks "
            "count from 0 to one below their number; the same variables must reach each process "
            "with its own rank."
        )


def _ignore(
    environ: Environ,
    decided: Mapping[str, str],
    why: str,
    reasons: Mapping[str, str] | None = None,
) -> list[Ignored]:
    return [
        Ignored(name, environ[name], (reasons or {}).get(name, why))
        for name in SEEN
        if environ.get(name) and name not in decided
    ]


def _read_file(path: str) -> str:
    return Path(path).read_text()
