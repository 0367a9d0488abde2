"""Which buffers did a training forward change, and how do all ranks get the same ones?

Rank zero's values win, as in torch. Unlike torch, which sends all buffers BEFORE every forward,
they are sent AFTER a training forward, and only those that changed: from then on every rank may
evaluate or save the same model, alone, at any time.

One ``all_reduce`` per step does it. Its message holds a flag for each buffer and the bytes of
those that are known to change; all ranks but zero contribute zero bytes, so that the maximum is
rank zero's value, bit by bit, and a flag that any rank raised. A buffer that was flagged is
sent at once in a message of its own, and from the second time on with all others: what every
rank sends is decided by the flags that all have seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddp_utils.agree.facts import require_same_facts
from ddp_utils.ground._torch_private import copy_all, own_buffers, version_of
from ddp_utils.talk.exchange import Call

__all__ = ["BufferSync"]

ALIGNMENT = 16
"""Bytes: every dtype may start at a multiple of it."""
SETTLING = 3
"""In the first syncs the flags are looked at immediately, also on an accelerator."""
RESCAN = 100
"""A model without buffers is looked through again after so many syncs."""
RUNNING_STATS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass
class Held:
    """One buffer of the model, and every place where it is registered."""

    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]]

    @property
    def spec(self) -> Spec:
        return tuple(self.tensor.shape), self.tensor.dtype

    def receive(self, value: torch.Tensor) -> None:
        """Put another value in the buffer's place.

        The forward may have saved the buffer for its backward, which must see the old value: so
        a new tensor is registered. Overwriting would give a wrong gradient, or torch's error.
        """
        self.tensor = torch.empty_like(self.tensor).copy_(value)
        for owner, key in self.places:
            setattr(owner, key, self.tensor)

    def holds_running_stats(self) -> bool:
        """Whether no backward of a training forward reads the buffer, so it may be overwritten."""
        return all(isinstance(owner, RUNNING_STATS) for owner, _ in self.places)


Spec = tuple[tuple[int, ...], torch.dtype]
Seen = tuple[torch.Tensor, int]


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
        held = self._held(module)
        self._names = list(held)
        self._planned: dict[str, Spec] = {}
        self._times_flagged: Counter[str] = Counter()
        self._message = Message(len(self._names) + 1, self._planned, device)
        self._syncs = 0
        self._late: torch.Tensor | None = None
        self._seen: dict[str, Seen] = {}
        self._remember(held)

    def after_forward(self, module: nn.Module) -> None:
        """Give every rank rank zero's values of the buffers that changed on any. Collective."""
        self._syncs += 1
        if not self._names and self._syncs % RESCAN != 1:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._sync(self._held(module))

    def _sync(self, held: dict[str, Held]) -> None:
        if self._late is not None:
            self._settle(self._late.tolist(), held)
            self._late = None
        message = self._message
        message.fill(self._flags(held), held if self._is_source else {})
        dist.all_reduce(message.bytes, dist.ReduceOp.MAX, group=self._group)
        flags: list[int] = []
        if self._waits_for_device and self._syncs > SETTLING:
            self._late = message.flags.clone()  # read when the device has long computed them
        else:
            flags = message.flags.tolist()
        if not self._is_source:
            flagged = {name for name, flag in zip(self._names, flags[1:], strict=False) if flag}
            message.deliver({name: h for name, h in held.items() if name not in flagged})
        if any(flags):
            self._settle(flags, held)
        self._remember(held)

    def _settle(self, flags: Sequence[int], held: dict[str, Held]) -> None:
        """Send what was flagged, and decide what every later message holds."""
        if not any(flags):
            return
        flagged = [name for name, flag in zip(self._names, flags[1:], strict=True) if flag]
        if flags[0]:
            self._agree(dict.fromkeys(held, "registered"))
            flagged = [n for n in held if n in flagged or n not in self._names]
            self._names = list(held)
        self._agree({n: _told(held[n].spec) if n in held else "missing" for n in flagged})
        flagged = [name for name in flagged if name in held]
        extra = Message(0, {name: held[name].spec for name in flagged}, self._device)
        extra.fill([], held if self._is_source else {})
        dist.all_reduce(extra.bytes, dist.ReduceOp.MAX, group=self._group)
        if not self._is_source:
            extra.deliver(held)
        self._remember({name: held[name] for name in flagged})
        self._times_flagged.update(flagged)
        self._planned = {
            name: held[name].spec
            for name in self._names
            if name in self._planned or self._times_flagged[name] > 1
        }
        self._message = Message(len(self._names) + 1, self._planned, self._device)

    def _agree(self, facts: Mapping[str, str]) -> None:
        require_same_facts(
            Call.of("a training forward", self._group),
            facts,
            what="After a training forward the model's buffers are not alike on all ranks:",
            instead="Keep what belongs to one rank (a cache) in a plain attribute instead of a "
            "buffer, or wrap with sync_buffers=False.",
        )

    def _flags(self, held: Mapping[str, Held]) -> list[int]:
        """Return a flag for another set of buffers, then one for each buffer to be sent extra."""
        changed = self._changed(held)
        flags = [int(list(held) != self._names)]
        for name in self._names:
            if name in self._planned:
                flags.append(int(name not in held or held[name].spec != self._planned[name]))
            else:
                flags.append(int(name in changed))
        return flags

    def _changed(self, held: Mapping[str, Held]) -> set[str]:
        """Return the names of the buffers that may have changed since the last sync.

        Batch norm updates its statistics behind the version counter's back, but counts its
        batches in front of it: where one buffer of such a layer changed, all of them did.
        """
        changed: set[str] = set()
        layers: set[nn.Module] = set()
        for name, h in held.items():
            tensor, version = self._seen.get(name, (None, 0))
            if h.tensor is not tensor or version_of(tensor) != version:
                changed.add(name)
                layers.update(owner for owner, _ in h.places if isinstance(owner, RUNNING_STATS))
        if layers:
            changed.update(n for n, h in held.items() if any(o in layers for o, _ in h.places))
        return changed

    def _held(self, module: nn.Module) -> dict[str, Held]:
        held: dict[str, Held] = {}
        by_id: dict[int, Held] = {}
        for path, owner in module.named_modules():
            for key, tensor in own_buffers(owner).items():
                name = f"{path}.{key}" if path else key
                if tensor is None or name in self._ignored:
                    continue
                if id(tensor) in by_id:
                    by_id[id(tensor)].places.append((owner, key))
                else:
                    held[name] = by_id[id(tensor)] = Held(tensor, [(owner, key)])
        return held

    def _remember(self, held: Mapping[str, Held]) -> None:
        self._seen.update({name: (h.tensor, version_of(h.tensor)) for name, h in held.items()})


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
            self.flags.copy_(torch.tensor(flags, dtype=torch.uint8), non_blocking=True)
        known = self._known(held)
        copy_all([self.parts[name] for name in known], [held[name].tensor for name in known])

    def deliver(self, held: Mapping[str, Held]) -> None:
        """Write what was received into the buffers."""
        known = self._known(held)
        in_place = [name for name in known if held[name].holds_running_stats()]
        # Through .data: what autograd has saved keeps its version, since no backward reads it.
        copy_all([held[n].tensor.data for n in in_place], [self.parts[n] for n in in_place])
        for name in known:
            if name not in in_place:
                held[name].receive(self.parts[name])

    def _known(self, held: Mapping[str, Held]) -> list[str]:
        return [
            name
            for name, part in self.parts.items()
            if name in held and held[name].spec == (tuple(part.shape), part.dtype)
        ]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _told(spec: Spec) -> str:
    shape, dtype = spec
    return f"{str(dtype).removeprefix('torch.')} {shape}"
