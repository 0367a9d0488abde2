"""How does any value travel as one run of bytes, its tensors beside the pickled rest?

A parcel is the length of the pickle (8 bytes), the pickle, and each tensor's bytes from the
next multiple of 16 on. Tensors are detached; those that lay on an accelerator arrive on the
receiver's own one.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from ddp_utils.world.world import get_device

__all__ = ["Parcel", "pack", "unpack"]

ALIGNED = 16


@dataclass(frozen=True)
class Parcel:
    """A value on its way."""

    pickled: bytes
    tensors: list[torch.Tensor]

    @property
    def size(self) -> int:
        """Length in bytes."""
        return _aligned(8 + len(self.pickled)) + sum(_aligned(t.nbytes) for t in self.tensors)

    @property
    def on_accelerator(self) -> bool:
        """Whether it holds tensors, and all of them are on an accelerator."""
        return bool(self.tensors) and all(t.device.type != "cpu" for t in self.tensors)

    def lay_out(self, device: torch.device) -> torch.Tensor:
        """Return the bytes as a ``uint8`` tensor of shape ``(size,)``."""
        laid = torch.zeros(self.size, dtype=torch.uint8, device=device)
        head = len(self.pickled).to_bytes(8, "little") + self.pickled
        laid[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)
        start = _aligned(len(head))
        for tensor in self.tensors:
            laid[start : start + tensor.nbytes] = _bytes_of(tensor).to(device)
            start += _aligned(tensor.nbytes)
        return laid


def pack(value: Any) -> Parcel:
    """Return a value as a parcel.

    Raises:
        Exception: whatever pickling raises; most often ``TypeError``, ``AttributeError`` or
            ``pickle.PicklingError``.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return Parcel(buffer.getvalue(), pickler.tensors)


def unpack(laid: torch.Tensor) -> Any:
    """Return the value of a parcel that was laid out; its tensors are new."""
    length = int.from_bytes(bytes(laid[:8].cpu().numpy()), "little")
    head = 8 + length
    return _Unpickler(laid[8:head].cpu().numpy(), laid[_aligned(head) :]).load()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Leaves dense tensors out of the pickle, and keeps them in ``tensors``."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._end = 0

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return None
        if obj.is_meta or obj.is_quantized:
            return None
        tensor = obj.detach().resolve_conj().resolve_neg().contiguous()
        start, self._end = self._end, self._end + _aligned(tensor.nbytes)
        self.tensors.append(tensor)
        return start, tensor.nbytes, tensor.dtype, tensor.shape, tensor.device.type != "cpu"


class _Unpickler(pickle.Unpickler):
    """Takes the tensors from the bytes behind the pickle."""

    def __init__(self, pickled: Any, tensors: torch.Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, pid: tuple[Any, ...]) -> torch.Tensor:
        start, nbytes, dtype, shape, on_accelerator = pid
        device = get_device() if on_accelerator else torch.device("cpu")
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if nbytes:
            _bytes_of(tensor).copy_(self._tensors[start : start + nbytes])
        return tensor
