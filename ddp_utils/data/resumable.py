"""What do all samplers of this package have in common: epochs, positions, states?"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ddp_utils.agree.by_word import first_word, new_topic, require_same
from ddp_utils.agree.seeding import common_seed, given_seed
from ddp_utils.data.progress import Drawn, Progress, Walk
from ddp_utils.ground._torch_private import loader_that_draws
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["ResumableSampler", "describe", "length_of"]


class ResumableSampler(DistributedSampler[Any]):
    """What all samplers of this package have in common.

    ``epoch``, ``seed``, ``rank``, ``num_replicas``, ``shuffle``, ``drop_last``, ``num_samples``
    and ``total_size`` mean what they mean in torch's ``DistributedSampler``.
    """

    def __init__(
        self, source: Any, *, shuffle: bool, pad: bool, drop_last: bool, seed: int | None
    ) -> None:
        if pad and drop_last:
            raise ValueError(
                f"pad=True and drop_last=True for {describe(source)}: one repeats samples to "
                "make the ranks' shares equal, the other leaves some out; choose one"
            )
        self.dataset = source
        self.length: int | None = None
        """How many samples there are, where that is known and must not change."""
        self.num_replicas = get_world_size()
        self.rank = get_rank()
        self.shuffle = shuffle
        self.pad = pad
        self.drop_last = drop_last
        self.progress = Progress(describe(source), order_changes=shuffle)
        self.own_seed: int | None = None
        """What the user's own generators ask for, where nothing else gives a seed."""
        self._seed = seed
        self._topic = new_topic("sampler")
        self._has_compared = False
        self._driver: Walk | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return how many items this rank gets in the pass under way, or else in the next."""

    @abstractmethod
    def _blocks(self, walk: Walk, finish: bool) -> Iterator[Iterator[Any]]:
        """Yield ``walk.draw`` of this rank's items, some at a time.

        At the end call :meth:`_ran_out`, if the pass is to ``finish`` there.
        """

    @abstractmethod
    def is_uneven(self, batch_size: int, drop_last: bool) -> bool:
        """Whether some ranks get more batches than others in the next pass."""

    def __iter__(self) -> Iterator[Any]:
        walk = self._driver
        if walk is not None:
            return chain.from_iterable(self._blocks(walk, False))
        walk = self.begin()
        loader = loader_that_draws()
        if loader is not None:
            walk.count_by(*loader)
        self.progress.warn_of_repetition(walk)
        return self._drawn(walk)

    def _drawn(self, walk: Walk) -> Drawn:
        """Return the iterator over a pass that this sampler began itself."""
        walk.length = length_of(self)
        drawn = Drawn(chain.from_iterable(self._blocks(walk, True)))
        walk.walker = ref(drawn)
        return drawn

    def _ran_out(self, walk: Walk) -> None:
        """Note that everything was drawn, and the end of the pass if it was handed out too."""
        if walk.all_drawn_is_handed_out():
            self.progress.finish(walk)

    def begin(self) -> Walk:
        """Start a pass. For loaders, which then draw with :meth:`drawn_by`."""
        if self.num_replicas == 1 and dist.is_initialized():
            self._refuse_new_group()
        if not self._has_compared:
            self._compare_with_other_ranks()
        return self.progress.begin()

    @contextmanager
    def drawn_by(self, walk: Walk) -> Iterator[None]:
        """Let what is drawn inside the block belong to a loader's pass."""
        self._driver = walk
        try:
            yield
        finally:
            self._driver = None

    @property
    def seed(self) -> int:  # type: ignore[override]  # torch fixes it when a sampler is made
        """The seed that the order depends on, the same on all ranks."""
        if self._seed is None:
            if self.own_seed is None or given_seed() is not None:
                self._seed = common_seed()
            else:
                self._seed = int(first_word(f"{self._topic}/seed", str(self.own_seed)))
        return self._seed

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the pass under way, or else of the next."""
        return self.progress.epoch

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of items that this rank gets."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of items that all ranks get together, where they get equally many."""
        return len(self) * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch.

        Not needed: a pass that was walked to its end moves on to the next epoch by itself.
        After :meth:`load_state_dict` the epoch that was loaded keeps its position.
        """
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler stands: four numbers and a flag, the same on every rank."""
        state = {"seed": self.seed, "epoch": self.epoch, "position": self._position()}
        return {**state, "length": self.length, "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, also at another world size or batch size.

        Raises:
            ValueError: The state is of another dataset, or of another order.
        """
        for name, here in (("length", self.length), ("shuffle", self.shuffle)):
            there = state.get(name, "unknown")
            if there != here:
                raise ValueError(
                    f"the state was taken with {name}={there}, and {describe(self.dataset)} has "
                    f"{name}={here}: which samples were seen cannot be told. Resume with the same "
                    "data and order, or start the epoch anew with set_epoch()."
                )
        self._seed = int(state["seed"])
        self.progress.go_to(int(state["epoch"]), int(state["position"]))

    def _position(self) -> int:
        position, length = self.progress.position(self.num_replicas), self.length
        return position if length is None else min(position, length)

    def _refuse_new_group(self) -> None:
        if get_world_size() > 1:
            raise RuntimeError(
                f"the sampler of {describe(self.dataset)} was made before there were "
                f"{get_world_size()} ranks, and would give all of them everything: make samplers "
                "and loaders after ddp_utils.init_distributed()"
            )

    def _compare_with_other_ranks(self) -> None:
        """Raise if another rank walks something else here, which would repeat and lose samples."""
        self._has_compared = True
        seed = f", seed {self.seed}" if self.shuffle else ""
        place = f"epoch {self.progress.epoch}, position {self.progress.start}"
        require_same(
            self._topic,
            f"{self.length} samples, pad={self.pad}, drop_last={self.drop_last}{seed}, {place}",
            f"ranks differ in the sampler of {describe(self.dataset)}",
            "Give every rank the whole dataset and the same arguments; the sampler takes care "
            "of who gets what.",
        )


def length_of(data: Any) -> int | None:
    """Return the length of a sampler, stream or loader, None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # the second is what some libraries raise
        return None


def describe(data: Any) -> str:
    """Return how messages name a dataset or sampler.

    >>> describe(range(10))
    'range(0, 10)'
    """
    return repr(data) if isinstance(data, range) else type(data).__name__
