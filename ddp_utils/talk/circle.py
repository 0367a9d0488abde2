"""Who takes part in a collective, and by which road do tensors travel between them?"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
        return dist.get_process_group_ranks(self.process_group) if is_distributed() else [0]

    @property
    def name(self) -> str:
        """A name that all ranks of the group, and no other group, have for it."""
        return self.process_group.group_name

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of devices that the group has a backend for."""
        config = dist.get_backend_config(self.group)
        return frozenset(part.partition(":")[0] for part in config.split(","))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself, also where it is the default one."""
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
        if group is None:
            return _circle_of_all()
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


_last: tuple[weakref.ref[dist.ProcessGroup], Circle] | None = None


def _circle_of_all() -> Circle:
    """Return the circle of the default group, made once for each: small collectives are quick."""
    global _last
    world = dist.group.WORLD
    assert world is not None
    if _last is None or _last[0]() is not world:
        _last = weakref.ref(world), Circle(None, dist.get_rank(), dist.get_world_size())
    return _last[1]


def road_for(circle: Circle, *, all_on_accelerator: bool = False) -> torch.device:
    """Return the device that tensors must be on to travel.

    The accelerator if everybody's lie there already, else the CPU; the other one where the
    group has no backend for it. All ranks must ask with the same knowledge.
    """
    if "cpu" in circle.kinds and not all_on_accelerator:
        return CPU
    own = get_device()
    return own if own.type in circle.kinds else CPU


def gather_even(circle: Circle, tensor: torch.Tensor) -> torch.Tensor:
    """Return everybody's one-dimensional tensor, all of one size, stacked by place.

    ``tensor`` lies on a road (:func:`road_for`), the result too.
    """
    gathered = tensor.new_empty((circle.size, len(tensor)))
    # What torch's ``all_gather`` checks and logs before this takes a tenth of the exchange's time.
    circle.process_group.allgather([list(gathered.unbind(0))], [tensor]).wait()
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
