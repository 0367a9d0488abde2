"""Is this machine fit for several ranks: ``python -m ddp_utils doctor``.

Looks at everything that has kept people's ranks from starting or from talking, then really
starts ranks and lets them add something up.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import numpy
import torch
import torch.distributed as dist

from ddp_utils import __version__
from ddp_utils.explain import FORMAT, GREEN, RED, explain, table
from ddp_utils.ground.errors import DistributedError
from ddp_utils.ground.saying import say
from ddp_utils.process_group import init_distributed, shutdown_distributed
from ddp_utils.start.ranks import Options, start_ranks
from ddp_utils.world import devices, interfaces
from ddp_utils.world.addresses import is_loopback
from ddp_utils.world.cores import usable_cores
from ddp_utils.world.world import current_world, get_device

__all__ = ["Finding", "examine", "show"]

MIB = 2**20
SIZES = (MIB // 4, 4 * MIB, 64 * MIB)
"""Bytes of the messages whose all-reduce is timed."""
LEAST_SHM = 256 * MIB
"""Docker gives 64 MiB, which the batches of a few DataLoader workers fill."""
LEAST_FILES = 1024
"""Each DataLoader worker, each batch in flight and each peer takes open files."""
SHM = "/dev/shm"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; where ``ok`` is False, ``advice`` says what to do."""

    name: str
    ok: bool
    value: str
    advice: str = ""


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Look at this machine, start ranks, and return what was found."""
    found = list(_look(environ))
    blockers = [each.name for each in found if not each.ok and each.name in BLOCKERS]
    if blockers:
        text = f"not tried, because of {' and '.join(blockers)}"
        return [*found, Finding("ranks", False, text, "put that right first")]
    return [*found, *_start_and_reduce()]


BLOCKERS = ("launcher", "meeting point", "gloo's interface")
"""What would only fail again, slowly, with ranks."""


def _look(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("ddp_utils", True, __version__)
    yield Finding("python", True, f"{platform.python_version()} on {platform.platform()}")
    yield Finding("torch", True, f"{torch.__version__}, numpy {numpy.__version__}")
    yield _backends()
    kind = devices.accelerator_type()
    count = devices.visible_devices(kind)
    yield Finding("accelerators", True, f"{count} x {kind}" if count else "none: ranks use the CPU")
    report = explain(environ)
    if report["error"] is not None:
        yield Finding("launcher", False, report["error"], "see: python -m ddp_utils explain")
    else:
        decided = ", ".join(report["decided"]) or "no variable names one"
        yield Finding("launcher", True, f"{report['launcher']} ({decided})")
    host = (report["world"] or {}).get("master_addr") or environ.get("MASTER_ADDR")
    if host:
        yield check_resolves("meeting point", host, addresses_of(host))
    yield check_resolves("host name", socket.gethostname(), addresses_of(socket.gethostname()))
    known = interfaces.interface_addresses()
    yield Finding("interfaces", True, _told(known))
    yield check_interface(environ.get(interfaces.GLOO), known)
    if os.path.isdir(SHM):
        yield check_shm(shutil.disk_usage(SHM).free)
    yield from _limits()
    yield _threads(environ)


def _backends() -> Finding:
    if not dist.is_available():
        return Finding("backends", False, "none", "this torch was built without distributed")
    real = (name for name in dist.Backend.backend_list if name not in ("undefined", "fake"))
    names = [name for name in real if dist.is_backend_available(name)]
    return Finding("backends", True, ", ".join(names))


def addresses_of(host: str) -> list[str]:
    """Return the addresses a name resolves to, none if it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def check_resolves(name: str, host: str, addresses: Sequence[str]) -> Finding:
    """Judge what a host name resolves to."""
    if not addresses:
        return Finding(
            name,
            False,
            f"{host!r} does not resolve to an address",
            "add it to /etc/hosts or to the name service, or use addresses instead of names "
            "(MASTER_ADDR=10.0.0.1)",
        )
    shown = f"{host}, {' '.join(addresses)}"
    if name == "host name" and all(is_loopback(each) for each in addresses):
        shown += " (loopback: across machines ddp_utils takes the interface towards MASTER_ADDR)"
    return Finding(name, True, shown)


def check_interface(value: str | None, known: Mapping[str, Sequence[str]]) -> Finding:
    """Judge ``GLOO_SOCKET_IFNAME``."""
    name = "gloo's interface"
    if not value:
        return Finding(name, True, "chosen by ddp_utils: lo, or the one towards MASTER_ADDR")
    wrong = interfaces.wrong_interface(value, known)
    if wrong is None:
        return Finding(name, True, f"{value} ({interfaces.GLOO})")
    return Finding(name, False, f"{interfaces.GLOO}={value}: {wrong}", "correct or unset it")


def check_shm(free: int) -> Finding:
    """Judge the free bytes in shared memory."""
    shown = f"{free / MIB:.0f} MiB free"
    if free >= LEAST_SHM:
        return Finding(SHM, True, shown)
    return Finding(
        SHM,
        False,
        f"only {shown}: DataLoader workers hand their batches over there, and die with a bus "
        "error when it is full",
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir with medium "
        f"Memory at {SHM}",
    )


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield check_files(soft, hard)


def check_files(soft: int, hard: int) -> Finding:
    """Judge the limit on open files."""
    if soft < 0 or soft >= LEAST_FILES:
        return Finding("open files", True, f"{soft if soft >= 0 else 'no'} limit")
    return Finding(
        "open files",
        False,
        f"limit {soft}: with DataLoader workers a rank soon runs out ('Too many open files')",
        _more_files(hard),
    )


def _more_files(hard: int) -> str:
    if 0 <= hard < LEAST_FILES:  # which only root raises
        return (
            f"have the hard limit ({hard}) raised: docker run --ulimit nofile=65536, LimitNOFILE= "
            "of the service, or /etc/security/limits.conf"
        )
    return f"ulimit -n {hard if hard > 0 else 65536} before the start"


def _threads(environ: Mapping[str, str]) -> Finding:
    asked = environ.get("OMP_NUM_THREADS")
    said = f"OMP_NUM_THREADS={asked}" if asked else "shared between the ranks of a machine"
    return Finding("threads", True, f"{usable_cores()} usable cores, {said}")


def _told(known: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} {'/'.join(own)}".strip() for name, own in known.items() if own)


def _start_and_reduce() -> list[Finding]:
    """Start ranks, or join those that a launcher started, and let them reduce."""
    before = time.time()
    try:
        if current_world().launcher != "none":
            init_distributed()
            outcomes = [_reduce()]
            shutdown_distributed()
        else:
            nproc = max(2, devices.visible_devices(devices.accelerator_type()))
            options = Options(nproc=nproc, output="all")
            outcomes = start_ranks(_reduce, (), {}, options, all_results=True, time_limit=90)
    except (DistributedError, RuntimeError, OSError, ValueError) as error:
        last = str(error).strip().splitlines()[-1]
        return [Finding("ranks", False, f"could not start and reduce: {last}", str(error))]
    return list(judge_run(outcomes, before))


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    world_size: int
    began: float
    """When the rank's own code began, by the clock of its machine."""
    total: float
    seconds: tuple[float, ...]
    """Of one all-reduce, for each of ``SIZES``."""


def _reduce() -> Outcome:
    """Add up the ranks' numbers and time some reductions. A collective."""
    began = time.time()
    device, world = get_device(), current_world()
    number = torch.tensor([float(world.rank + 1)], device=device)
    dist.all_reduce(number)
    seconds = tuple(_timed(size, device) for size in SIZES)
    return Outcome(world.world_size, began, float(number), seconds)


def _timed(size: int, device: torch.device) -> float:
    """Return the seconds of the fastest of a few all-reduces of ``size`` bytes."""
    message = torch.zeros(size // 4, device=device)
    best = float("inf")
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def judge_run(outcomes: Sequence[Outcome], before: float) -> Iterator[Finding]:
    """Judge what the ranks saw; ``before`` is when their start was asked for."""
    size = outcomes[0].world_size
    right = size * (size + 1) / 2
    totals = {each.total for each in outcomes}
    if totals == {right}:
        yield Finding("ranks", True, f"{size} started, and their sum is right")
    else:
        yield Finding(
            "ranks",
            False,
            f"{size} started, and the sum of 1 to {size} came out as {sorted(totals)}",
            "the backend or the network corrupts data: try backend='gloo', update torch",
        )
    yield Finding("start-up", True, f"{max(each.began for each in outcomes) - before:.2f} s")
    # What each rank sends and receives, as nccl-tests counts: 2 (n - 1) / n of the message.
    share = 2 * (size - 1) / size
    for i, length in enumerate(SIZES):
        slowest = max(each.seconds[i] for each in outcomes)
        rate = share * length / slowest / 1e9
        text = f"{rate:.2f} GB/s, {slowest * 1e3:.2f} ms each"
        yield Finding(f"all-reduce of {length / MIB:g} MiB", True, text)


def show(findings: Sequence[Finding], stream: TextIO | None = None) -> None:
    """Print findings for a person, on stdout by default."""
    width = max(len(each.name) for each in findings)
    rows = []
    for each in findings:
        mark, colour = ("ok", GREEN) if each.ok else ("WRONG", RED)
        rows.append((mark, f"{each.name:{width}}  {each.value}", colour))
        if each.advice:
            rows.append(("", f"{'':{width}}  -> {each.advice}", ""))
    wrong = sum(not each.ok for each in findings)
    stream = stream or sys.stdout
    lines = [*table(rows, stream), "", f"{wrong} wrong" if wrong else "all well"]
    say("\n".join(lines), stream)


def as_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings as plain data for JSON."""
    return {
        "format": FORMAT,
        "ok": all(each.ok for each in findings),
        "findings": [asdict(each) for each in findings],
    }
