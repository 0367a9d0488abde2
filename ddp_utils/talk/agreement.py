"""Did all ranks come for the same, and if not, what is the first difference?

Pure functions over what the ranks say about themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["Agree", "Came", "all_equal", "difference", "digest_of", "named_ranks", "told_by_rank"]


@dataclass(frozen=True)
class Came:
    """What one rank came for, and from where.

    ``terms`` tells by path what it brought, as anything with a text; ``tree`` is what the paths
    lead through, pickled, where the ranks' trees may have to be merged.
    """

    operation: str
    site: str
    terms: Mapping[str, Any]
    tree: bytes = b""


Agree = Callable[[Sequence[Any]], bool]
"""Whether the ranks agree at one path; gets what each brought there, None for nothing."""


def all_equal(brought: Sequence[Any]) -> bool:
    """Whether all ranks brought the same, by its text."""
    return len({str(each) for each in brought}) == 1


@lru_cache(maxsize=256)
def digest_of(*lines: str) -> bytes:
    """Return a digest of 16 bytes, the same for equal lines on every machine."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()


def difference(came: Sequence[Came], ranks: Sequence[int], agree: Agree = all_equal) -> str | None:
    """Say how the ranks differ: in the operation, else at the first path; None if they agree.

    >>> ours = Came("all_gather", "train.py:3", {})
    >>> print(difference([ours, Came("barrier", "train.py:9", {}), ours], [0, 1, 2]))
    the ranks came to different collectives:
      ranks 0, 2: all_gather at train.py:3
      rank 1: barrier at train.py:9
    """
    if len({each.operation for each in came}) > 1:
        return "the ranks came to different collectives:\n" + told_by_rank(
            [f"{each.operation} at {each.site}" for each in came], ranks
        )
    for path in dict.fromkeys(path for each in came for path in each.terms):
        brought = [each.terms.get(path) for each in came]
        if not agree(brought):
            told = [
                f"{'nothing' if what is None else what} ({each.site})"
                for what, each in zip(brought, came, strict=True)
            ]
            where = f"at {path}" if path else "in what they brought"
            return f"{came[0].operation}: the ranks differ {where}:\n{told_by_rank(told, ranks)}"
    return None


def told_by_rank(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return one line for all ranks that say the same."""
    saying: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        saying.setdefault(text, []).append(rank)
    return "\n".join(f"  {named_ranks(those)}: {text}" for text, those in saying.items())


def named_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence, runs of them in short.

    >>> named_ranks([1]), named_ranks([0, 2, 3, 4, 7])
    ('rank 1', 'ranks 0, 2-4, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    alone = len(runs) == 1 and len(runs[0]) == 1
    return f"rank{'' if alone else 's'} {', '.join(parts)}"
