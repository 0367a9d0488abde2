"""How does what rank zero has read get to the other ranks, one tensor at a time?

First the tree with empty tensors in it, then the tensors' bytes in pieces, so that no rank ever
holds more than its own result and one piece.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddp_utils.ground.trees import leaves_with_paths, map_leaves
from ddp_utils.talk.circle import circle_of, road_for
from ddp_utils.world.world import get_device

__all__ = ["describe", "receive", "send"]

PIECE = 64 * 2**20


def describe(tree: Any) -> bytes:
    """Return a tree as bytes, with every tensor's kind and shape, and none of its numbers.

    Raises:
        TypeError: a tensor that is not a plain block of memory (sparse, quantized).
    """
    for path, leaf in leaves_with_paths(tree):
        if isinstance(leaf, torch.Tensor) and (
            leaf.layout is not torch.strided or leaf.is_quantized
        ):
            raise TypeError(
                f"{path} is a sparse or quantized tensor, which rank zero cannot send: load with "
                "broadcast=False"
            )
    on_device = [tensor.device.type != "cpu" for tensor in _tensors(tree)]
    empty = map_leaves(
        lambda x: torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x, tree
    )
    buffer = io.BytesIO()
    torch.save({"tree": empty, "on_device": on_device}, buffer)
    return buffer.getvalue()


def send(tree: Any, description: bytes, agree: Callable[[], None]) -> None:
    """Send a tree from rank zero; the others call :func:`receive`. A collective.

    ``agree`` comes back when all ranks have a place for every tensor, and raises if one has not.
    """
    _broadcast(torch.frombuffer(bytearray(description), dtype=torch.uint8))
    agree()
    for tensor in _tensors(tree):
        _broadcast(tensor.detach().contiguous())


def receive(size: int, weights_only: bool, agree: Callable[[], None]) -> Any:
    """Return the tree that rank zero sends, whose description has so many bytes. A collective.

    Tensors that rank zero has on an accelerator come to this rank's own.
    """
    description = torch.empty(size, dtype=torch.uint8, device="cpu")
    _broadcast(description)
    described = torch.load(io.BytesIO(description.numpy().tobytes()), weights_only=weights_only)
    on_device = iter(described["on_device"])

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device = get_device() if next(on_device) else torch.device("cpu")
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

    tree = map_leaves(place, described["tree"])
    agree()  # what may fail on one rank lies behind us: now all of them send and receive
    for tensor in _tensors(tree):
        _broadcast(tensor)
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for _, leaf in leaves_with_paths(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _broadcast(tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor on every rank with rank zero's numbers, as bytes."""
    road = road_for(circle_of(None, "load_checkpoint"))
    for piece in torch.split(tensor.reshape(-1).view(torch.uint8), PIECE):
        if piece.numel():
            travelling = piece.to(road)
            dist.broadcast(travelling, 0)
            if travelling is not piece:
                piece.copy_(travelling)
