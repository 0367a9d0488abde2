"""How do ranks that make the same call leave word for each other, and wait for it?

Through the store that they share, never by a collective: rank zero's disk may take an hour, and
a rank that has failed or left is noticed at once and not at a timeout.
"""

from __future__ import annotations

import io
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_utils.callsite import refuse_in_section
from ddp_utils.ground.errors import AbsentRanksError, DistributedError, RankZeroError
from ddp_utils.process_group import shared_store
from ddp_utils.talk.circle import circle_of

__all__ = ["Meeting", "relayed"]

PATIENCE = 30.0
"""Seconds of waiting after which a rank says for whom it waits."""

LONGEST_PAUSE = 0.1
"""Seconds between two looks into the store, when it has been a while."""

LOOKS = 5000
"""How often in a second all ranks together ask whether one of them has left."""

_logger = logging.getLogger("ddp_utils")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Meeting:
    """One call of an operation that every rank makes: the n-th on each of them.

    ``part`` is what this rank brings along for the others. Plain values and tensors only: what
    comes from a store is read without running code. Alone, or without a group, nothing is sent.
    """

    def __init__(self, operation: str, part: Any = None) -> None:
        circle = circle_of(None, operation)
        self.operation = operation
        self.rank = circle.place
        self.size = circle.size
        self._store: dist.Store = dist.HashStore()
        self._keys = {f"come/{rank}" for rank in range(self.size)}
        if self.size > 1:
            refuse_in_section(operation)
            number = next(_numbers[operation])
            self._store = dist.PrefixStore(f"{operation}/{number}", shared_store())
        self.tell("come", part)

    def tell(self, topic: str, word: Any) -> None:
        """Leave word of this rank's on a topic."""
        self._keys.add(f"{topic}/{self.rank}")
        self._set(f"{topic}/{self.rank}", word)

    @contextmanager
    def telling(self, topic: str, word: dict[str, Any]) -> Iterator[None]:
        """Leave word when the block ends: ``word`` and, as ``"error"``, what it raised."""
        try:
            yield
        except BaseException as error:
            self.tell(topic, word | {"error": self.account_of(error)})
            raise
        self.tell(topic, word | {"error": None})

    def hear(self, topic: str, rank: int) -> Any:
        """Wait for a rank's word on a topic, and return it.

        Raises:
            AbsentRanksError: That rank has left the job and will not come.
        """
        key = f"{topic}/{rank}"
        self._keys.add(key)
        self._wait(lambda: self._store.check([key]), [rank])
        return _unpacked(self._store.get(key))

    def agree(self, topic: str) -> None:
        """Wait until every rank has come to this point, and raise if one has failed before it.

        Raises:
            DistributedError: Some rank called :meth:`fail` instead; or the ``OSError`` it told.
        """
        everybody, count = f"{topic}/all", f"{topic}/count"
        self._keys |= {everybody, count}
        if self._store.add(count, 1) == self.size:
            self._store.set(everybody, "")
        self._wait(
            lambda: self._store.check([everybody]) or self._store.check(["failed"]),
            range(self.size),
        )
        if not self._store.check([everybody]):
            raise relayed(_unpacked(self._store.get("failed")))

    def fail(self, error: BaseException) -> None:
        """Let the ranks in :meth:`agree` know that this one has failed."""
        self._set("failed", self.account_of(error))

    def account_of(self, error: BaseException) -> dict[str, Any]:
        """Return what another rank needs to know of an exception of this rank."""
        return {
            "rank": self.rank,
            "operation": self.operation,
            "text": f"{type(error).__name__}: {error}",
            "errno": error.errno if isinstance(error, OSError) else None,
        }

    def close(self, readers: int) -> None:
        """Take leave; the last of so many readers clears the store."""
        if self._store.add("read", 1) == readers:
            for key in (*self._keys, "read"):
                self._store.delete_key(key)

    def _set(self, key: str, word: Any) -> None:
        self._store.set(key, _packed(word))  # type: ignore[arg-type]  # takes bytes as well

    def _wait(self, ready: Callable[[], bool], awaited: Sequence[int]) -> None:
        started = looked = time.monotonic()
        pause, told = 0.001, False
        while not ready():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            now = time.monotonic()
            if now - looked > self.size * len(awaited) / LOOKS:
                looked = now
                self._raise_if_left(awaited, ready)
            if not told and now - started > PATIENCE:
                told = True
                self._say_who_is_missing(awaited)

    def _raise_if_left(self, awaited: Sequence[int], ready: Callable[[], bool]) -> None:
        store = shared_store()
        left = [rank for rank in awaited if store.check([f"left/{rank}"])]
        if left and not ready():  # its last word may have come between the two looks
            raise AbsentRanksError(
                f"rank {self.rank} waits in {self.operation} for rank {left[0]}, which has ended "
                f"without coming to it. Call {self.operation} on every rank."
            )

    def _say_who_is_missing(self, awaited: Sequence[int]) -> None:
        missing = [rank for rank in awaited if not self._store.check([f"come/{rank}"])]
        if missing:
            _logger.warning(
                "rank %d has waited %d s in %s for rank %s. Where only some ranks call it, pass "
                "wait=False.",
                self.rank,
                PATIENCE,
                self.operation,
                ", ".join(map(str, missing)),
            )


def relayed(account: dict[str, Any]) -> Exception:
    """Return the exception to raise for one that another rank has raised.

    An ``OSError`` stays one of the same kind, so that a script may handle a full disk on all
    ranks alike. ``effect_of`` names the rank whose exception is the cause.
    """
    text = "rank {rank} failed in {operation}: {text}".format(**account)
    error: Any
    if account["errno"] is not None:
        error = OSError(account["errno"], text)
    else:
        error = (RankZeroError if account["rank"] == 0 else DistributedError)(text)
    error.effect_of = account["rank"]
    assert isinstance(error, Exception)
    return error


def _packed(word: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(word, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
