"""Do all ranks say the same, without waiting for one another?

Whoever comes first leaves word in the store; the others compare. Nothing here is a collective:
a rank that never comes is not missed.
"""

from __future__ import annotations

import os
from collections import Counter

from torch.utils.data import get_worker_info

from ddp_utils.callsite import call_site
from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.process_group import shared_store
from ddp_utils.world.world import SIMULATED, get_rank, get_world_size, is_distributed

__all__ = ["first_word", "new_topic", "require_same"]

_made_at: Counter[str] = Counter()


def new_topic(kind: str) -> str:
    """Return a name for what is being made now that comes out the same on every rank.

    Ranks run one program, so the third sampler made at a line is the same sampler on all of
    them, also where one rank has made others at other lines. Folders are left out: machines
    may keep the program in different ones.
    """
    place = f"{kind}/{os.path.basename(call_site())}"
    _made_at[place] += 1
    return f"{place}/{_made_at[place]}"


def first_word(topic: str, word: str) -> str:
    """Return the word of the rank that came to the topic first; without a group, one's own."""
    if not _ranks_can_talk():
        return word
    return shared_store().compare_set(topic, "", word).decode()


def require_same(topic: str, word: str, what: str, instead: str) -> None:
    """Raise where another rank came with another word.

    Raises:
        RanksDisagreeError: On the rank that came later. Whatever started the ranks ends the
            others.
    """
    said = first_word(topic, f"{get_rank()} {word}")
    rank, _, theirs = said.partition(" ")
    if theirs != word:
        raise RanksDisagreeError(
            f"{what} ({topic}): rank {get_rank()} has {word}, rank {rank} has {theirs}. {instead}"
        )


def _ranks_can_talk() -> bool:
    """Whether there is a store with others at it. A forked worker must not touch the socket."""
    if SIMULATED.get() is not None or get_worker_info() is not None:
        return False
    return is_distributed() and get_world_size() > 1
