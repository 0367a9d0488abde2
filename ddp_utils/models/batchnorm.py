"""Which batch-norm layers look at the samples of all ranks together?

``SyncBatchNorm`` needs an accelerator and a group. Where it cannot work the plain layer stays.
"""

from __future__ import annotations

from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["convert_sync_batchnorm", "revert_sync_batchnorm"]

M = TypeVar("M", bound=nn.Module)

PLAIN_CLASS = "_ddp_utils_plain_class"
"""Where a converted layer remembers the class that it had."""


class BatchNormOfAnyShape(nn.BatchNorm2d):
    """A batch-norm layer that takes inputs of any number of dimensions, as SyncBatchNorm does."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def convert_sync_batchnorm(model: M, group: dist.ProcessGroup | None = None) -> M:
    """Return the model with ``SyncBatchNorm`` layers that remember what they were."""
    # Also of a layer in two places, of which torch makes two.
    parts = model.named_modules(remove_duplicate=False)
    plain = {name: type(layer) for name, layer in parts if _is_plain(layer)}
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.SyncBatchNorm) and name in plain:
            setattr(layer, PLAIN_CLASS, plain[name])
    return model


def revert_sync_batchnorm(model: M) -> M:
    """Turn every ``SyncBatchNorm`` layer back into the plain one, for export or for one device.

    Parameters and buffers are the same objects as before, so optimizers and wrappers keep
    working. Layers that :func:`wrap_ddp` converted get their former class; of others it is not
    known, and they get a ``BatchNorm2d`` that takes inputs of any number of dimensions. Never
    communicates.

    Args:
        model: Changed in place; may be wrapped.

    Returns:
        The model; another object only where the model itself is a ``SyncBatchNorm`` layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
        >>> revert_sync_batchnorm(net)(torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    plain: dict[nn.Module, nn.Module] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, nn.SyncBatchNorm):
            plain[layer] = plain.get(layer) or _plain_layer(layer)
            parent, _, name = path.rpartition(".")
            if path:
                setattr(model.get_submodule(parent), name, plain[layer])
    return cast(M, plain.get(model, model))


def _is_plain(layer: nn.Module) -> bool:
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return isinstance(layer, plain) and not isinstance(layer, nn.SyncBatchNorm)


def _plain_layer(layer: nn.SyncBatchNorm) -> nn.Module:
    """Return the plain layer with this one's parameters, buffers, mode and other state."""
    kind = getattr(layer, PLAIN_CLASS, BatchNormOfAnyShape)
    plain: nn.Module = kind.__new__(kind)
    plain.__dict__.update(layer.__dict__)
    plain.__dict__.pop(PLAIN_CLASS, None)
    plain.__dict__.pop("process_group", None)
    return plain
