"""How do gradients travel between the ranks, other than by a plain mean in full precision?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_utils.talk.exchange import Call, Note
from ddp_utils.world.world import get_node_rank

__all__ = ["CommHook", "check_hook_runs", "checked_hook", "register_hook"]

CommHook: TypeAlias = "str | Callable[..., torch.futures.Future[torch.Tensor]] | None"

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OF_TORCH = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
NAMES = (*HALVES, "post_local_sgd")
WARM_UP = 100
"""Synchronous steps before ``"post_local_sgd"`` leaves ranks to themselves."""


def check_hook_runs(
    comm_hook: CommHook, device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Raise if the group's backend cannot add what a hook would send. Collective for such hooks.

    It is found out by doing it: which types a backend adds differs between its versions.

    Raises:
        ValueError: It cannot.
    """
    if comm_hook not in HALVES:
        return
    dtype = HALVES[str(comm_hook)]
    try:
        dist.all_reduce(torch.zeros(1, dtype=dtype, device=device), group=group)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"comm_hook={comm_hook!r} sends gradients as {str(dtype).removeprefix('torch.')}, "
            f"which the backend {dist.get_backend(group)!r} on {device.type} cannot add: {error}. "
            "Leave comm_hook out, or use a backend that can (nccl)."
        ) from error


def register_hook(ddp: DistributedDataParallel, comm_hook: CommHook) -> None:
    """Let gradients travel by this hook from now on. Collective for ``"post_local_sgd"``."""
    group = ddp.process_group
    if comm_hook is None:
        return
    if comm_hook == "post_local_sgd":
        ddp.register_comm_hook(_local_sgd_state(group), post_localSGD_hook)
        return
    hook = OF_TORCH[comm_hook] if isinstance(comm_hook, str) else comm_hook
    ddp.register_comm_hook(group, _as_torch_wants(hook))


def checked_hook(comm_hook: CommHook) -> CommHook:
    """Return the hook unless it is neither a known name nor callable."""
    if comm_hook is None or comm_hook in NAMES or callable(comm_hook):
        return comm_hook
    kind = ValueError if isinstance(comm_hook, str) else TypeError
    raise kind(
        f"wrap_ddp: comm_hook must be one of {', '.join(map(repr, NAMES))}, a function "
        f"hook(state, bucket) or hook(bucket), or None; not {comm_hook!r}"
    )


def _local_sgd_state(group: dist.ProcessGroup) -> PostLocalSGDState:
    """Return the state that averages gradients inside each machine only, after the warm-up.

    With one machine there is no inside and outside: then each rank goes on alone.
    """
    notes = Call.of("wrap_ddp", group).exchange(Note(bytes(16), size=get_node_rank())).notes
    nodes = [note.size for note in notes]
    if len(set(nodes)) == 1:
        return PostLocalSGDState(  # type: ignore[no-untyped-call]
            group, None, WARM_UP, post_local_gradient_allreduce=False
        )
    ranks = dist.get_process_group_ranks(group)
    mine = [rank for rank, node in zip(ranks, nodes, strict=True) if node == get_node_rank()]
    subgroup = dist.new_group(mine, use_local_synchronization=True)
    return PostLocalSGDState(group, subgroup, WARM_UP)  # type: ignore[no-untyped-call]


def _as_torch_wants(hook: Any) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """Return the hook as a plain function of (state, bucket), with a name.

    torch asks for both, which a partial function or an object with a state of its own lacks. And
    it refuses its own bfloat16 hook by name on backends that can run it; we have tried.
    """
    try:
        alone = len(inspect.signature(hook).parameters) == 1
    except ValueError:  # a builtin
        alone = False

    def run(state: Any, bucket: Any) -> Any:
        return hook(bucket) if alone else hook(state, bucket)

    run.__annotations__ = {}  # torch compares them with types, and ours are texts
    run.__name__ = run.__qualname__ = "ddp_utils_" + getattr(hook, "__name__", type(hook).__name__)
    return run
