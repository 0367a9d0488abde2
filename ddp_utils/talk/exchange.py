"""How does one short message get from every rank to every rank, whatever they came for?

Each collective of this package begins with the same exchange: an ``all_gather`` of one message
of fixed size. Whatever the ranks called, and with whatever arguments, the sizes match, so no
backend can crash or mix up numbers. The message carries a digest of what its rank came for.
Every rank sees every digest whole (nothing is summed, so nothing can cancel) and comes to the
same verdict. It carries small values too, for which it is the only message, and the error of a
rank that cannot take part.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddp_utils.callsite import call_site, refuse_in_section
from ddp_utils.ground import settings
from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.talk import debug
from ddp_utils.talk.agreement import Agree, Came, all_equal, difference
from ddp_utils.talk.circle import Circle, circle_of, gather_even, gather_uneven, road_for

__all__ = ["PAYLOAD", "Answers", "Call", "Note"]

HEAD = struct.Struct("<16s??6xqd")
PAYLOAD = 2048
"""Bytes of a value that travel within the first message: 256 numbers."""
SIZE = HEAD.size + PAYLOAD


Terms = Callable[[], Mapping[str, Any]]


class Note(NamedTuple):
    """What a rank says about itself in the first message.

    ``digest`` (16 bytes) is of what all ranks must agree on; ``size`` counts its value in the
    operation's own unit, ``weight`` is its weight in a mean.
    """

    digest: bytes
    failed: bool = False
    on_accelerator: bool = False
    size: int = 0
    weight: float = 1.0


class Answers(NamedTuple):
    """Everybody's first message, by place in the circle.

    ``payloads`` has the shape ``(circle.size, PAYLOAD)``, each padded with zeros. ``came`` is
    None where all digests are the same, else what each rank came for.
    """

    notes: list[Note]
    payloads: NDArray[np.uint8]
    came: list[Came] | None = None


@dataclass(frozen=True)
class Call:
    """One collective that this rank has come to."""

    operation: str
    circle: Circle

    @classmethod
    def of(cls, operation: str, group: dist.ProcessGroup | None) -> Call:
        """Come to a collective.

        Raises:
            OneRankSectionError: The other ranks will not come.
        """
        circle = circle_of(group, operation)
        if circle.size > 1:
            refuse_in_section(operation)
        return cls(operation, circle)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Tell the other ranks if the block raises here: they raise too, instead of waiting."""
        try:
            yield
        except Exception as error:
            if self.circle.size > 1:
                text = f"{type(error).__name__}: {error}"
                payload = text.encode()[:PAYLOAD]
                with suppress(Exception):  # ours is the error to show here
                    note = Note(bytes(16), failed=True, size=len(payload))
                    self.exchange(note, payload, lambda: {"": text})
            raise

    def exchange(
        self,
        note: Note,
        payload: bytes = b"",
        terms: Terms = dict,
        *,
        agree: Agree = all_equal,
        tree: bytes = b"",
    ) -> Answers:
        """Give this rank's note and payload to all, and return everybody's.

        Args:
            note: See :class:`Note`.
            payload: At most ``PAYLOAD`` bytes.
            terms: Tells by path what this rank brought. Asked only where the digests differ.
            agree: Judges what all ranks brought at one path, then.
            tree: What the paths lead through, pickled, for a caller that merges trees.

        Raises:
            RanksDisagreeError: The ranks came for different things, or one of them cannot take
                part; the same text on all the others.
        """
        if self.circle.size == 1:
            row = np.zeros((1, PAYLOAD), np.uint8)
            row[0, : len(payload)] = np.frombuffer(payload, np.uint8)
            return Answers([note], row)
        if settings.DEBUG.get():
            debug.compare(self.circle, self.operation)
        answers = _first_message(self.circle, note, payload)
        if any(other.failed for other in answers.notes):
            raise RanksDisagreeError(self._who_failed(answers))
        if all(other.digest == note.digest for other in answers.notes):
            return answers
        came = self._gather_came(Came(self.operation, call_site(), terms(), tree))
        text = difference(came, self.circle.ranks, agree)
        if text is not None:
            raise RanksDisagreeError(text)
        return answers._replace(came=came)

    def _gather_came(self, came: Came) -> list[Came]:
        data = pickle.dumps(came)
        inline = data if len(data) <= PAYLOAD else b""
        notes, payloads, _ = _first_message(self.circle, Note(bytes(16), size=len(data)), inline)
        sizes = [note.size for note in notes]
        if max(sizes) <= PAYLOAD:
            return [
                pickle.loads(row[:size].tobytes())
                for row, size in zip(payloads, sizes, strict=True)
            ]
        bulk = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(road_for(self.circle))
        rows = gather_uneven(self.circle, bulk, sizes)
        return [pickle.loads(row.cpu().numpy().tobytes()) for row in rows]

    def _who_failed(self, answers: Answers) -> str:
        return "\n".join(
            f"rank {rank} could not take part in {self.operation}: "
            + payload[: note.size].tobytes().decode(errors="replace")
            for rank, note, payload in zip(
                self.circle.ranks, answers.notes, answers.payloads, strict=True
            )
            if note.failed
        )


def _first_message(circle: Circle, note: Note, payload: bytes) -> Answers:
    """Exchange the message of fixed size.

    Its road must not depend on what this rank holds, since others may hold something else: it
    is the CPU's, where the group has a backend for the CPU.
    """
    message = bytearray(SIZE)
    HEAD.pack_into(message, 0, *note)
    message[HEAD.size : HEAD.size + len(payload)] = payload
    tensor = torch.frombuffer(message, dtype=torch.uint8).to(road_for(circle))
    rows = gather_even(circle, tensor).cpu().numpy()
    return Answers([Note(*HEAD.unpack_from(row)) for row in rows], rows[:, HEAD.size :])
