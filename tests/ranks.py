"""What the bodies of distributed tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.profiler import profile


def from_all_ranks(value: Any) -> list[Any]:
    """Gather by torch's own means: a test of our collectives takes no word from one of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def collectives_in(act: Callable[[], Any]) -> list[str]:
    """Return the collectives that ran in ``act``, as the backend itself counts them."""
    with profile() as seen:
        act()
    names = [event.name for event in seen.events() or ()]
    return [name.removeprefix("gloo:") for name in names if name.startswith("gloo:")]
