"""Has a tensor still the same bits, here and on other ranks?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["digests", "is_readable"]

CHUNK = 1 << 18
"""Elements that are looked at together, so that a large tensor needs little memory beside it."""
GAMMA = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 64-bit digest of each tensor's bits, after one wait for the device.

    Each element is mixed with its place by splitmix64 (Steele, Lea and Flood, 2014), and the
    results are added: integers wrap around, and their sum is the same in any order.

    >>> first, second, third = digests([torch.ones(2), torch.ones(2), torch.tensor([1.0, 2.0])])
    >>> first == second, first == third
    (True, False)
    """
    found = [_digest(tensor.detach()) for tensor in tensors]
    return [int(digest) % 2**64 for digest in found]


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bits are one block of numbers, sparse ones aside."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _digest(torch.stack([_digest(tensor.indices()), _digest(tensor.values())]))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().view(-1)
    flat = flat.view(INTEGER_OF_SIZE[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(flat), CHUNK):
        chunk = flat[start : start + CHUNK].to(torch.int64)
        mixed = torch.arange(start + 1, start + 1 + len(chunk), device=tensor.device)
        mixed.mul_(GAMMA).add_(chunk)
        for shift, factor in ROUNDS:
            mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)  # without the sign
            mixed *= factor
        total += mixed.sum()
    return total
