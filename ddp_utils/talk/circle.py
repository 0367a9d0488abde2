"""Who takes part in a collective, and by which road do tensors travel between them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_utils.ground.errors import DistributedError
from ddp_utils.world.world import current_world, get_device, is_distributed

__all__ = ["Circle", "circle_of", "gather_even", "gather_uneven", "road_for"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Circle:
    """The ranks of a group, and this process's place among them.

    ``group`` is None for the default group, and for the circle of one that a process without
    any group is.
    """

    group: dist.ProcessGroup | None
    place: int
    size: int

    @property
    def ranks(self) -> list[int]:
        """The global ranks, by place."""
        return dist.get_process_group_ranks(self._group) if is_distributed() else [0]

    @property
    def name(self) -> str:
        """A name that all ranks of the group, and no other group, have for it."""
        return self._group.group_name

    @property
    def _group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group


def circle_of(group: dist.ProcessGroup | None, operation: str) -> Circle:
    """Return this process's place in ``group``; without any process group, a circle of one.

    Raises:
        DistributedError: There are several ranks, but they are in no group yet.
        ValueError: This rank is not in ``group``.
    """
    if is_distributed():
        place = dist.get_rank(group)
        if place < 0:
            raise ValueError(
                f"rank {dist.get_rank()} called {operation} with a group that it is not in; only "
                "the members of a group may call its collectives"
            )
        return Circle(group, place, dist.get_world_size(group))
    world = current_world()
    if world.world_size > 1:
        raise DistributedError(
            f"rank {world.rank} of {world.world_size} called {operation} while there is no "
            "process group. Call init_distributed() first, or run inside distributed_main."
        )
    return Circle(None, 0, 1)


def road_for(circle: Circle, *, all_on_accelerator: bool = False) -> torch.device:
    """Return the device that tensors must be on to travel.

    The accelerator if everybody's lie there already, else the CPU; the other one where the
    group has no backend for it. All ranks must ask with the same knowledge.
    """
    config = dist.get_backend_config(circle.group)
    kinds = {part.partition(":")[0] for part in config.split(",")}
    if "cpu" in kinds and not all_on_accelerator:
        return CPU
    own = get_device()
    return own if own.type in kinds else CPU


def gather_even(circle: Circle, tensor: torch.Tensor) -> torch.Tensor:
    """Return everybody's one-dimensional tensor, all of one size, stacked by place.

    ``tensor`` lies on a road (:func:`road_for`), the result too.
    """
    gathered = tensor.new_empty((circle.size, len(tensor)))
    dist.all_gather(list(gathered.unbind(0)), tensor, group=circle.group)
    return gathered


def gather_uneven(circle: Circle, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return everybody's one-dimensional tensor, of ``sizes`` that all ranks know, by place."""
    longest = max(sizes)
    if len(tensor) < longest:
        padded = tensor.new_zeros(longest)
        padded[: len(tensor)] = tensor
        tensor = padded
    rows = gather_even(circle, tensor)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]
