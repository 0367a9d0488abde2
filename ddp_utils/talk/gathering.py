"""How does a value of any kind and size get from one rank, or from all, to all?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_utils.ground.trees import flatten, paths_of, unflatten
from ddp_utils.talk.agreement import digest_of
from ddp_utils.talk.circle import gather_uneven, road_for
from ddp_utils.talk.exchange import PAYLOAD, Answers, Call, Note
from ddp_utils.talk.parcels import Parcel, pack, unpack

__all__ = ["broadcast_value", "gather_rows", "gather_values", "join_rows", "terms_of_rows"]

CPU = torch.device("cpu")


def gather_values(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return everybody's value, by place in the group."""
    call = Call.of("all_gather", group)
    with call.preparing():
        parcel = pack(value)
        note, inline = _announced(parcel, digest_of(call.operation))
    return _gathered(call, parcel, call.exchange(note, inline))


def gather_rows(tree: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the tree with everybody's rows joined in each leaf, in the order of the ranks."""
    call = Call.of("gather_cat", group)
    with call.preparing():
        structure, leaves = flatten(tree)
        paths = paths_of(structure)
        rows = [_as_rows(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        terms = {path: terms_of_rows(each) for path, each in zip(paths, rows, strict=True)}
        parcel = pack(rows)
        lines = [f"{path}\t{text}" for path, text in terms.items()]
        note, inline = _announced(parcel, digest_of(call.operation, *lines))
    answers = call.exchange(note, inline, lambda: terms)
    by_rank = _gathered(call, parcel, answers)
    return unflatten(
        tree, structure, [join_rows(of_leaf) for of_leaf in zip(*by_rank, strict=True)]
    )


def broadcast_value(value: Any, src: int, group: dist.ProcessGroup | None) -> Any:
    """Return the value of the global rank ``src``."""
    call = Call.of(f"broadcast(src={src})", group)
    with call.preparing():
        ranks = call.circle.ranks
        if src not in ranks:
            raise ValueError(f"src={src} is not among the group's ranks {ranks}")
        place = ranks.index(src)
        sending = place == call.circle.place
        parcel = pack(value) if sending else Parcel(b"", [])
        digest = digest_of(call.operation)
        note, inline = _announced(parcel, digest) if sending else (Note(digest), b"")
    answers = call.exchange(note, inline)
    sent = answers.notes[place]
    if sending and call.circle.size == 1:
        return unpack(parcel.lay_out(CPU))
    if sent.size <= PAYLOAD:
        laid = torch.from_numpy(answers.payloads[place][: sent.size])
    else:
        road = road_for(call.circle, all_on_accelerator=sent.on_accelerator)
        laid = parcel.lay_out(road) if sending else _empty(sent.size, road)
        dist.broadcast(laid, src, group=call.circle.group)
    return value if sending else unpack(laid)


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _announced(parcel: Parcel, digest: bytes) -> tuple[Note, bytes]:
    """Return the note for a parcel, and its bytes if they fit in the first message."""
    size = parcel.size
    note = Note(digest, on_accelerator=parcel.on_accelerator, size=size)
    return note, parcel.lay_out(CPU).numpy().tobytes() if size <= PAYLOAD else b""


def _gathered(call: Call, parcel: Parcel, answers: Answers) -> list[Any]:
    sizes = [note.size for note in answers.notes]
    if call.circle.size == 1:
        laid = [parcel.lay_out(CPU)]
    elif max(sizes) <= PAYLOAD:
        laid = [
            torch.from_numpy(payload[:size])
            for payload, size in zip(answers.payloads, sizes, strict=True)
        ]
    else:
        everywhere = all(note.on_accelerator for note in answers.notes)
        road = road_for(call.circle, all_on_accelerator=everywhere)
        laid = gather_uneven(call.circle, parcel.lay_out(road), sizes)
    return [unpack(each) for each in laid]


def _as_rows(path: str, leaf: Any) -> torch.Tensor | np.ndarray[Any, Any] | None:
    """Return a leaf that has rows: a 0-dim one is one row, and None has none."""
    if leaf is None:
        return None
    if isinstance(leaf, torch.Tensor):
        return leaf.reshape(1) if leaf.dim() == 0 else leaf
    if isinstance(leaf, np.ndarray):
        return np.atleast_1d(leaf)
    raise TypeError(
        f"gather_cat joins tensors and arrays, but what is at {path or 'the top'} is a "
        f"{type(leaf).__name__}; all_gather takes any value"
    )


def terms_of_rows(rows: torch.Tensor | np.ndarray[Any, Any] | None) -> str:
    """Return what the rows of a leaf must have in common on all ranks."""
    if rows is None:
        return "None"
    kind = "tensor" if isinstance(rows, torch.Tensor) else "array"
    return f"{kind} of {rows.dtype} with rows of shape {tuple(rows.shape[1:])}"


def join_rows(rows: Sequence[Any]) -> Any:
    """Return the rows of all ranks as one tensor or array, None for None."""
    if rows[0] is None:
        return None
    return torch.cat(list(rows)) if isinstance(rows[0], torch.Tensor) else np.concatenate(rows)
