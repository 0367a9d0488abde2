"""Which buffers did a training forward change, and how do all ranks get the same ones?

Rank zero's values win, as in torch. Unlike torch, which sends all buffers BEFORE every forward,
they are sent AFTER a training forward, and only those that changed, so that every rank may
evaluate or save the same model, alone. They travel while the backward runs, and are in place when
it has ended, or before if somebody looks at the wrapped model.

One ``all_reduce`` per step does it. Its message holds a flag for each buffer and the bytes of
those that are known to change; all ranks but zero contribute zero bytes, so that the maximum is
rank zero's value, bit by bit, and a flag that any rank raised. A buffer that was flagged is
sent at once in a message of its own, and from the second time on with all others: what every
rank sends is decided by the flags that all have seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_utils.agree.facts import require_same_facts
from ddp_utils.ground import settings
from ddp_utils.ground._torch_private import (
    at_end_of_backward,
    copy_all,
    own_buffers,
    version_of,
)
from ddp_utils.ground.bits import digests, is_readable
from ddp_utils.models.gradient_watch import tensors_with_backward
from ddp_utils.talk.exchange import Call

__all__ = ["BufferSync"]

ALIGNMENT = 16
"""Bytes: every dtype may start at a multiple of it."""
SETTLING = 3
"""In the first syncs the flags are looked at immediately, also on an accelerator."""
LOOK_AGAIN = 100
"""After so many syncs a model without buffers is looked through again, and bits are compared."""
RUNNING_STATS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


Spec = tuple[tuple[int, ...], torch.dtype]
Seen = tuple[torch.Tensor, int]


@dataclass
class Held:
    """One buffer of the model, and every place where it is registered."""

    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]]

    def __post_init__(self) -> None:
        self.spec: Spec = tuple(self.tensor.shape), self.tensor.dtype

    @property
    def may_be_overwritten(self) -> bool:
        """Whether no backward of a training forward reads the buffer: running statistics."""
        return all(isinstance(owner, RUNNING_STATS) for owner, _ in self.places)

    def replace(self, value: torch.Tensor) -> None:
        """Register another tensor in the buffer's place.

        The forward may have saved the buffer for its backward, which must see the old value:
        overwriting it would give a wrong gradient, or torch's error.
        """
        self.tensor = torch.empty_like(self.tensor).copy_(value)
        for owner, key in self.places:
            setattr(owner, key, self.tensor)


@contextmanager
def _outside_autograd() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class BufferSync:
    """Keeps the buffers of one wrapped model the same on all ranks of a group."""

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._ignored = frozenset(ignored)
        self._group = group
        self._device = device
        self._waits_for_device = device.type != "cpu"
        self._is_source = dist.get_rank(group) == 0
        self._syncs = 0
        self._under_way: dist.Work | None = None
        self._told: torch.Tensor | None = None
        """The flags of all ranks that have come, and have not been acted on."""
        self._times_flagged: Counter[str] = Counter()
        self._looked_at: list[object] = []
        self._held: dict[str, Held] = {}
        self._planned: dict[str, Spec] = {}
        self._seen: dict[str, Seen] = {}
        self._digests: dict[str, int] = {}
        self._look(module)
        self._names = list(self._held)
        self._plan({})
        self._remember(self._watched)
        self._digests = _digests(self._watched)

    def after_forward(self, module: nn.Module) -> None:
        """Send rank zero's values of the buffers that changed on any rank. Collective."""
        self._syncs += 1
        if not self._names and self._syncs % LOOK_AGAIN != 1:
            return
        self._look(module)
        self._settle()
        self._send()
        if self._syncs <= SETTLING:
            self._after_backward()

    def end_with_backward_of(self, output: Any) -> None:
        """Put in place what is under way at the end of the backward that begins at ``output``.

        At once, where there can be none.
        """
        if self._under_way is None:
            return
        outputs = tensors_with_backward(output) if torch.is_grad_enabled() else []
        if not outputs:
            self._after_backward()
        for tensor in outputs:
            tensor.register_hook(self._on_begin)  # type: ignore[no-untyped-call]

    def _on_begin(self, _: torch.Tensor) -> None:
        at_end_of_backward(self._after_backward)

    def finish(self) -> None:
        """Put in place what is under way. Waits for it, but is no collective."""
        work, self._under_way = self._under_way, None
        if work is not None:
            work.wait()
            self._put_in_place()

    def _after_backward(self) -> None:
        self.finish()
        if not self._reads_late:
            self._settle()

    @_outside_autograd()
    def _send(self) -> None:
        message = self._message
        message.fill(self._flags(), self._fitting if self._is_source else {})
        self._under_way = dist.all_reduce(
            message.bytes, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        self._seen.clear()
        self._remember(self._watched)

    @_outside_autograd()
    def _put_in_place(self) -> None:
        fitting = self._fitting
        self._told = self._message.flags.clone()
        if not self._reads_late and any(flags := self._told.tolist()):
            flagged = self._flagged(flags)
            fitting = {name: held for name, held in fitting.items() if name not in flagged}
        self._receive(self._message, fitting)

    @property
    def _reads_late(self) -> bool:
        """Whether flags are read at the next sync, when the device has long computed them."""
        return self._waits_for_device and self._syncs > SETTLING

    def _flagged(self, flags: Sequence[int]) -> list[str]:
        return [name for name, flag in zip(self._names, flags[1:], strict=True) if flag]

    @_outside_autograd()
    def _settle(self) -> None:
        """Send what was flagged, and decide what every later message holds. Collective."""
        told, self._told = self._told, None
        if told is None or not any(flags := told.tolist()):
            return
        flagged = self._flagged(flags)
        if flags[0]:
            self._agree(dict.fromkeys(self._held, "registered"))
            flagged = [n for n in self._held if n in flagged or n not in self._names]
            self._names = list(self._held)
        extra = {name: self._held[name] for name in flagged if name in self._held}
        specs = {name: held.spec for name, held in extra.items()}
        self._agree({n: _told(specs[n]) if n in specs else "missing" for n in flagged})
        message = Message(0, specs, self._device)
        message.fill([], extra if self._is_source else {})
        dist.all_reduce(message.bytes, dist.ReduceOp.MAX, group=self._group)
        self._receive(message, extra)
        self._times_flagged.update(flagged)
        self._plan(specs)
        self._remember(extra)
        self._digests.update(_digests(extra))

    def _receive(self, message: Message, held: Mapping[str, Held]) -> None:
        if not self._is_source and message.deliver(held):
            self._looked_at = []  # other tensors are registered now

    def _agree(self, facts: Mapping[str, str]) -> None:
        require_same_facts(
            Call.of("a training forward", self._group),
            facts,
            what="After a training forward the model's buffers are not alike on all ranks:",
            instead="Keep what belongs to one rank (a cache) in a plain attribute instead of a "
            "buffer, or wrap with sync_buffers=False.",
        )

    def _look(self, module: nn.Module) -> None:
        """Take stock of the module's buffers, unless they are those of the last time.

        What was looked at is kept alive by what is held, so that an ``id`` is not used again.
        """
        looked_at: list[object] = []
        for owner in module.modules():
            for tensor in own_buffers(owner).values():
                looked_at += (id(owner), id(tensor), None if tensor is None else tensor.shape)
        if looked_at == self._looked_at:
            return
        self._looked_at = looked_at
        self._held = {}
        by_id: dict[int, Held] = {}
        for path, owner in module.named_modules():
            for key, tensor in own_buffers(owner).items():
                name = f"{path}.{key}" if path else key
                if tensor is None or name in self._ignored:
                    continue
                if id(tensor) in by_id:
                    by_id[id(tensor)].places.append((owner, key))
                else:
                    self._held[name] = by_id[id(tensor)] = Held(tensor, [(owner, key)])
        self._fit()

    def _plan(self, agreed: Mapping[str, Spec]) -> None:
        """Decide what every message holds from now on: what was flagged at least twice.

        Only what all ranks have agreed on counts: this rank's buffers may be others by now.
        """
        again = {name: spec for name, spec in agreed.items() if self._times_flagged[name] > 1}
        planned = self._planned | again
        self._planned = {name: planned[name] for name in self._names if name in planned}
        self._message = Message(len(self._names) + 1, self._planned, self._device)
        self._fit()

    def _fit(self) -> None:
        """Divide the buffers into those that fit the plan and those that are watched."""
        self._fitting = {
            name: self._held[name]
            for name, spec in self._planned.items()
            if name in self._held and self._held[name].spec == spec
        }
        self._watched = {n: held for n, held in self._held.items() if n not in self._planned}

    def _flags(self) -> list[int]:
        """Return a flag for another set of buffers, then one for each buffer to be sent extra."""
        changed = self._changed() if self._watched else set()
        if len(self._fitting) < len(self._planned):
            changed |= self._planned.keys() - self._fitting.keys()
        flags = [int(name in changed) for name in self._names] if changed else []
        return [int(list(self._held) != self._names), *flags]

    def _changed(self) -> set[str]:
        """Return which of the watched buffers may have changed since the last sync.

        Batch norm updates its statistics behind the version counter's back, but counts its
        batches in front of it: where one buffer of such a layer changed, all of them did.
        """
        changed: set[str] = set()
        layers: set[nn.Module] = set()
        for name, held in self._watched.items():
            tensor, version = self._seen.get(name, (None, 0))
            if held.tensor is not tensor or version_of(tensor) != version:
                changed.add(name)
                layers.update(owner for owner, _ in held.places if isinstance(owner, RUNNING_STATS))
        if self._compares_bits:
            now = _digests(self._watched)
            changed |= {name for name in now if now[name] != self._digests.get(name, now[name])}
        if layers:
            for name, held in self._watched.items():
                if any(owner in layers for owner, _ in held.places):
                    changed.add(name)
        return changed

    @property
    def _compares_bits(self) -> bool:
        """Whether to look for changes that nobody counts: through ``.data`` or NumPy.

        Layers of somebody's own make them too: ``F.batch_norm`` does not count what it changes.
        """
        often = self._syncs <= SETTLING or settings.DEBUG.get()
        return often or self._syncs % LOOK_AGAIN == 0

    def _remember(self, sent: Iterable[str]) -> None:
        for name in sent:
            tensor = self._held[name].tensor
            self._seen[name] = (tensor, version_of(tensor))


class Message:
    """Flags and buffers laid out in one tensor of bytes, the same way on every rank."""

    def __init__(self, flags: int, specs: Mapping[str, Spec], device: torch.device) -> None:
        places = {}
        end = _aligned(flags)
        for name, (shape, dtype) in specs.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            places[name] = (end, end + size)
            end = _aligned(end + size)
        self.bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self.flags = self.bytes[:flags]
        self.parts = {
            name: self.bytes[start:stop].view(specs[name][1]).view(specs[name][0])
            for name, (start, stop) in places.items()
        }

    def fill(self, flags: Sequence[int], held: Mapping[str, Held]) -> None:
        """Write this rank's flags, and the buffers that it has to tell of; zero elsewhere."""
        self.bytes.zero_()
        if any(flags):
            told = torch.tensor(flags, dtype=torch.uint8)
            self.flags[: len(flags)].copy_(told, non_blocking=True)
        copy_all([self.parts[name] for name in held], [h.tensor for h in held.values()])

    def deliver(self, held: Mapping[str, Held]) -> bool:
        """Write what was received into the buffers; return whether any was replaced."""
        overwritten = {name: h for name, h in held.items() if h.may_be_overwritten}
        # Through .data: what autograd has saved keeps its version, since no backward reads it.
        targets = [h.tensor.data for h in overwritten.values()]
        copy_all(targets, [self.parts[name] for name in overwritten])
        for name, h in held.items():
            if name not in overwritten:
                h.replace(self.parts[name])
        return len(overwritten) < len(held)


def _digests(held: Mapping[str, Held]) -> dict[str, int]:
    readable = {name: h.tensor for name, h in held.items() if is_readable(h.tensor)}
    return dict(zip(readable, digests(list(readable.values())), strict=True))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _told(spec: Spec) -> str:
    shape, dtype = spec
    return f"{str(dtype).removeprefix('torch.')} {shape}"
