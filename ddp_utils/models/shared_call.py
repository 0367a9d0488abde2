"""How do ranks that make the same call tell each other how it goes?

By words in the store that they share, never by a collective: rank zero's disk may take an hour,
and a rank that has failed or left is noticed at once and not at a timeout.
"""

from __future__ import annotations

import base64
import io
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_utils.callsite import refuse_in_section
from ddp_utils.ground.errors import DistributedError, RankZeroError
from ddp_utils.process_group import shared_store
from ddp_utils.talk.circle import circle_of
from ddp_utils.talk.waiting import wait_for_word

__all__ = ["PATIENCE", "SharedCall", "relayed"]

PATIENCE = 30.0
"""Seconds of waiting after which a rank says for whom it waits."""

POINTS = ("ready", "placed", "end")
"""Where ranks agree that all have come so far: before they send in bulk, when each has a place
for what is sent, and at last."""

_logger = logging.getLogger("ddp_utils")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class SharedCall:
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
        self._store.set(f"{topic}/{self.rank}", _packed(word))

    @contextmanager
    def telling(self, topic: str, word: dict[str, Any]) -> Iterator[None]:
        """Leave word when the block ends: ``word`` and, as ``"error"``, what it raised."""
        try:
            yield
        except BaseException as error:
            self.tell(topic, word | {"error": self._account_of(error)})
            raise
        self.tell(topic, word | {"error": None})

    def hear(self, topic: str, rank: int) -> Any:
        """Wait for a rank's word on a topic, and return it.

        Raises:
            AbsentRanksError: That rank has left the job and will not come.
        """
        return self._word(f"{topic}/{rank}", [rank])

    def agree(self, point: str) -> None:
        """Wait until every rank has come to this point, and raise if one has failed before it.

        Raises:
            DistributedError: Some rank has called :meth:`fail`. Or the ``OSError`` that it told.
            AbsentRanksError: A rank has left the job and will not come.
        """
        self._keys.add(f"{point}/count")
        if self._store.add(f"{point}/count", 1) == self.size:
            self._store.compare_set(f"{point}/verdict", "", _packed(None))
        failure = self._word(f"{point}/verdict", range(self.size))
        if failure is not None:
            raise relayed(failure)

    def fail(self, error: BaseException) -> None:
        """Let the ranks that wait in :meth:`agree`, or will, know that this one has failed."""
        for point in POINTS:
            self._store.compare_set(f"{point}/verdict", "", _packed(self._account_of(error)))

    def close(self, readers: int) -> None:
        """Take leave; the last of so many readers clears the store."""
        if self._store.add("read", 1) == readers:
            for key in (*self._keys, "read"):
                self._store.delete_key(key)

    def _account_of(self, error: BaseException) -> dict[str, Any]:
        """Return what another rank needs to know of an exception of this rank."""
        return {
            "rank": self.rank,
            "operation": self.operation,
            "text": f"{type(error).__name__}: {error}",
            "errno": error.errno if isinstance(error, OSError) else None,
        }

    def _word(self, key: str, awaited: Sequence[int]) -> Any:
        """Wait for a word, without limit, and say for whom if it takes long."""
        self._keys.add(key)
        word = wait_for_word(self._store, key, self.operation, lambda: awaited, PATIENCE)
        if word is None:
            self._say_who_is_missing(awaited)
            word = wait_for_word(self._store, key, self.operation, lambda: awaited)
        assert word is not None
        return _unpacked(word)

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


def _packed(word: Any) -> str:
    buffer = io.BytesIO()
    torch.save(word, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
