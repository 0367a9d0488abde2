"""What the bodies of distributed tests share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def from_all_ranks(value: Any) -> list[Any]:
    """Gather by torch's own means: a test of our collectives takes no word from one of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
