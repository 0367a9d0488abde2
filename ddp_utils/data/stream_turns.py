"""How far has a loader come in a stream, and can it go on there?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ddp_utils.data.iterable import IterableShard
from ddp_utils.data.progress import Progress, Walk
from ddp_utils.data.resumable import describe, length_of
from ddp_utils.world.world import get_world_size

__all__ = ["StreamTurns"]


class StreamTurns:
    """A loader's place in a stream: the epoch, and the batches of it that were handed out."""

    def __init__(
        self, shard: IterableShard, workers: int, batch_size: int, drop_last: bool
    ) -> None:
        self.progress = Progress(describe(shard.dataset), order_changes=True)
        self.seed = shard.seed
        self._shard = shard
        self._layout = {
            "world_size": shard.world_size,
            "num_workers": workers,
            "batch_size": batch_size,
        }
        self._drop_last = drop_last

    def __len__(self) -> int:
        size = self._layout["batch_size"]
        counts = self._shard.lengths(max(1, self._layout["num_workers"]))
        whole = sum(count // size if self._drop_last else -(-count // size) for count in counts)
        return max(0, whole - self.progress.start)

    @property
    def length(self) -> int | None:
        """The number of samples in the stream, if it has a length."""
        return length_of(self._shard.dataset)

    def begin(self) -> Walk:
        if self._shard.world_size == 1 and get_world_size() > 1:
            raise RuntimeError(
                f"the loader of {describe(self._shard.dataset)} was made before there were ranks: "
                "make loaders after ddp_utils.init_distributed()"
            )
        walk = self.progress.begin()
        self._shard.start_pass(walk.epoch, self.seed)
        return walk

    def drawn_by(self, walk: Walk) -> AbstractContextManager[None]:
        return nullcontext()

    def is_uneven(self, batch_size: int, drop_last: bool) -> bool:
        # How long a stream is, is not known before its end.
        return self._shard.world_size > 1 and not (self._shard.pad or self._shard.drop_last)

    def set_epoch(self, epoch: int) -> None:
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        state = {"seed": self.seed, "epoch": self.progress.epoch}
        return {**state, "batches": self.progress.position(1), **self._layout}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, here in self._layout.items():
            if state.get(name, "unknown") != here:
                raise ValueError(
                    f"the state of {describe(self._shard.dataset)} was taken with "
                    f"{name}={state.get(name, 'unknown')}, and here it is {here}: which samples of "
                    "a stream were seen can be told only in the same world, with the same workers "
                    f"and batches. Resume with {name}={state.get(name, 'as before')}, or use a "
                    "dataset with a length."
                )
        self.seed = int(state["seed"])
        self.progress.go_to(int(state["epoch"]), int(state["batches"]))
