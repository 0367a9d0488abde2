"""Do all ranks hold the same facts, and where they do not, which of them differ?

Facts are short texts by name: the shape of each parameter, the digest of each gradient. A
collective, unlike :mod:`ddp_utils.agree.by_word`: every rank learns of every difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.talk.agreement import named_ranks
from ddp_utils.talk.exchange import Call, Note

__all__ = ["differences", "require_same_facts"]

MOST_SHOWN = 8


def require_same_facts(call: Call, facts: Mapping[str, str], *, what: str, instead: str) -> None:
    """Raise the same error on every rank unless all hold the same facts, in the same order.

    Where they agree only a digest travels.

    Raises:
        RanksDisagreeError: names the facts that differ and, for each, which ranks hold what.
    """
    lines = repr([call.operation, *facts.items()]).encode()
    note = Note(hashlib.blake2b(lines, digest_size=16).digest())
    answers = call.exchange(note, terms=lambda: dict(facts), agree=lambda _: True)
    if answers.came is not None:
        told = dict(zip(call.circle.ranks, (came.terms for came in answers.came), strict=True))
        raise RanksDisagreeError(f"{what}\n{differences(told)}\n{instead}")


def differences(facts_by_rank: Mapping[int, Mapping[str, str]]) -> str:
    """Return the facts that differ, a line each.

    >>> print(differences({0: {"bias": "(3,)"}, 1: {"bias": "(4,)"}, 2: {"bias": "(3,)"}}))
      bias: (3,) on ranks 0, 2; (4,) on rank 1
    >>> print(differences({0: {"a": "1", "b": "2"}, 1: {"b": "2", "a": "1"}}))
      order: a, b on rank 0; b, a on rank 1
    """
    names = dict.fromkeys(name for facts in facts_by_rank.values() for name in facts)
    lines = []
    for name in names:
        said = {rank: facts.get(name, "missing") for rank, facts in facts_by_rank.items()}
        if len(set(said.values())) > 1:
            lines.append(f"  {name}: {_who_says_what(said)}")
    if not lines:
        lines = [f"  order: {_who_says_what(_orders(facts_by_rank))}"]
    if len(lines) > MOST_SHOWN:
        lines[MOST_SHOWN:] = [f"  and {len(lines) - MOST_SHOWN} more"]
    return "\n".join(lines)


def _orders(facts_by_rank: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """Return each rank's names from the first place on where two ranks' orders part."""
    orders = {rank: list(facts) for rank, facts in facts_by_rank.items()}
    first = next(i for i, at in enumerate(zip(*orders.values(), strict=True)) if len(set(at)) > 1)
    return {rank: ", ".join(names[first : first + 3]) for rank, names in orders.items()}


def _who_says_what(said: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {named_ranks(who)}" for text, who in ranks.items())
