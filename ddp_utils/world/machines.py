"""Which machines does a job span, where this package itself starts the ranks on each?

By hand, with ``NNODES``, ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` set on each machine;
or in a managed cluster that says the same under names of its own. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ddp_utils.ground import settings
from ddp_utils.ground.errors import LauncherError
from ddp_utils.world import addresses

__all__ = [
    "MACHINE_VARIABLES",
    "Machines",
    "detect_machines",
    "machine_of_rank_0",
    "ranks_on_a_machine",
]

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Machines:
    """This machine's place among those of a job; ``num_nodes`` is 1 where there is only one."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    used: Mapping[str, str] = field(default_factory=dict)
    """The variables that said so, with their values."""


@dataclass(frozen=True)
class Source:
    """Where one kind of cluster says each of the four values; a function derives it."""

    title: str
    num_nodes: str
    node_rank: str
    master_addr: str
    master_port: str = "MASTER_PORT"
    count: Callable[[str], int] = int
    place: Callable[[Environ], str | None] | None = None
    address: Callable[[str], str] = str
    default_port: int | None = None
    place_alone: bool = True
    """Whether ``node_rank`` without ``num_nodes`` is half of this, and not something else's."""


def _json_hosts(text: str) -> list[str]:
    hosts: list[str] = sorted(json.loads(text))
    if not hosts:
        raise ValueError("a list of no hosts")
    return hosts


def _place_in_sagemaker(environ: Environ) -> str | None:
    hosts, current = _json_hosts(environ["SM_HOSTS"]), environ.get("SM_CURRENT_HOST")
    return str(hosts.index(current)) if current in hosts else None


SAGEMAKER = Source(
    "SageMaker",
    "SM_HOSTS",
    "SM_CURRENT_HOST",
    "SM_HOSTS",
    count=lambda text: len(_json_hosts(text)),
    place=_place_in_sagemaker,
    address=lambda text: _json_hosts(text)[0],
    default_port=7777,
    place_alone=False,
)
SOURCES = (
    Source("by hand", "NNODES", "NODE_RANK", "MASTER_ADDR"),
    # PyTorchJob and TrainJob set the same, the variables that torchrun's options are read from.
    Source("Kubeflow", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    SAGEMAKER,
    Source(
        "ModelArts",
        "MA_NUM_HOSTS",
        "VC_TASK_INDEX",
        "VC_WORKER_HOSTS",
        address=lambda text: text.split(",")[0],
        default_port=6060,
        place_alone=False,  # Volcano, on which ModelArts runs, numbers the pods of any job so
    ),
)
KUBEFLOW_NPROC = "PET_NPROC_PER_NODE"
MACHINE_VARIABLES = tuple(
    dict.fromkeys(
        name
        for each in SOURCES
        for name in (each.num_nodes, each.node_rank, each.master_addr, each.master_port)
    )
)


def detect_machines(
    environ: Environ,
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Machines:
    """Return this machine's place in the job: arguments first, then the environment.

    Raises:
        LauncherError: some of the four are there and others are missing, or impossible.

    >>> machines = detect_machines({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1",
    ...                             "MASTER_PORT": "29400"})
    >>> machines.num_nodes, machines.node_rank, machines.master_addr, machines.master_port
    (2, 1, '10.0.0.1', 29400)
    >>> detect_machines({"MASTER_PORT": "29400"}).num_nodes
    1
    """
    if settings.LAUNCHER.get(environ) == "none":
        environ = {}  # the user has said that no variable counts
    source = _source(environ)
    arguments = {
        "num_nodes": nnodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    values, used = _read(source, environ)
    values |= {name: value for name, value in arguments.items() if value is not None}
    count = values.get("num_nodes")
    alone = count is None and node_rank is None and source.node_rank not in used
    if alone or (count == 1 and values.get("node_rank", 0) == 0):
        return Machines(used={name: used[name] for name in used if name == source.num_nodes})
    _check(source, values, used)
    return Machines(**values, used=used)  # type: ignore[arg-type]


def ranks_on_a_machine(environ: Environ, accelerators: int) -> int:
    """Return how many ranks a machine gets where the call does not say.

    ``DDP_UTILS_NPROC``; else what a Kubeflow job names, if it is a number and not a word like
    ``auto``; else one for each accelerator, or one.

    >>> ranks_on_a_machine({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, 0)
    4
    >>> ranks_on_a_machine({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, 8)
    8
    """
    asked = environ.get(KUBEFLOW_NPROC, "") if environ.get("PET_NNODES") else ""
    kubeflow = int(asked) if asked.isdecimal() and settings.LAUNCHER.get(environ) != "none" else 0
    return settings.NPROC.get(environ) or kubeflow or accelerators or 1


def machine_of_rank_0(environ: Environ, num_nodes: int) -> addresses.Address:
    """Return where rank 0 of an ``mpirun`` is, if the cluster whose machines it spans tells.

    SageMaker does: its own ``mpirun`` fills the hosts in their order. There the ranks on the
    first host inherit ``MASTER_PORT``, which the others do not get, so the port is told as well.
    """
    if _source(environ) is not SAGEMAKER:
        return addresses.Address()
    machines = detect_machines(environ)
    if machines.num_nodes != num_nodes:  # it spans only some of the hosts
        return addresses.Address()
    used = {SAGEMAKER.num_nodes: environ[SAGEMAKER.num_nodes]}
    return addresses.Address(machines.master_addr, machines.master_port, used)


def _source(environ: Environ) -> Source:
    for each in SOURCES:
        if environ.get(each.num_nodes) or (each.place_alone and environ.get(each.node_rank)):
            return each
    return SOURCES[0]


def _read(source: Source, environ: Environ) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values that a source's variables give, and those variables."""
    values: dict[str, object] = {}
    address = addresses.given(environ)
    if environ.get(source.num_nodes):
        values["num_nodes"] = _parsed(source.num_nodes, environ, source.count)
    if source.place is not None and source.num_nodes in environ:
        place = source.place(environ)
        if place is not None:
            values["node_rank"] = int(place)
    elif environ.get(source.node_rank):
        values["node_rank"] = _parsed(source.node_rank, environ, int)
    host = address.host
    if host is None and environ.get(source.master_addr):
        host = source.address(environ[source.master_addr])
    port = address.port
    if port is None and environ.get(source.master_port):
        port = addresses.parse_port(source.master_port, environ[source.master_port])
    port = port if port is not None else source.default_port
    values |= {} if host is None else {"master_addr": host}
    values |= {} if port is None else {"master_port": port}
    names = {source.num_nodes, source.node_rank, source.master_addr, source.master_port}
    used = {name: environ[name] for name in sorted(names) if environ.get(name)}
    return values, used | address.used


def _parsed(name: str, environ: Environ, parse: Callable[[str], int]) -> int:
    try:
        return parse(environ[name])
    except (ValueError, TypeError):
        advice = " For a range of machines start with torchrun." if ":" in environ[name] else ""
        raise LauncherError(f"{name}={environ[name]!r} cannot be read.{advice}") from None


def _check(source: Source, values: Mapping[str, object], used: Mapping[str, str]) -> None:
    """Raise for halves and for numbers that cannot be."""
    fields = ("num_nodes", "node_rank", "master_addr", "master_port")
    missing = [getattr(source, name) for name in fields if name not in values]
    shown = ", ".join(f"{name}={value}" for name, value in used.items()) or "arguments"
    if missing:
        raise LauncherError(
            f"several machines are named only in half ({source.title}): found {shown}; missing "
            f"{', '.join(missing)}. Each machine needs NNODES, NODE_RANK (0 on the first), and "
            "MASTER_ADDR and MASTER_PORT of the first, as variables or as arguments of "
            "distributed_main."
        )
    count, place = values["num_nodes"], values["node_rank"]
    assert isinstance(count, int)
    assert isinstance(place, int)
    if not 0 <= place < count:
        raise LauncherError(
            f"machine {place} of {count} cannot be ({source.title}: {shown}): they count from 0 "
            f"to {count - 1}"
        )
