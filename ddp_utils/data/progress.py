"""How far has a pass come, and which pass is next?

One :class:`Progress` belongs to each sampler, or to the loader where there is no sampler. It
counts what was handed out, not what a loader has drawn ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import length_hint
from typing import TypeVar

from ddp_utils.data.warning import warn_caller

T = TypeVar("T")

__all__ = ["Progress", "Walk"]


class Walk:
    """One pass of this rank: where it began, and how much of it has been handed out."""

    end: int | None = None
    """Where a wrapped sampler's sequence ended, once it has."""
    _drawn = 0
    _block: Iterator[object] = iter(())
    _batches: Callable[[], int] | None = None
    _batch_size = 1

    def __init__(self, epoch: int, start: int, length: int | None) -> None:
        self.epoch = epoch
        self.start = start
        """The global position that it began at."""
        self.length = length
        """How many items this rank gets, if that is known."""

    def count_by(self, batches: Callable[[], int], batch_size: int) -> None:
        """Let a loader, which draws ahead, tell how many batches it has handed out."""
        self._batches, self._batch_size = batches, batch_size

    def draw(self, block: list[T]) -> Iterator[T]:
        """Return an iterator over a block of items that this walk watches."""
        # A list's iterator tells how much is left in it, so nothing is counted item by item.
        self._drawn += len(block)
        self._block = drawn = iter(block)
        return drawn

    @property
    def taken(self) -> int:
        """How many of this rank's items have been handed out."""
        if self._batches is None:
            return self._drawn - length_hint(self._block)
        taken = self._batches() * self._batch_size
        return taken if self.length is None else min(taken, self.length)

    def all_drawn_is_handed_out(self) -> bool:
        """Whether a sampler that has run out is also through: not, if a loader drew it ahead."""
        if self._batches is None:
            return True
        if self.length is None:
            self.length = self._drawn
        return self.taken >= self.length

    @property
    def is_look(self) -> bool:
        """Whether at most one batch was taken, as when a first batch is looked at."""
        return (self.taken if self._batches is None else self._batches()) <= 1

    @property
    def is_complete(self) -> bool:
        """Whether everything was handed out, though the loop may not have asked for more."""
        return self.length is not None and self.taken >= self.length > 0


class Progress:
    """The epoch and position of a sampler or loader, over all its passes."""

    def __init__(self, name: str, *, order_changes: bool) -> None:
        self.epoch = 0
        self.start = 0
        """The global position that passes of this epoch begin at: above 0 after a resume."""
        self.walk: Walk | None = None
        """The newest pass, until its epoch is over."""
        self.walked: Walk | None = None
        """The newest pass that was walked to its end."""
        self._name = name
        self._order_changes = order_changes
        self._epoch_was_set = False
        self._has_warned = False

    def begin(self, length: Callable[[], int | None]) -> Walk:
        """Note that a new pass begins; how long it is, is asked once its epoch is settled."""
        if self.walk is not None:
            self.settle()
            self._warn_of_repetition()
        self._epoch_was_set = False
        self.walk = Walk(self.epoch, self.start, length())
        return self.walk

    def settle(self) -> None:
        """Go on to the next epoch if the last pass got everything, but did not ask for more.

        As a loop over ``range(len(loader))`` does. Not after a single batch: one rank may have
        looked at it alone.
        """
        walk = self.walk
        if walk is None or not walk.is_complete:
            return
        self.walked = walk
        if not (walk.is_look or self._epoch_was_set):
            self.finish(walk)

    def finish(self, walk: Walk) -> None:
        """Note that a pass was walked to its end: the next one is of the next epoch."""
        self.walked = walk
        if walk is self.walk:
            self.go_to(walk.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of the epoch; keep the position if it is this one."""
        if epoch != self.epoch:
            self.go_to(epoch)
        self._epoch_was_set = True

    def go_to(self, epoch: int, start: int = 0) -> None:
        """Let the next pass begin at a position of an epoch."""
        self.epoch, self.start, self.walk, self._epoch_was_set = epoch, start, None, False

    def position(self, world_size: int) -> int:
        """Return the global position in the epoch up to which items have been handed out."""
        return self.start if self.walk is None else self.walk.start + self.walk.taken * world_size

    def _warn_of_repetition(self) -> None:
        """Warn, once, where the last pass was left and its epoch begins again."""
        walk = self.walk
        if walk is None or walk.is_look or walk.is_complete or self._epoch_was_set:
            return
        if self._has_warned or not self._order_changes:
            return
        self._has_warned = True
        warn_caller(
            f"the last pass over {self._name} was left before its end, so its epoch "
            f"({walk.epoch}) is not over: the pass that begins now has the same order again. "
            f"Walk passes to their end, or call set_epoch({walk.epoch + 1}) for a new order."
        )
