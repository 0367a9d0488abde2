"""Which device does a rank use?

One pure decision, :func:`choose_device`, over facts that the other functions here collect.
"""

from __future__ import annotations

import torch

from ddp_utils.ground.errors import LauncherError

__all__ = ["accelerator_type", "backend_for", "choose_device", "visible_devices"]


def choose_device(
    local_rank: int,
    local_world_size: int,
    *,
    device_type: str,
    visible: int,
    oversubscribe: bool = False,
) -> torch.device:
    """Return the device of the rank ``local_rank`` among ``visible`` devices of a type.

    The index counts within what is VISIBLE to this process, never within the machine: with
    ``CUDA_VISIBLE_DEVICES=4,5`` local rank 1 uses index 1. Where the launcher shows each task
    one device of its own (``--gpus-per-task=1``), that is index 0 for every rank.

    Raises:
        LauncherError: more ranks than visible devices, and ``oversubscribe`` is not set.

    >>> choose_device(1, 2, device_type="cuda", visible=2)
    device(type='cuda', index=1)
    >>> choose_device(3, 4, device_type="cuda", visible=1)
    device(type='cuda', index=0)
    >>> choose_device(3, 4, device_type="cpu", visible=0)
    device(type='cpu')
    """
    if device_type == "cpu" or visible == 0:
        return torch.device("cpu")
    if local_rank < visible:
        return torch.device(device_type, local_rank)
    if visible == 1:
        return torch.device(device_type, 0)
    if oversubscribe:
        return torch.device(device_type, local_rank % visible)
    raise LauncherError(
        f"local rank {local_rank} of {local_world_size} has no device of its own: "
        f"{visible} {device_type} devices are visible to it. Start at most {visible} ranks here, "
        "or set DDP_UTILS_OVERSUBSCRIBE=1 to let ranks share devices."
    )


def accelerator_type() -> str:
    """Return the type of accelerator that is visible here (``"cuda"``), else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or visible_devices(accelerator.type) == 0:
        return "cpu"
    return accelerator.type


def visible_devices(device_type: str) -> int:
    """Return how many devices of a type are visible, where possible without a context.

    ``torch.cuda.device_count`` asks NVML, which neither makes a context nor spoils a later
    fork; the generic count is for the others.
    """
    if device_type == "cpu":
        return 0
    if device_type == "cuda":
        return torch.cuda.device_count()
    return int(torch.accelerator.device_count())


def backend_for(device_type: str) -> str:
    """Return the backend for ranks on such devices: gloo for the CPU, beside the device's own.

    >>> backend_for("cpu"), backend_for("cuda")
    ('gloo', 'cpu:gloo,cuda:nccl')
    """
    if device_type == "cpu":
        return "gloo"
    own = torch.distributed.Backend.default_device_backend_map.get(device_type)
    if own is None:
        raise ValueError(
            f"torch names no communication backend for {device_type!r} devices; "
            'pass one, such as backend="gloo"'
        )
    return f"cpu:gloo,{device_type}:{own}"
