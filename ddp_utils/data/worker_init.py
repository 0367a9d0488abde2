"""What happens first in a loader worker of a rank?"""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data import get_worker_info

from ddp_utils.agree.seeding import mix_seeds, seed_generators
from ddp_utils.data.epochs import EpochFollower
from ddp_utils.data.iterable import IterableShard
from ddp_utils.data.worker_view import WorkerView
from ddp_utils.ground._torch_private import worker_info_as
from ddp_utils.ground.loader_workers import obey_parent_only

__all__ = ["WorkerInit"]


class WorkerInit:
    """Seed a worker apart from those of the other ranks, then call the user's function.

    And let the worker live through the signals that are meant for its rank.

    torch seeds the workers of one rank apart from each other, but from a number that is the
    same on ranks which were seeded alike. An object, not a closure, because it has to be
    pickled where workers are spawned.
    """

    def __init__(self, rank: int, user_fn: Callable[[int], None] | None) -> None:
        self.rank = rank
        self.user_fn = user_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        obey_parent_only()
        seed_generators(mix_seeds(info.seed, self.rank))
        if self.user_fn is None:
            return
        if isinstance(info.dataset, IterableShard):
            info.dataset.call_worker_init(self.user_fn, worker_id)
        elif isinstance(info.dataset, EpochFollower):
            with worker_info_as(WorkerView(info.dataset.dataset, 0, 1)):
                self.user_fn(worker_id)
        else:
            self.user_fn(worker_id)
