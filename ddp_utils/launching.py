"""How does a function become the main function of several ranks?

``@distributed_main`` for a script's ``main()``, :func:`launch` for any function. Where a
launcher has started this process, or a group exists, the function runs here, as one rank of it;
else the ranks are started here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, overload

from typing_extensions import ParamSpec

from ddp_utils.ground.errors import RankFailedError
from ddp_utils.ground.saying import say
from ddp_utils.models import stop_signals
from ddp_utils.process_group import init_distributed, shutdown_distributed
from ddp_utils.start import function
from ddp_utils.start.ranks import (
    Options,
    machines_of,
    nproc_of,
    refuse_during_import,
    start_ranks,
)
from ddp_utils.start.supervise import JobStopped
from ddp_utils.world.world import detect_world, is_distributed

__all__ = ["distributed_main", "launch"]

P = ParamSpec("P")
R = TypeVar("R")


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
        TypeError: ``args`` is no sequence of arguments.

    Example:
        >>> launch(abs, (-2,), nproc=1)
        [2]
    """
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"launch takes the arguments of the function as one tuple: ({args!r},)")
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
    alone = nproc_of(options) == 1 and machines_of(options).num_nodes == 1
    return alone and options.devices is None


def _run_here(fn: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> Any:
    """Call ``fn`` in this process, as a rank."""
    refuse_during_import(fn.__name__)
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
