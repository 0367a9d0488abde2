"""How do ranks wait for each other's word without a collective, and never for nothing?

Words lie in the store that all ranks share. Waiting has no limit of its own where the awaited
rank may work for an hour; it ends at once when that rank has left the job.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from ddp_utils.callsite import call_site
from ddp_utils.ground import settings
from ddp_utils.ground.errors import AbsentRanksError
from ddp_utils.process_group import introduce, shared_store, whereabouts
from ddp_utils.talk import stacks
from ddp_utils.talk.agreement import named_ranks
from ddp_utils.talk.circle import Circle
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["Meeting", "wait_for_word"]

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0002, 0.5
"""Seconds between two looks into the store, the longer the longer it has been."""
FAREWELL = 5.0
"""Seconds that the store's host waits for others to read what it has read already."""
LOOKS = 5000
"""How often in a second all ranks together may ask for ranks that have left."""

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_open: defaultdict[str, list[str]] = defaultdict(list)
"""Meetings, by what they are about, that some ranks may still be at."""
_left: defaultdict[str, list[str]] = defaultdict(list)
"""Meetings, by what they are about, that all ranks have left, and whose words can go."""


def wait_for_word(
    store: dist.Store,
    key: str,
    operation: str,
    awaited: Callable[[], Sequence[int]],
    timeout: float | None = None,
) -> str | None:
    """Return the word under ``key`` as soon as it is there; None when the time is over.

    Args:
        store: Where the word will be.
        key: Its key.
        operation: What is waiting, for the error.
        awaited: Returns the global ranks whose coming is still awaited.
        timeout: In seconds; no limit by default.

    Raises:
        AbsentRanksError: An awaited rank has left the job, and will not come.
    """
    started = time.monotonic()
    next_look = 0.1
    while not store.check([key]):
        waited = time.monotonic() - started
        if timeout is not None and waited >= timeout:
            return None
        if waited > next_look:
            ranks = awaited()
            _raise_if_left(ranks, operation, lambda: store.check([key]))
            next_look = waited + max(0.1, waited / 20, len(ranks) * get_world_size() / LOOKS)
        pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, waited / 50))
        time.sleep(pause if timeout is None else min(pause, timeout - waited))
    return store.get(key).decode()


def _raise_if_left(ranks: Sequence[int], operation: str, came: Callable[[], bool]) -> None:
    shared = shared_store()
    left = [rank for rank in ranks if shared.check([f"left/{rank}"])]
    if left and not came():  # the word may have come between the two looks
        how = shared.get(f"left/{left[0]}").decode()
        raise AbsentRanksError(
            f"{named_ranks(left)} {'have' if len(left) > 1 else 'has'} {how} without coming to "
            f"{operation}, where rank {get_rank()} waits ({call_site()}). Every rank must "
            "come to it."
        )


class Meeting:
    """One time that all ranks of a circle come to the same point: the n-th, for each of them.

    To make one is to arrive, with a word for the others. Nothing is waited for until asked.
    """

    def __init__(self, circle: Circle, topic: str, operation: str, word: str = "") -> None:
        introduce()
        self._circle = circle
        self._operation = operation
        self._name = f"{topic}/{circle.name}"
        this = f"{self._name}/{next(_numbers[self._name])}"
        self._store = dist.PrefixStore(this, shared_store())
        while _left[self._name]:
            self._clear(_left[self._name].pop())
        _open[self._name].append(this)
        self._store.set(str(circle.place), word)
        if self._store.add("count", 1) == circle.size:
            self._decide("all")

    def wait_for_all(self, timeout: float | None) -> None:
        """Wait until every rank has come.

        Raises:
            AbsentRanksError: Ranks have not come in ``timeout`` seconds, or have left the job.
                The same text on all ranks, also on those that come later.
        """
        try:
            verdict = self._wait("verdict", self._absent, timeout)
        except AbsentRanksError as error:
            verdict = self._decide(str(error))
        if verdict is None:
            assert timeout is not None
            absent = self._absent()  # nobody, if the last came at the last moment
            verdict = self._decide(self._absence(absent, timeout) if absent else "all")
        if verdict != "all":
            raise AbsentRanksError(verdict)
        meetings = _open[self._name]
        _left[self._name] += meetings[:-1]  # all have left those, to be here
        del meetings[:-1]
        self._let_others_go_first()

    def _let_others_go_first(self) -> None:
        """Let the rank that may be the store's host stay until all others know the verdict.

        It might end right after this, and the store with it.
        """
        passed = self._store.add("passed", 1)
        deadline = time.monotonic() + FAREWELL
        while self._circle.place == 0 and passed < self._circle.size:
            if time.monotonic() > deadline:
                return  # somebody has died on the way
            time.sleep(SHORTEST_PAUSE)
            passed = self._store.add("passed", 0)

    def hear(self, place: int) -> str:
        """Wait for the word of the rank at a place, and return it."""
        rank = self._circle.ranks[place]
        word = self._wait(str(place), lambda: [rank], None)
        assert word is not None
        return word

    def _wait(
        self, key: str, awaited: Callable[[], Sequence[int]], timeout: float | None
    ) -> str | None:
        return wait_for_word(self._store, key, self._operation, awaited, timeout)

    def _decide(self, verdict: str) -> str:
        """Return the verdict of the rank that was the first to have one."""
        return self._store.compare_set("verdict", "", verdict).decode()

    def _absent(self) -> list[int]:
        ranks = enumerate(self._circle.ranks)
        return [rank for place, rank in ranks if not self._store.check([str(place)])]

    def _absence(self, absent: Sequence[int], timeout: float) -> str:
        here = named_ranks(rank for rank in self._circle.ranks if rank not in absent)
        lines = [
            f"{named_ranks(absent)} did not come to {self._operation} within {timeout:g} s; "
            f"{here} did ({call_site()})."
        ]
        places = stacks.where_are(absent) if settings.DEBUG.get() else [""] * len(absent)
        for rank, place in zip(absent, places, strict=True):
            lines.append(f"  {whereabouts(rank)}{place and ', '}{place}")
        return "\n".join(lines)

    def _clear(self, meeting: str) -> None:
        """Remove what this rank wrote at a meeting that all ranks have left behind them.

        It may have been at the store of a group that is gone; then there is nothing to remove.
        """
        store = dist.PrefixStore(meeting, shared_store())
        keys = [str(self._circle.place)]
        if self._circle.place == 0:
            keys += ["count", "verdict", "passed"]
        for key in keys:
            store.delete_key(key)
