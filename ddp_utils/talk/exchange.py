"""How does one short message get from every rank to every rank, whatever they came for?

Each collective of this package begins with the same exchange: an ``all_gather`` of one message
of fixed size. Whatever the ranks called, and with whatever arguments, the sizes match, so no
backend can crash or mix up numbers. The message carries a digest of what its rank came for, so
that every rank sees every digest whole (nothing is summed, nothing can cancel) and all of them
come to the same verdict; it carries small values too, for which it is the only message. A rank
that cannot take part says so in it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddp_utils.callsite import refuse_in_section
from ddp_utils.ground.errors import DistributedError, RanksDisagreeError
from ddp_utils.world.world import current_world, get_device

__all__ = [
    "PAYLOAD",
    "Circle",
    "Note",
    "bulk_device",
    "circle_of",
    "exchange",
    "gather_bulk",
    "tell_if_failing",
]

HEAD = struct.Struct("<16s?B6xqd")
PAYLOAD = 2048
"""Bytes of a value that travel within the first message: 256 numbers."""
SIZE = HEAD.size + PAYLOAD


@dataclass(frozen=True)
class Circle:
    """Who takes part in a collective: this process's place among the ranks of a group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @property
    def ranks(self) -> list[int]:
        """The global ranks of those in the circle, by their place in it."""
        if self.size == 1 and self.group is None:
            return [0]
        return dist.get_process_group_ranks(self.group)


class Note(NamedTuple):
    """What a rank says about itself in the first message.

    ``size`` is the length of its value in whatever unit the operation counts, ``weight`` its
    weight in a mean; ``on_device`` tells that the value lies on an accelerator.
    """

    digest: bytes
    size: int = 0
    weight: float = 1.0
    on_device: bool = False
    failed: bool = False


def circle_of(group: dist.ProcessGroup | None, operation: str) -> Circle:
    """Return this process's place in ``group``; without any process group, a circle of one.

    Raises:
        DistributedError: A launcher started several ranks, but they are in no group yet.
        ValueError: This rank is not in ``group``.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"{operation}: rank {dist.get_rank()} is not in the group that was given, which "
                "only its members may call"
            )
        return Circle(group, rank, dist.get_world_size(group))
    world = current_world()
    if world.world_size > 1:
        raise DistributedError(
            f"rank {world.rank} of {world.world_size} called {operation} while there is no "
            "process group. Call init_distributed() first, or run inside distributed_main."
        )
    return Circle(None, 0, 1)


@contextmanager
def tell_if_failing(circle: Circle, operation: str) -> Iterator[None]:
    """Tell the other ranks if the block raises here: they raise too, instead of waiting."""
    try:
        yield
    except Exception as error:
        if circle.size > 1:
            text = f"{type(error).__name__}: {error}".encode()[:PAYLOAD]
            try:
                exchange(circle, operation, Note(bytes(16), len(text), failed=True), text)
            except RanksDisagreeError:
                pass
        raise


def exchange(
    circle: Circle, operation: str, note: Note, payload: bytes = b""
) -> tuple[list[Note], NDArray[np.uint8]]:
    """Give this rank's note and payload to all, and return everybody's, by place in the circle.

    Returns:
        The notes, and the payloads as an array of shape ``(circle.size, PAYLOAD)``, each padded
        with whatever.

    Raises:
        OneRankSectionError: Other ranks will not come.
        RanksDisagreeError: Some rank could not take part; raised on all others.
    """
    if circle.size == 1:
        row = np.zeros((1, PAYLOAD), np.uint8)
        row[0, : len(payload)] = np.frombuffer(payload, np.uint8)
        return [note], row
    refuse_in_section(operation)
    message = bytearray(SIZE)
    HEAD.pack_into(message, 0, note.digest, note.failed, note.on_device, note.size, note.weight)
    message[HEAD.size : HEAD.size + len(payload)] = payload
    received = _all_gather(circle, torch.frombuffer(message, dtype=torch.uint8)).numpy()
    notes = []
    for row in received:
        digest, failed, on_device, size, weight = HEAD.unpack_from(row)
        notes.append(Note(digest, size, weight, bool(on_device), failed))
    payloads = received[:, HEAD.size :]
    if any(other.failed for other in notes):
        raise RanksDisagreeError(_who_failed(circle, operation, notes, payloads))
    return notes, payloads


def _who_failed(
    circle: Circle, operation: str, notes: Sequence[Note], payloads: NDArray[np.uint8]
) -> str:
    lines = [
        f"rank {rank} could not take part in {operation}: "
        + payloads[i, : notes[i].size].tobytes().decode(errors="replace")
        for i, rank in enumerate(circle.ranks)
        if notes[i].failed
    ]
    return "\n".join(lines)


def gather_bulk(circle: Circle, bulk: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Gather one-dimensional ``uint8`` tensors of uneven ``sizes``, which all ranks know."""
    longest = max(sizes)
    padded = bulk
    if len(bulk) < longest:
        padded = bulk.new_zeros(longest)
        padded[: len(bulk)] = bulk
    received = _all_gather(circle, padded, where=bulk.device)
    return [row[:size] for row, size in zip(received, sizes, strict=True)]


def bulk_device(circle: Circle, all_on_device: bool) -> torch.device:
    """Return where tensors must lie to travel: on the accelerator if all ranks' are there.

    A CPU tensor goes by the group's CPU backend where it has one, else by the accelerator's.
    """
    kinds = _device_types(circle)
    own = get_device()
    if own.type in kinds and (all_on_device or "cpu" not in kinds):
        return own
    return torch.device("cpu")


def _device_types(circle: Circle) -> set[str]:
    """Return the device types that the group has a backend for."""
    config = dist.get_backend_config(circle.group)
    return {part.partition(":")[0] for part in config.split(",")}


def _all_gather(
    circle: Circle, message: torch.Tensor, where: torch.device | None = None
) -> torch.Tensor:
    """Return everybody's ``message``, of one size on all ranks, stacked; back on its device.

    The first message must not choose its road by what this rank holds: the others might hold
    something else. So it is always the CPU's, where the group has a CPU backend.
    """
    road = bulk_device(circle, False) if where is None else where
    message = message.to(road)
    received = message.new_empty((circle.size, len(message)))
    dist.all_gather(list(received.unbind(0)), message, group=circle.group)
    return received if where is not None else received.cpu()
