"""What does a stream that shards itself see when it asks which worker it is in?

torch tells it the workers of one rank. Here it is told those of all ranks, so that what it takes
for itself is right for the whole job; and it is noticed whether it asked.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

__all__ = ["WorkerView"]


class WorkerView:
    """Stands in for torch's ``WorkerInfo``: this worker among those of all ranks."""

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        self.dataset = dataset
        self.seed = 0 if info is None else info.seed
        # Neighbouring samples go to different ranks, as where there are no workers.
        self._id = worker * world_size + rank
        self._num_workers = world_size * workers
        self._asked: set[str] = set()

    @property
    def id(self) -> int:
        self._asked.add("id")
        return self._id

    @property
    def num_workers(self) -> int:
        self._asked.add("num_workers")
        return self._num_workers

    @property
    def shard(self) -> tuple[int, int]:
        """The number of this shard and of all shards, for our own use: asking is not noticed."""
        return self._id, self._num_workers

    @property
    def was_used_to_shard(self) -> bool:
        """Whether both numbers were asked for: one alone shards nothing."""
        return len(self._asked) == 2
