"""Are the model and the step count still the same on all ranks?"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from numbers import Integral

import torch
import torch.distributed as dist
from torch import nn

from ddp_utils.agree.facts import require_same_facts
from ddp_utils.ground.bits import digests
from ddp_utils.ground.unwrapping import unwrap, wrapper_layers
from ddp_utils.talk.exchange import Call

__all__ = ["check_equal_steps", "check_in_sync"]


def check_in_sync(model: nn.Module) -> None:
    """Raise on every rank unless all of them hold the same model and the same gradients.

    Compares every parameter, buffer and gradient bit by bit, through a digest of each. Worth a
    call after the first backward, and whenever something looks odd; it reads the whole model.
    Collective.

    Args:
        model: The model, in any nesting of wrappers or none. The ranks that are compared are
            those of the group that it was wrapped with.

    Raises:
        RanksDisagreeError: The same on every rank; names what differs, and on which ranks a
            parameter has no gradient.

    Warns:
        RuntimeWarning: Some parameters that are trained have no gradient on any rank, while
            others have one.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> net(torch.zeros(3, 4)).sum().backward()
        >>> check_in_sync(net)
    """
    groups = [getattr(layer, "process_group", None) for layer in list(wrapper_layers(model))[:-1]]
    call = Call.of("check_in_sync", next((group for group in groups if group is not None), None))
    bare = unwrap(model)
    with call.preparing():
        facts = _facts(bare)
    require_same_facts(
        call,
        facts,
        what="check_in_sync: the model is not the same on all ranks:",
        instead="Gradients are averaged only if the forward goes through the wrapped model, both "
        "forward and backward are inside accumulate() or no_sync(), every trained parameter takes "
        "part in the loss, and no parameter is replaced or unfrozen after wrap_ddp.",
    )
    _warn_of_missing_gradients(bare)


def check_equal_steps(n: int, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank unless all of them will take the same number of steps.

    Before an epoch, with ``len(loader)``: a rank with fewer batches would leave the others
    waiting in its last steps. Collective.

    Args:
        n: This rank's number of steps.
        group: The ranks to compare; all of them by default.

    Raises:
        RanksDisagreeError: The same on every rank; says which rank has how many.
        TypeError: ``n`` is not an integer; the other ranks get a ``RanksDisagreeError``.

    Example:
        >>> check_equal_steps(len([1, 2, 3]))
    """
    call = Call.of("check_equal_steps", group)
    with call.preparing():
        number: object = n
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise TypeError(f"check_equal_steps takes a number of steps, not {n!r}")
    require_same_facts(
        call,
        {"steps": str(n)},
        what="check_equal_steps: the ranks have different numbers of steps:",
        instead="Pad or cut the data to equal shares (make_loader(..., pad=True) or "
        "drop_last=True), or train inside model.join().",
    )


def _facts(model: nn.Module) -> dict[str, str]:
    tensors: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter
        tensors[f"gradient of {name}"] = parameter.grad
    tensors.update(model.named_buffers())
    present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    told = dict(zip(present, _told(present.values()), strict=True))
    return {name: told.get(name, "none") for name in tensors}


def _told(tensors: Collection[torch.Tensor]) -> Iterator[str]:
    """Yield for each tensor a text that is the same only for the same bits."""
    for tensor, digest in zip(tensors, digests(list(tensors)), strict=True):
        yield f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} #{digest:016x}"


def _warn_of_missing_gradients(model: nn.Module) -> None:
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    without = [name for name, grad in trained if grad is None]
    if without and len(without) < len(trained):
        warnings.warn(
            f"check_in_sync: no rank has a gradient for {', '.join(map(repr, without))}",
            RuntimeWarning,
            stacklevel=3,
        )
