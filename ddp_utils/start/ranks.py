"""How do the ranks of a job start on this machine, and what comes back from them?"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_utils.ground import settings
from ddp_utils.ground.errors import StartError
from ddp_utils.start import function, starter
from ddp_utils.start.entry import ENDING, Job
from ddp_utils.start.machines import OtherMachines
from ddp_utils.start.output import Outputs
from ddp_utils.start.supervise import Supervisor
from ddp_utils.start.transport import LARGE, check_picklable
from ddp_utils.world import devices
from ddp_utils.world.machines import Machines, detect_machines, ranks_on_a_machine

__all__ = ["Options", "machines_of", "nproc_of", "refuse_during_import", "start_ranks"]

GUARD = """\
{name}() starts ranks, and each rank imports this script: call it under the guard

    if __name__ == "__main__":
        {name}()

so that the import alone does not call it again. (A script without any function: put its body
into one, decorate that, and call it so.)"""


@dataclass(frozen=True)
class Options:
    """How ranks are started; the meaning of each is told by :func:`distributed_main`."""

    nproc: int | str = "auto"
    devices: Sequence[int] | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    backend: str | None = None
    timeout: float | timedelta | None = None
    start_method: str = "auto"
    output: str | None = None
    log_dir: str | None = None
    stop_signals: Sequence[int] = ()


def start_ranks(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    *,
    all_results: bool,
    time_limit: float | None = None,
) -> list[Any]:
    """Start ranks on this machine, wait for them, and return their values by local rank.

    ``time_limit`` bounds the whole job, in seconds; where it is passed the ranks are killed and
    every rank's stacks are in the error.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    refuse_during_import(name)
    for variable in settings.VARIABLES:
        variable.get()  # a misspelt one must not be found after an hour of training
    method = _one_of("start_method", options.start_method, settings.START_METHODS)
    if method == "auto":
        method = settings.START_METHOD.get()
    output = _one_of("output", options.output or settings.OUTPUT.get(), settings.OUTPUTS)
    nproc, machines = nproc_of(options), machines_of(options)
    job = Job(
        function=(reference := function.refer_to(fn)),
        arguments=(arguments := _pickled(name, reference, args, kwargs)),
        main=_main_to_import(reference, arguments),
        uses_ddp=function.mentions_ddp(reference),
        all_results=all_results,
        first_rank=machines.node_rank * nproc,
        nproc=nproc,
        world_size=machines.num_nodes * nproc,
        node_rank=machines.node_rank,
        num_nodes=machines.num_nodes,
        backend=options.backend,
        timeout=_seconds(options.timeout),
        stop_signals=tuple(options.stop_signals),
        environ=_environ(options),
        ignored=_ignored_signals(),
    )
    outputs = Outputs(output, options.log_dir or settings.LOG_DIR.get(), job.first_rank)
    handle = starter.acquire(method)  # before the store, whose thread would make a fork unsafe
    others = store = None
    try:
        others = OtherMachines(machines, nproc) if machines.num_nodes > 1 else None
        store, address, port = _store(machines, others)
        job = replace(job, master_addr=address, master_port=port)
        return Supervisor(handle, job, outputs, timeout=time_limit, machines=others).run()
    finally:
        if others is not None:
            others.close()
        del store, others  # a traceback would keep the store, and its thread, alive
        starter.release(handle)


def refuse_during_import(name: str) -> None:
    """Raise if the script is being imported by a rank, which would start ranks once more.

    Raises:
        StartError: It is; tells where the call belongs.
    """
    spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    if function.importing_main or spawned:
        raise StartError(GUARD.format(name=name))


def nproc_of(options: Options) -> int:
    """Return how many ranks a job has on this machine.

    Raises:
        ValueError: The number cannot be.
    """
    nproc = options.nproc
    if options.devices is not None:
        if nproc not in ("auto", len(options.devices)):
            raise ValueError(f"nproc={nproc!r} and {len(options.devices)} devices: leave nproc out")
        return len(options.devices)
    if nproc == "auto":
        kind = devices.accelerator_type()
        return ranks_on_a_machine(os.environ, devices.visible_devices(kind))
    try:
        count = int(nproc)
    except ValueError:
        count = 0
    if count < 1 or isinstance(nproc, (bool, float)):
        raise ValueError(
            f"nproc={nproc!r}: the number of processes on this machine is a count of at least 1, "
            'or "auto" for one on each visible accelerator'
        )
    return count


def machines_of(options: Options) -> Machines:
    """Return this machine's place in a job."""
    return detect_machines(
        os.environ,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )


def _pickled(name: str, reference: function.Function, args: Any, kwargs: Any) -> bytes:
    arguments = check_picklable(reference, args, kwargs)
    if len(arguments) > LARGE:
        warnings.warn(
            f"the arguments of {name}() are {len(arguments) / 2**20:.0f} MiB, and every rank "
            "reads a copy of them: build large data inside the function instead",
            stacklevel=4,
        )
    return arguments


def _ignored_signals() -> tuple[int, ...]:
    """Return what this process ignores and its ranks must ignore too, as under nohup."""
    numbers = (signal.SIGINT, *ENDING)
    return tuple(number for number in numbers if signal.getsignal(number) is signal.SIG_IGN)


def _environ(options: Options) -> dict[str, str]:
    environ = dict(os.environ)
    if options.devices is not None:
        kind = devices.accelerator_type()
        environ |= devices.show_only(options.devices, kind, environ)
    return environ


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: it is one of {', '.join(map(repr, choices))}")
    return value


def _seconds(timeout: float | timedelta | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def _main_to_import(reference: function.Function, arguments: bytes) -> function.Main | None:
    """Return the script for the ranks to import; not the entry point of a tool such as pytest."""
    main = function.this_main()
    if main is None or not main.only_runs_others:
        return main
    return main if reference.in_main or b"__main__" in arguments else None


def _store(machines: Machines, others: OtherMachines | None) -> tuple[dist.Store, str, int]:
    """Return the store where the ranks meet, and its address and port."""
    if others is None:
        store, port = _loopback_store()
        return store, "127.0.0.1", port
    assert machines.master_addr is not None
    assert machines.master_port is not None
    return others.store, machines.master_addr, machines.master_port


def _loopback_store() -> tuple[dist.Store, int]:
    """Return a store that listens on loopback only, on a port that nobody else can take."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
