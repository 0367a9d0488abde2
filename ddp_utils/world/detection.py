"""Which launcher started this process, as which rank, and on what grounds?

One pure function, :func:`detect`, over a mapping of environment variables. Which launcher counts
where several are there is decided in :mod:`ddp_utils.world.claims`; here its claim becomes a
complete place in a world, with an address to meet at and the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddp_utils.ground import settings
from ddp_utils.ground.errors import LauncherError
from ddp_utils.world import addresses
from ddp_utils.world.claims import decide, whole_step
from ddp_utils.world.launchers import MPI, SEEN, SLURM, TORCHRUN, Claim, half, require
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
        there = (each for each in MPI if any(name in environ for name in each.rank))
        found = _from_mpi(require(next(there, MPI[0]), environ), environ)
    found.decided = {settings.LAUNCHER.name: environ[settings.LAUNCHER.name]} | found.decided
    found.ignored = _ignore(environ, found.decided, why)
    return found


def _undirected(environ: Environ, read_file: ReadFile) -> Detection:
    """Decide where no one has said which launcher to believe."""
    decision = decide(environ)
    claim = decision.claim
    if claim is None:
        found = _by_hand(environ)
    elif claim.launcher is TORCHRUN:
        found = _from_torchrun(claim, environ)
    elif claim.launcher is SLURM:
        found = _from_slurm(claim, environ, read_file)
    else:
        found = _from_mpi(claim, environ)
    found.ignored = _ignore(environ, found.decided, decision.why, decision.reasons)
    return found


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
        claim = whole_step(claim, environ)
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
