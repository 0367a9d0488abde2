"""Where do the ranks of a job meet, agreed without a word between them?

The user's own ``MASTER_ADDR`` and ``MASTER_PORT`` come first, each by itself; what is missing is
derived from what the launcher tells every rank alike. Pure.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ddp_utils.ground.errors import LauncherError
from ddp_utils.world import slurm

__all__ = [
    "Address",
    "given",
    "is_loopback",
    "job_name",
    "of_mpi_job",
    "of_slurm_step",
    "parse_port",
]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
"""torch's own; only where all ranks are on one machine and nothing tells jobs apart."""
NAMES_OF_JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID")

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Address:
    """A host and a port, and the variables that gave them."""

    host: str | None = None
    port: int | None = None
    used: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def given(environ: Environ) -> Address:
    """Return what the user or the launcher set outright.

    Raises:
        LauncherError: a port that is no port, an address with a port or a scheme in it.

    >>> given({"MASTER_ADDR": "[::1]", "MASTER_PORT": "29400"}).host
    '::1'
    """
    used = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    host = parse_host("MASTER_ADDR", used["MASTER_ADDR"]) if "MASTER_ADDR" in used else None
    port = parse_port("MASTER_PORT", used["MASTER_PORT"]) if "MASTER_PORT" in used else None
    return Address(host, port, used)


def parse_host(name: str, text: str) -> str:
    """Return a host name or an address, the latter without brackets."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if "/" in text or re.fullmatch(r"[^:]*:\d+|\[.*\]:\d+", text):
        raise LauncherError(
            f"{name}={text!r} is not a host: it takes a name or an address alone, the port goes "
            "into MASTER_PORT"
        )
    return text


def parse_port(name: str, text: str) -> int:
    """Return a port that a rank can be told, 1 to 65535."""
    if not text.strip().isdecimal() or not 0 < int(text) < 65536:
        raise LauncherError(f"{name}={text!r} is not a port: it takes a number from 1 to 65535")
    return int(text)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine to itself, by its name or number alone.

    >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("n1")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def of_slurm_step(environ: Environ, num_nodes: int, read_file: Callable[[str], str]) -> Address:
    """Return where the tasks of an srun step meet.

    Task 0 is on the first host of the step, but where the tasks were placed by a file
    (``--distribution=arbitrary``): there it is on the file's first.
    """
    own = given(environ)
    used, notes = dict(own.used), []
    host, port = own.host, own.port
    if host is None and num_nodes == 1:
        host = LOOPBACK
        notes.append(f"the ranks meet at {LOOPBACK}: all are on one node")
    elif host is None:
        host, name = _host_of_task_0(environ, read_file)
        used[name] = environ[name]
    if port is None:
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
        if not (job.isdecimal() and step.isdecimal()):
            raise LauncherError(
                f"no port for the ranks of this Slurm step: SLURM_JOB_ID={job!r}, "
                f"SLURM_STEP_ID={step!r}. Set MASTER_PORT to the same free port on all tasks."
            )
        port = slurm.step_port(int(job), int(step))
        used |= {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}
    return Address(host, port, used, notes)


def _host_of_task_0(environ: Environ, read_file: Callable[[str], str]) -> tuple[str, str]:
    """Return the host of task 0 and the variable that told."""
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        path = environ.get("SLURM_HOSTFILE", "")
        try:
            host = slurm.first_of_hostfile(read_file(path)) if path else None
        except OSError:
            host = None
        if host is None:
            raise LauncherError(
                "the tasks of this Slurm step were placed by a file (SLURM_DISTRIBUTION="
                f"arbitrary), and SLURM_HOSTFILE={path!r} cannot be read here. Set MASTER_ADDR "
                "to the node that runs task 0."
            )
        return host, "SLURM_HOSTFILE"
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return slurm.first_host(environ[name]), name
    raise LauncherError(
        "no address for the ranks of this Slurm step: SLURM_STEP_NODELIST is missing. Set "
        "MASTER_ADDR to the node that runs task 0."
    )


def of_mpi_job(environ: Environ, one_machine: bool, title: str, first: Address) -> Address:
    """Return where the ranks of an MPI launcher meet, which itself names no host.

    ``first`` is what a managed cluster tells of rank 0's machine.
    """
    own = given(environ)
    used, notes = own.used | first.used, []
    host, port = own.host or first.host, own.port or first.port
    if host is None and not one_machine:
        raise LauncherError(
            f"{title} runs this on several machines and does not tell where rank 0 is. Set "
            "MASTER_ADDR to the name or address of the machine of rank 0 (mpirun -x MASTER_ADDR="
            "... or mpiexec -genv MASTER_ADDR ...), and MASTER_PORT if it has to be a certain one."
        )
    if host is None:
        host = LOOPBACK
        notes.append(f"the ranks meet at {LOOPBACK}: all are on one machine")
    name = _name_of_mpi_job(environ)
    if port is None and name is not None:
        port = 10000 + zlib.crc32(environ[name].encode()) % 20011
        used[name] = environ[name]
    elif port is None:
        port = DEFAULT_PORT
        notes.append(f"port {DEFAULT_PORT}: nothing tells this job from others, or MASTER_PORT")
    return Address(host, port, used, notes)


def job_name(launcher: str, environ: Environ) -> str | None:
    """Return what tells the job from all others of its launcher, alike on all its ranks.

    >>> job_name("slurm", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    '7.0'
    """
    if launcher == "slurm":
        return f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    name = _name_of_mpi_job(environ) if launcher == "mpi" else None
    return None if name is None else environ[name]


def _name_of_mpi_job(environ: Environ) -> str | None:
    return next((name for name in NAMES_OF_JOBS if environ.get(name)), None)
