"""How does a function become the main function of several ranks?

``@distributed_main`` for a script's ``main()``, :func:`launch` for any function. Where a
launcher has started this process, or a group exists, the function runs here, as one rank of it;
else the ranks are started here.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch.distributed as dist
from typing_extensions import ParamSpec

from ddp_utils.ground import settings
from ddp_utils.ground.errors import RankFailedError, StartError
from ddp_utils.ground.saying import say
from ddp_utils.models import stop_signals
from ddp_utils.process_group import init_distributed, shutdown_distributed
from ddp_utils.start import function, starter
from ddp_utils.start.entry import ENDING, Job
from ddp_utils.start.machines import OtherMachines
from ddp_utils.start.output import Outputs
from ddp_utils.start.supervise import JobStopped, Supervisor
from ddp_utils.start.transport import LARGE, check_picklable
from ddp_utils.world import devices
from ddp_utils.world.machines import Machines, detect_machines, ranks_on_a_machine
from ddp_utils.world.world import detect_world, is_distributed

__all__ = ["Options", "distributed_main", "launch", "start_ranks"]

P = ParamSpec("P")
R = TypeVar("R")

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


@overload
def distributed_main(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def distributed_main(
    *,
    nproc: int | str = "auto",
    devices: Sequence[int] | None = None,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    start_method: str = "auto",
    output: str | None = None,
    log_dir: str | None = None,
    stop_signals: Sequence[int] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def distributed_main(fn: Callable[P, R] | None = None, /, **options: Any) -> Any:
    """Make ``fn`` the main function of all ranks: calling it runs it on each of them.

    At decoration the function is only registered. At the call: where a launcher (torchrun, srun,
    mpirun) has started this process, or a process group exists, it is joined and ``fn`` runs
    here, as one rank. Else ``nproc`` ranks are started on this machine and waited for. Inside
    ``fn`` a process group always exists.

    Args:
        nproc: Processes on this machine: a count, or ``"auto"`` for ``DDP_UTILS_NPROC``, else
            Kubeflow's number, else one for each visible accelerator, else 1. At 1 the function
            runs in this process.
        devices: Indices of the visible accelerators to use, one for each rank.
        nnodes, node_rank, master_addr, master_port: By hand on several machines: how many there
            are, which one this is, and where rank zero's machine listens. By default ``NNODES``,
            ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.
        backend: A backend by torch's name; by default the one for the device.
        timeout: Of collectives, in seconds; by default ``DDP_UTILS_TIMEOUT``, else torch's.
        start_method: ``"auto"``, ``"server"`` (ranks are forked from a server process; Linux) or
            ``"spawn"`` (an interpreter for each). The same rules hold in all: the script is
            imported afresh in each rank, arguments are pickled, environment variables and
            ``sys.path`` are those at the call, and no random state is shared.
        output: ``"prefix"`` (rank zero keeps the terminal, the others' lines come behind
            ``[rank 3]``), ``"rank_zero"`` (the others write to files under ``log_dir``) or
            ``"all"`` (untouched).
        log_dir: For ``output="rank_zero"``; by default a new temporary folder.
        stop_signals: Such as ``(signal.SIGTERM,)``: they then ask all ranks to leave at the same
            step, which :func:`stop_requested` tells. Its first call asks for the usual ones.

    Returns:
        A function with the signature of ``fn``. Where it starts the ranks it returns rank zero's
        value (tensors by value, on the CPU); under a launcher each rank's own.

    Raises:
        StartError: No guard, an argument that does not pickle, a function that cannot be found.
        RankFailedError: A rank failed; its message ends with that rank's traceback.

    Example:
        >>> @distributed_main
        ... def main(epochs: int) -> float:
        ...     return 0.5 * epochs
        >>> main(2)
        1.0
    """
    chosen = Options(**options)

    def decorate(function_to_run: Callable[P, R]) -> Callable[P, R]:
        function.register(function_to_run)

        @functools.wraps(function_to_run)
        def start_or_join(*args: P.args, **kwargs: P.kwargs) -> R:
            if _runs_here(chosen):
                return _run_here(function_to_run, args, kwargs, chosen)  # type: ignore[no-any-return]
            try:
                values = start_ranks(function_to_run, args, kwargs, chosen, all_results=False)
            except RankFailedError as error:
                raise _with_exit_code(error) from error.cause
            return values[0]  # type: ignore[no-any-return]

        return start_or_join

    return decorate if fn is None else decorate(fn)


def launch(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | str = "auto",
    devices: Sequence[int] | None = None,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    start_method: str = "auto",
    output: str | None = None,
    log_dir: str | None = None,
    stop_signals: Sequence[int] = (),
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on ``nproc`` ranks and return their values, by local rank.

    The options are those of :func:`distributed_main`. Where this process is a rank already, the
    function runs here alone, and the list holds its one value.

    Raises:
        StartError: As for :func:`distributed_main`.
        RankFailedError: A rank failed.

    Example:
        >>> launch(abs, (-2,), nproc=1)
        [2]
    """
    chosen = Options(
        nproc=nproc,
        devices=devices,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        backend=backend,
        timeout=timeout,
        start_method=start_method,
        output=output,
        log_dir=log_dir,
        stop_signals=stop_signals,
    )
    if _runs_here(chosen):
        return [_run_here(fn, tuple(args), dict(kwargs or {}), chosen)]
    return start_ranks(fn, tuple(args), dict(kwargs or {}), chosen, all_results=True)


def _runs_here(options: Options) -> bool:
    """Whether this process is a rank already, or is to be the only one."""
    if is_distributed() or detect_world(os.environ).launcher != "none":
        return True
    alone = _nproc(options) == 1 and _machines(options).num_nodes == 1
    return alone and options.devices is None


def _run_here(fn: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> Any:
    """Call ``fn`` in this process, as a rank."""
    if function.importing_main or _is_being_imported():
        raise StartError(GUARD.format(name=fn.__name__))
    joined = is_distributed()
    alone = init_distributed(options.backend, timeout=options.timeout).world_size == 1
    if options.stop_signals:
        stop_signals.arm(options.stop_signals)
    try:
        value = fn(*args, **kwargs)
    except BaseException:
        if alone and not joined:
            _leave_alone()  # among others, leaving is for the end of the process
        raise
    if joined:
        return value
    if not alone:
        shutdown_distributed()
    elif _leave_alone():
        raise JobStopped([value])
    return value


def _leave_alone() -> bool:
    """End what a rank without others has made; return whether it was asked to stop."""
    stopped = stop_signals.first_signal() is not None
    stop_signals.disarm()
    shutdown_distributed()
    return stopped


def _is_being_imported() -> bool:
    """Whether this process is a spawned one that still imports its main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _nproc(options: Options) -> int:
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


def _machines(options: Options) -> Machines:
    return detect_machines(
        os.environ,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )


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
    if function.importing_main or _is_being_imported():
        raise StartError(GUARD.format(name=name))
    for variable in settings.VARIABLES:
        variable.get()  # a misspelt one must not be found after an hour of training
    method = _one_of("start_method", options.start_method, settings.START_METHODS)
    if method == "auto":
        method = settings.START_METHOD.get()
    output = _one_of("output", options.output or settings.OUTPUT.get(), settings.OUTPUTS)
    nproc, machines = _nproc(options), _machines(options)
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


class _RankExitedError(RankFailedError, SystemExit):
    """A failed job whose rank had an exit code of its own: the command ends with that code."""


def _with_exit_code(error: RankFailedError) -> RankFailedError:
    """Return an error for which Python exits with the failed rank's own code, if it chose one.

    Python prints nothing for a SystemExit, so the report is printed here.
    """
    end = next((end for end in error.failures if end.rank == error.rank), None)
    if end is None or end.kind != "exited" or not end.exit_code:  # None: on another machine
        return error
    say(f"ddp_utils.RankFailedError: {error}")
    known = {"rank": error.rank, "cause": error.cause, "failures": error.failures}
    exited = _RankExitedError(str(error), **known)  # type: ignore[arg-type]
    exited.code = end.exit_code & 0xFF or 1  # sys.exit(256) would be taken for success
    return exited
