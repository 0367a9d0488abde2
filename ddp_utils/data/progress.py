"""How far has a pass come, and which pass is next?

One :class:`Progress` belongs to each sampler, or to the loader where there is no sampler. It
counts what was handed out, not what a loader has drawn ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import length_hint
from typing import Any, TypeVar
from weakref import ref

from ddp_utils.callsite import note_epoch
from ddp_utils.data.warning import warn_caller

T = TypeVar("T")

__all__ = ["Drawn", "Progress", "Walk"]


class Drawn(chain[Any]):
    """What walks through a sampler: a ``chain``, that a walk can tell whether it is still held."""

    __slots__ = ("__weakref__",)


def _nobody() -> None:
    """Stand in for a weak reference to an iterator that there is not yet."""


_COPIED = ("epoch", "start", "length", "end", "was_asked_for")


class Walk:
    """One pass of this rank: where it began, and how much of it has been handed out."""

    end: int | None = None
    """Where a wrapped sampler's sequence ended, once it has."""
    walker: Callable[[], object] = staticmethod(_nobody)
    """A weak reference to the iterator that somebody holds; dead once it was dropped."""
    was_asked_for = False
    """By ``set_epoch``, so that beginning an epoch again is no mistake."""
    length: int | None = None
    """How many items this rank gets, if that is known."""
    _drawn = 0
    _block: Iterator[object] = iter(())
    _batches: Callable[[], int] | None = None
    _batch_size = 1

    def __init__(self, epoch: int, start: int) -> None:
        self.epoch = epoch
        self.start = start
        """The global position that it began at."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of a pickled or copied sampler who walks it here: nobody walks the copy."""
        state = {name: value for name, value in vars(self).items() if name in _COPIED}
        return {**state, "_drawn": self.taken}

    def count_by(self, batches: Callable[[], int], batch_size: int) -> None:
        """Let a loader, which draws ahead, tell how many batches it has handed out."""
        self._batches, self._batch_size = batches, batch_size

    def draw(self, block: list[T]) -> Iterator[T]:
        """Return an iterator over a block of items that this walk watches."""
        # A list's iterator tells how much is left in it, so nothing is counted item by item.
        self._drawn += len(block)
        self._block = drawn = iter(block)
        return drawn

    def draw_all(self, items: list[Any], end: Callable[[Walk], None]) -> Drawn:
        """Return an iterator over all items of this walk, that calls ``end(walk)`` after them."""
        self.length = self._drawn = len(items)
        self._block = block = iter(items)
        # The filter is asked once the items are over, and has none, as `end` returns nothing.
        drawn = Drawn(block, filter(end, (self,)))
        self.walker = ref(drawn)
        return drawn

    @property
    def counts_itself(self) -> bool:
        """Whether no loader stands between this walk and who gets its items."""
        return self._batches is None

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
        self._walks: list[Walk] = []
        """The passes of this epoch that are not over, the one that moved last at the end."""
        self.walked: Walk | None = None
        """The newest pass that was walked to its end."""
        self._name = name
        self._order_changes = order_changes
        self._epoch_was_set = False
        self._has_warned = False

    @property
    def walk(self) -> Walk | None:
        """The pass that counts: of those that somebody holds, the one that moved last.

        Looks at a first batch, in the middle of a pass or after it, have been dropped by the
        time that somebody asks.
        """
        held = [walk for walk in self._walks if walk.walker() is not None]
        left = [walk for walk in self._walks if not walk.is_look]
        counting = held or left or self._walks
        return counting[-1] if counting else None

    def begin(self) -> Walk:
        """Note that a new pass begins; how long it is, is known once its epoch is settled."""
        if self._walks:
            self.settle()
            self._walks = [w for w in self._walks if w.walker() is not None or not w.is_look]
        new = Walk(self.epoch, self.start)
        if self._epoch_was_set:
            new.was_asked_for, self._epoch_was_set = True, False
        self._walks.append(new)
        return new

    def moved(self, walk: Walk) -> None:
        """Note that a pass goes on, as one does that was interrupted by a look at another."""
        if len(self._walks) > 1 and walk in self._walks:
            self._walks.remove(walk)
            self._walks.append(walk)
            if not walk.is_look:
                self.warn_of_repetition(walk)

    def settle(self) -> None:
        """Go on to the next epoch if the last pass got everything, but did not ask for more.

        As a loop over ``range(len(loader))`` does. Not after a single batch: one rank may have
        looked at it alone.
        """
        walk = self.walk
        if walk is None or walk.is_look or not walk.is_complete:
            return
        self.walked = walk
        if not self._epoch_was_set:
            self.finish(walk)

    def newest_complete(self) -> Walk | None:
        """Return the newest pass that got everything, None if there was none.

        Raises:
            LookupError: There are two that it may be.
        """
        self.settle()
        look = self.walk
        if look is None or not look.is_complete:
            return self.walked
        if self.walked is not None and look.epoch != self.walked.epoch and self._order_changes:
            raise LookupError(
                f"has walked epoch {self.walked.epoch} of {self._name} and then taken the only "
                f"batch of epoch {look.epoch}, and of which of the two these rows are cannot be "
                "told"
            )
        return look

    def finish(self, walk: Walk) -> None:
        """Note that a pass was walked to its end: the next one is of the next epoch."""
        note_epoch(walk.epoch)
        self.walked = walk
        if walk in self._walks:
            self.go_to(walk.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of the epoch; keep the position if it is this one."""
        if epoch != self.epoch:
            self.go_to(epoch)
        self._epoch_was_set = True

    def go_to(self, epoch: int, start: int = 0) -> None:
        """Let the next pass begin at a position of an epoch."""
        self.epoch, self.start, self._epoch_was_set = epoch, start, False
        self._walks.clear()

    def position(self, world_size: int) -> int:
        """Return the global position in the epoch up to which items have been handed out."""
        walk = self.walk
        return self.start if walk is None else walk.start + walk.taken * world_size

    def warn_of_repetition(self, new: Walk) -> None:
        """Warn, once, where the pass before was left and the new one is more than a look."""
        if len(self._walks) == 1:
            return
        left = [walk for walk in self._walks if walk is not new and not walk.is_look]
        if new.counts_itself:  # a bare sampler may be looked through while its loader is walked
            left = [walk for walk in left if walk.counts_itself or walk.walker() is None]
        self._walks = [walk for walk in self._walks if walk is new or walk.walker() is not None]
        if self._has_warned or not left or not self._order_changes or new.was_asked_for:
            return
        walk = left[-1]
        self._has_warned = True
        warn_caller(
            f"the last pass over {self._name} was left before its end, so its epoch "
            f"({walk.epoch}) is not over: the pass that begins now has the same order again. "
            f"Walk passes to their end, or call set_epoch({walk.epoch + 1}) for a new order."
        )
