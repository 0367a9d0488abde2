"""How are gradients added up over several batches, and weighted over the ranks?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_utils.ground._torch_private import needs_a_synchronised_step
from ddp_utils.ground.unwrapping import wrapper_layers
from ddp_utils.talk.collectives import all_reduce_sum
from ddp_utils.world.world import is_distributed

__all__ = ["Window", "accumulate", "global_scale"]


@dataclass(frozen=True)
class Window:
    """Where one micro-batch stands in its accumulation window."""

    scale: float
    """What to multiply the mean loss of this micro-batch by: one over the window's length."""
    is_last: bool
    """Whether this micro-batch ends the window: gradients are synchronised, step now."""


@contextmanager
def accumulate(
    model: nn.Module, step: int, every: int, total: int | None = None
) -> Iterator[Window]:
    """Accumulate gradients over ``every`` micro-batches with one synchronisation at the end.

    Goes around the forward AND the backward of one micro-batch: DDP decides in the forward
    whether that backward will synchronise. With a model that is not wrapped in DDP only the
    arithmetic is left. Itself never communicates.

    Args:
        model: The model, in any nesting of wrappers or none, or a module with wrapped models in
            it. One with ``static_graph=True`` synchronises every micro-batch until its first
            step is done, which changes no gradient.
        step: The micro-batch's number within the epoch, from 0, as ``enumerate`` counts.
        every: Micro-batches in a window.
        total: Micro-batches in the epoch, ``len(loader)``. With it a short last window is
            synchronised and scaled by its own length; without it the last micro-batches of
            an epoch that ``every`` does not divide would wait for the next epoch's.

    Yields:
        A :class:`Window`: ``scale`` for the loss, and ``is_last`` that says when to step.

    Raises:
        TypeError: ``step``, ``every`` or ``total`` is not an integer.
        ValueError: One of them is out of range.

    Example:
        >>> model, loader = nn.Linear(2, 1), torch.ones(5, 3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step, batch in enumerate(loader):
        ...     with accumulate(model, step, every=2, total=len(loader)) as window:
        ...         loss = model(batch).mean() * window.scale
        ...         loss.backward()
        ...     if window.is_last:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     print(window)
        Window(scale=0.5, is_last=False)
        Window(scale=0.5, is_last=True)
        Window(scale=0.5, is_last=False)
        Window(scale=0.5, is_last=True)
        Window(scale=1.0, is_last=True)
    """
    window = _window(step, every, total)
    with ExitStack() as not_synchronised:
        for ddp in () if window.is_last else _wrapped_in(model):
            if not needs_a_synchronised_step(ddp):
                not_synchronised.enter_context(ddp.no_sync())
        yield window


def _wrapped_in(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP around the model, or all those inside it: a trainer holds several."""
    for layers in (wrapper_layers(model), model.modules() if is_distributed() else ()):
        found = [layer for layer in layers if isinstance(layer, DistributedDataParallel)]
        if found:
            return found
    return []


def _window(step: int, every: int, total: int | None) -> Window:
    _check_count("step", step, least=0)
    _check_count("every", every, least=1)
    if total is not None:
        _check_count("total", total, least=1)
    if total is not None and step >= total:
        raise ValueError(
            f"accumulate: step {step} is beyond the last of total={total} micro-batches. step "
            "counts from 0 in each epoch: for step, batch in enumerate(loader)"
        )
    start = step - step % every
    end = start + every if total is None else min(start + every, total)
    return Window(scale=1 / (end - start), is_last=step + 1 == end)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"accumulate: {name} must be an integer, not {value!r}")
    if int(value) < least:
        raise ValueError(f"accumulate: {name} must be at least {least}, not {value}")


def global_scale(n_local: float | torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """Return what makes the ranks' mean losses add up to the mean over all their samples.

    DDP averages the ranks' gradients as if each rank had the same number of samples (tokens,
    unmasked pixels). Multiply this rank's MEAN loss by the returned number, and the averaged
    gradient is that of the mean over all samples of all ranks. Collective.

    Args:
        n_local: What this rank's loss is the mean of: a count, zero included.
        group: The ranks over which the model's gradients are averaged; all of them by default.

    Returns:
        ``number of ranks * n_local / sum of n_local over the ranks``; 1.0 without a group, and 0.0
        where no rank has a sample.

    Raises:
        ValueError: On every rank, if any of them gave a negative or infinite count, or none.

    Example:
        >>> global_scale(17)  # one process
        1.0
    """
    count, wrong = math.nan, None
    try:
        count = float(n_local)
    except (TypeError, ValueError, RuntimeError) as error:
        wrong = error  # not raised yet: the others are on their way into the sum
    good = math.isfinite(count) and count >= 0
    sums = all_reduce_sum({"count": count if good else 0.0, "bad": float(not good)}, group=group)
    if sums["bad"]:
        raise ValueError(
            f"global_scale takes a finite count of at least 0; {sums['bad']:.0f} of the ranks gave "
            f"something else (this one {count if wrong is None else n_local!r})"
        ) from wrong
    world_size = dist.get_world_size(group) if is_distributed() else 1
    return world_size * count / sums["count"] if sums["count"] else 0.0
