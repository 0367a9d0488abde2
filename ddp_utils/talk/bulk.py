"""How do the numbers of a large tree become one tensor that ``all_reduce`` reduces exactly?

Pure functions; all tensors lie on one device. For a sum each int is two float64 halves of 32
bits, whose sums are exact over two million ranks, beside the floats. For a minimum or maximum a
float64 is an int64 of the same order, beside the ints. So either is one tensor of one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ddp_utils.talk.packing import TOO_LARGE, Leaf, Operation, result_dtype

__all__ = ["decode", "encode", "rebuild_bulk_leaf", "to_flat"]

F64 = torch.float64
NUMPY = {F64: np.float64, torch.int64: np.int64}
LOW = 2**32 - 1
LARGEST = 2**63 - 1
SIGN_TO_ORDER = LARGEST
"""Flips all bits but the sign, and so turns the order of negative floats around."""


def to_flat(operation: Operation, value: Any, leaf: Leaf) -> torch.Tensor:
    """Return a leaf's numbers as one dimension of float64 or int64; for a mean all as floats.

    Raises:
        OverflowError: An int does not fit in 64 bits.
    """
    dtype = F64 if operation == "mean" or leaf.kind == "float" else torch.int64
    if leaf.form != "tensor":
        own = np.uint64 if str(leaf.dtype) == "uint64" else NUMPY[dtype]
        try:
            value = torch.from_numpy(np.array(value, own))
        except OverflowError:
            raise OverflowError(TOO_LARGE) from None
    flat: torch.Tensor = value.detach().to(dtype).reshape(-1)
    if value.dtype is torch.uint64 and dtype is not F64 and bool((flat < 0).any()):
        raise OverflowError(TOO_LARGE)
    return flat


def encode(operation: Operation, parts: Sequence[torch.Tensor], weight: float = 1) -> torch.Tensor:
    """Return one tensor of the parts (float64 or int64, one dimension each) for ``all_reduce``.

    ``weight`` is this rank's in a mean; with weight zero it does not count, even with a NaN.
    """
    if operation == "mean":
        return torch.cat([part * weight if weight else torch.zeros_like(part) for part in parts])
    if operation == "sum":
        return torch.cat([half for part in parts for half in _halves(part)])
    return torch.cat([_in_order(operation, part) for part in parts])


def _halves(part: torch.Tensor) -> list[torch.Tensor]:
    if part.dtype is F64:
        return [part]
    return [(part >> 32).to(F64), (part & LOW).to(F64)]


def _in_order(operation: Operation, part: torch.Tensor) -> torch.Tensor:
    """Return int64 of the same order; NaN beyond all, so that it wins as in torch and NumPy."""
    if part.dtype is not F64:
        return part
    bits = part.view(torch.int64)
    ordered = bits ^ ((bits >> 63) & SIGN_TO_ORDER)
    return ordered.masked_fill(part.isnan(), LARGEST if operation == "max" else -LARGEST - 1)


def decode(
    operation: Operation, reduced: torch.Tensor, leaves: Sequence[Leaf]
) -> list[torch.Tensor]:
    """Cut what :func:`encode` made, after the reduction, into the leaves' numbers again.

    Ints of a sum come back as ``(high, low)`` halves in one tensor of shape ``(2, size)``, since
    their sum may leave the 64 bits.
    """
    parts = []
    end = 0
    for leaf in leaves:
        halved = operation == "sum" and leaf.kind != "float"
        start, end = end, end + leaf.size * (2 if halved else 1)
        part = reduced[start:end]
        if halved:
            part = part.to(torch.int64).reshape(2, leaf.size)
        elif leaf.kind == "float" and operation in ("min", "max"):
            part = (part ^ ((part >> 63) & SIGN_TO_ORDER)).view(F64)
        parts.append(part)
    return parts


def rebuild_bulk_leaf(operation: Operation, leaf: Leaf, part: torch.Tensor) -> Any:
    """Return reduced numbers in the form of a leaf; a tensor on the device of ``part``.

    Raises:
        OverflowError: A sum of ints leaves the 64 bits of the result's dtype.
    """
    if operation == "sum" and leaf.kind != "float":
        high, low = part
        if leaf.form == "python":
            return int(high) * 2**32 + int(low)
        part = _whole(high + (low >> 32), low & LOW)
    if leaf.form == "python":
        as_bool = leaf.kind == "bool" and operation in ("min", "max")
        return bool(part.item()) if as_bool else part.item()
    dtype = result_dtype(operation, leaf)
    if leaf.form == "tensor":
        return part.to(dtype, copy=True).reshape(leaf.shape)
    array = part.cpu().numpy().astype(dtype).reshape(leaf.shape)
    return array[()] if leaf.form == "scalar" else array


def _whole(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    if bool(((high < -(2**31)) | (high >= 2**31)).any()):
        raise OverflowError("reduces to an int that does not fit in int64")
    return (high << 32) | low
