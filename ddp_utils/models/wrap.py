"""How does a model become one that trains on several ranks?"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_utils.world.world import get_device

__all__ = ["wrap_ddp", "wrap_dp"]

logger = logging.getLogger(__name__)


def wrap_ddp(model: nn.Module, **ddp_kwargs: Any) -> nn.Module:
    """Wrap a model so that its gradients are averaged over the ranks."""
    model = _moved(model)
    if not dist.is_initialized():
        logger.info("wrap_ddp: no process group, so the model stays as it is")
        return model
    if not any(p.requires_grad for p in model.parameters()):
        logger.info("wrap_ddp: the model has nothing to train, so it stays as it is")
        return model
    device = next(model.parameters()).device
    device_ids = None if device.type == "cpu" or _devices(model) > 1 else [device]
    return DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True, **ddp_kwargs
    )


def wrap_dp(model: nn.Module) -> nn.Module:
    """Wrap a model in ``DataParallel`` where at least two accelerators are visible."""
    if torch.cuda.device_count() < 2:
        return _moved(model)
    return nn.DataParallel(model.cuda())


def _devices(model: nn.Module) -> int:
    return len({p.device for p in model.parameters()})


def _moved(model: nn.Module) -> nn.Module:
    return model if _devices(model) > 1 else model.to(get_device())
