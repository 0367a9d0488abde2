"""How does a batch get to the rank's device, and a result back to NumPy?"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ddp_utils.ground.trees import map_leaves
from ddp_utils.world.world import get_device

T = TypeVar("T")

__all__ = ["to_device", "to_numpy"]


def to_device(tree: T, device: torch.device | str | None = None, *, non_blocking: bool = True) -> T:
    """Move every tensor and module in a nested batch to this rank's device.

    Args:
        tree: Any nesting of containers. Leaves with a ``.to`` method are moved, others kept.
        device: By default :func:`get_device`.
        non_blocking: Copy from pinned memory without waiting, as ``Tensor.to`` does.

    Returns:
        The same structure; containers are new, the input is untouched.

    Example:
        >>> batch = {"image": torch.zeros(2, 3), "name": ["a", "b"]}
        >>> to_device(batch, "cpu")["image"].shape
        torch.Size([2, 3])
    """
    target = get_device() if device is None else torch.device(device)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(target, non_blocking=non_blocking)
        return leaf.to(target) if callable(getattr(leaf, "to", None)) else leaf

    return move(tree) if callable(getattr(tree, "to", None)) else map_leaves(move, tree)  # type: ignore[no-any-return]


def to_numpy(tree: Any) -> Any:
    """Replace every tensor in a nested result by a NumPy array on the CPU, detached.

    bfloat16, which NumPy lacks, becomes float32.

    Example:
        >>> to_numpy({"loss": torch.ones(2, requires_grad=True)})
        {'loss': array([1., 1.], dtype=float32)}
    """

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).cpu().resolve_conj().numpy()

    return map_leaves(convert, tree)
