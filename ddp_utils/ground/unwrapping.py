"""Which module does a wrapper hold, and what is inside all of them?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddp_utils.ground._torch_private import compiled_module_type

__all__ = ["uncompiled", "unwrap", "wrapper_layers"]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside any nesting of wrappers, or the model itself.

    Known wrappers: ``DistributedDataParallel``, ``DataParallel``, what ``torch.compile`` returns,
    and ``AveragedModel`` (whose inner model holds the averaged weights). Never communicates.

    Example:
        >>> from torch import nn
        >>> net = nn.Linear(2, 1)
        >>> unwrap(nn.DataParallel(net)) is net, unwrap(net) is net
        (True, True)
    """
    *_, bare = wrapper_layers(model)
    return bare


def wrapper_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the wrappers from the outermost to the innermost, and last the bare model."""
    while True:
        yield model
        if isinstance(model, (DistributedDataParallel, DataParallel, AveragedModel)):
            inner = model.module
        elif isinstance(model, compiled_module_type()):
            inner = model._orig_mod
        else:
            return
        assert isinstance(inner, nn.Module)
        model = inner


def uncompiled(model: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` was given, where the model is what it returned.

    That object passes attributes on by itself, but also has some of its own that are nobody
    else's business.
    """
    return next(m for m in wrapper_layers(model) if not isinstance(m, compiled_module_type()))
