"""Which private names of torch, NumPy and CPython does this package use?

Each is used through one function here, with the reason that no public name will do. A test
asserts that every one of them exists in the installed versions.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.utils.data.dataloader
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "JoinedUntilExit",
    "arm",
    "at_end_of_backward",
    "compiled_module_type",
    "copy_all",
    "default_store",
    "fork_is_poisoned",
    "group_timeout",
    "in_join",
    "load_what_ddp_loads",
    "loader_that_draws",
    "is_to_rebuild_buckets",
    "needs_a_synchronised_step",
    "own_buffers",
    "rebuild_buckets",
    "reduced_parameters",
    "reducer_is_waiting",
    "reduces_in_python",
    "skip_frame",
    "skip_frames",
    "version_of",
    "without_reducer",
    "worker_info_as",
]


def default_store() -> dist.Store:
    """Return the store of the default process group, also of one that somebody else made.

    torch has no public way to reach it, and everything of ours that must not be a collective
    (the agreed seed, the names of the absent, one-rank sections) talks through it.
    """
    return dist.distributed_c10d._get_default_store()


def fork_is_poisoned() -> bool:
    """Whether an accelerator runtime was touched before this process was forked.

    ``is_initialized()`` is not the question: counting devices may call ``cuInit`` too, and only
    the runtime's own at-fork handler knows.
    """
    kinds = (torch.cuda, getattr(torch, "xpu", None), getattr(torch, "hpu", None))
    probes = (getattr(kind, "_is_in_bad_fork", None) for kind in kinds)
    return any(probe() for probe in probes if probe is not None)


def compiled_module_type() -> type[nn.Module] | tuple[()]:
    """Return the class of what ``torch.compile(module)`` returns, for ``isinstance``.

    torch names it nowhere in public. Its module is slow to import, and where nobody has
    imported it nothing can be compiled: then an empty tuple, of which nothing is an instance.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return () if dynamo is None else cast("type[nn.Module]", dynamo.OptimizedModule)


def load_what_ddp_loads() -> None:
    """Import what the first ``DistributedDataParallel`` of a process would: it takes a second.

    Forks of this process then have it. torch loads it in passing, by no public name.
    """
    importlib.import_module("torch._dynamo")


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers that are registered on this very module.

    ``named_buffers(recurse=False)`` says the same, ten times slower, and it is asked for every
    layer in every step.
    """
    return module._buffers


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, in one call where the device can do so.

    A batch-norm model has hundreds of tiny buffers; one launch for each would cost more than
    what it copies.
    """
    if targets:
        torch._foreach_copy_(targets, sources)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that runs now has ended; its errors come out there.

    Only from within a backward. DDP and FSDP themselves use this; torch offers no public way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Let the first backward's order decide DDP's buckets now. A collective, where it is due."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


def is_to_rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has yet to rebuild its buckets, in the forward after its first backward."""
    rebuilds = ddp.static_graph or not ddp.find_unused_parameters
    return bool(rebuilds and not ddp._has_rebuilt_buckets)


def arm(ddp: DistributedDataParallel) -> None:
    """Let DDP average the gradients of the backward that comes now."""
    ddp.reducer.prepare_for_backward([])


@contextmanager
def without_reducer(ddp: DistributedDataParallel) -> Iterator[None]:
    """Let the forward inside the block neither rebuild buckets nor arm the reducer.

    A reducer that was armed for nothing cannot rebuild its buckets any more.
    """
    reducer = ddp.reducer
    ddp.reducer = cast("dist.Reducer", _Idle(reducer))
    try:
        yield
    finally:
        ddp.reducer = reducer


class _Idle:
    """A reducer, but for two things."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: object) -> None:
        pass


def reducer_is_waiting(ddp: DistributedDataParallel) -> str | None:
    """Return torch's complaint if a backward has left DDP waiting for gradients, else None."""
    try:
        ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error)
    return None


def needs_a_synchronised_step(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has yet to learn its static graph, from a first backward that synchronises.

    Under ``no_sync()`` that backward ends in torch's INTERNAL ASSERT.
    """
    return ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued


def reduced_parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients DDP averages, in the order of its own numbering."""
    parameters, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return cast("list[nn.Parameter]", parameters)


def reduces_in_python(ddp: DistributedDataParallel) -> bool:
    """Whether ``torch.compile`` was told to reduce gradients by itself, without DDP's reducer."""
    return bool(ddp._use_python_reducer)


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that changes with each in-place change; -1 where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


def in_join(ddp: DistributedDataParallel) -> bool:
    """Whether training runs inside ``join()``, where ranks out of batches mirror DDP's steps."""
    return bool(ddp._join_config.enable)


class JoinedUntilExit(JoinHook):
    """The hook of a ``join()`` that begins, which ends it for the model too, also by an error.

    Torch leaves the model as if it were inside for ever: each later forward, in evaluation too,
    would then wait for the other ranks. It calls ``post_hook`` where all ended well; the hook
    itself goes with the context in either case.
    """

    def __init__(self, ddp: DistributedDataParallel, hook: JoinHook) -> None:
        self.main_hook = hook.main_hook  # type: ignore[method-assign]
        self._end = hook.post_hook
        self._leave = weakref.finalize(self, setattr, ddp, "_join_config", ddp._join_config)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._end(is_last_joiner)
        self._leave()


def skip_frame(fn: F) -> F:
    """Let ``torch.compile`` pass over this one function, but not over what it calls.

    ``torch.compiler.disable`` imports the compiler when it decorates; this waits for the first
    call, and DDP itself has imported it by then.
    """
    return cast(F, torch._disable_dynamo(fn, recursive=False))


def skip_frames(fn: F) -> F:
    """Let ``torch.compile`` pass over this function and all that it calls."""
    return cast(F, torch._disable_dynamo(fn))


def loader_that_draws() -> tuple[Callable[[], int], int] | None:
    """Return how a DataLoader that calls the caller's caller counts batches, and their size.

    A sampler is drawn ahead by a loader with workers, and only the loader's iterator knows how
    much of it has been handed out. The iterator's ``__dict__`` is kept, not the iterator itself:
    workers end with the iterator, and must not be kept alive by a sampler.
    """
    loader = torch.utils.data.dataloader
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH_DATA):
        owner = frame.f_locals.get("self")
        if isinstance(owner, loader._BaseDataLoaderIter):
            size = owner._index_sampler.batch_size if owner._auto_collation else 1
            return partial(vars(owner).__getitem__, "_num_yielded"), size
        frame = frame.f_back
    return None


_TORCH_DATA = os.path.dirname(torch.utils.data.dataloader.__file__) + os.sep


@contextmanager
def worker_info_as(info: Any) -> Iterator[None]:
    """Let ``torch.utils.data.get_worker_info()`` return ``info`` inside the block.

    A dataset that shards itself asks there, and torch knows only the workers of one rank.
    """
    worker = torch.utils.data._utils.worker
    before, worker._worker_info = worker._worker_info, info
    try:
        yield
    finally:
        worker._worker_info = before


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """Return the timeout of a group's collectives, in seconds; None stands for the default group.

    torch tells it nowhere in public, and a barrier that waits at the store keeps to it as well.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    for kind in group._device_types:
        options = getattr(group._get_backend(kind), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())
