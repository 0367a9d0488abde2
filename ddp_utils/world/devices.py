"""Which device does a rank use?

One pure decision, :func:`choose_device`, over facts that the other functions here collect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ddp_utils.ground.errors import LauncherError

__all__ = [
    "accelerator_type",
    "backend_for",
    "choose_device",
    "has_devices_of_its_own",
    "identity",
    "idle_devices",
    "shown_too_late",
    "show_only",
    "visible_devices",
]

VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)
"""The variables by which the runtimes of accelerators are told what to show."""


def choose_device(
    local_rank: int,
    local_world_size: int,
    *,
    device_type: str,
    visible: int,
    bound: bool = False,
    oversubscribe: bool = False,
) -> torch.device:
    """Return the device of the rank ``local_rank`` among ``visible`` devices of a type.

    The index counts within what is VISIBLE to this process, never within the machine: with
    ``CUDA_VISIBLE_DEVICES=4,5`` local rank 1 uses index 1. With ``bound`` the launcher may show
    each task devices of its own (``--gpus-per-task=1``): one alone is index 0 for every rank.

    Raises:
        LauncherError: more ranks than visible devices, and neither ``bound`` nor
            ``oversubscribe``. Every rank of the machine raises it.

    >>> choose_device(1, 2, device_type="cuda", visible=2)
    device(type='cuda', index=1)
    >>> choose_device(3, 4, device_type="cuda", visible=1, bound=True)
    device(type='cuda', index=0)
    >>> choose_device(3, 4, device_type="cpu", visible=0)
    device(type='cpu')
    """
    if device_type == "cpu" or visible == 0:
        return torch.device("cpu")
    if local_world_size <= visible or bound or oversubscribe:
        return torch.device(device_type, local_rank % visible)
    raise LauncherError(
        f"{local_world_size} ranks on this machine and {visible} visible {device_type} "
        f"device{'s' if visible > 1 else ''}: local rank {local_rank} would share one. Start at "
        f"most {visible} ranks here, or set DDP_UTILS_OVERSUBSCRIBE=1 to let ranks share devices."
    )


def has_devices_of_its_own(launcher: str, local_rank: int, environ: Mapping[str, str]) -> bool:
    """Whether the devices that this rank sees may be other ones than its neighbours see.

    Slurm and MPI start each task with an environment of its own, so that one visible device may
    be bound to it; whether two tasks were given the same one shows when they meet. Under
    torchrun all ranks see the same, but for a script that has narrowed it to its local rank.

    >>> has_devices_of_its_own("slurm", 3, {"CUDA_VISIBLE_DEVICES": "0"})
    True
    >>> has_devices_of_its_own("torchrun", 3, {"CUDA_VISIBLE_DEVICES": "0"})
    False
    """
    if launcher in ("slurm", "mpi"):
        return True
    return any(environ.get(name) == str(local_rank) for name in VISIBLE)


def idle_devices(launcher: str, local_world_size: int, visible: int) -> str | None:
    """Return a warning where Slurm or MPI started fewer ranks on a machine than it has devices.

    >>> idle_devices("slurm", 4, 4)
    """
    if launcher not in ("slurm", "mpi") or local_world_size >= visible:
        return None
    option = "--ntasks-per-node" if launcher == "slurm" else "--npernode"
    return (
        f"{local_world_size} rank{'s' if local_world_size > 1 else ''} on this machine, and "
        f"{visible} devices visible to each: the others stay idle. For a rank on each device "
        f"start with {option}={visible}, or start torchrun once on each machine."
    )


def shown_too_late(visible: int, environ: Mapping[str, str]) -> str | None:
    """Return a warning where a variable that hides devices was set after they had been counted.

    >>> shown_too_late(2, {"CUDA_VISIBLE_DEVICES": "4,5"})
    """
    for name in VISIBLE[:3]:
        chosen = environ.get(name, "").split(",")
        if environ.get(name) and len(set(chosen)) < visible:
            return (
                f"{name}={environ[name]} names {len(set(chosen))} and {visible} devices are "
                "visible: it was set after the first use of a device, which is too late. Set it "
                "before the start, or give distributed_main its devices= argument."
            )
    return None


def identity(device: torch.device) -> str | None:
    """Return what tells a device from all others of the job, None where that is unknown."""
    if device.type != "cuda":
        return None
    return f"{device.type} {torch.cuda.get_device_properties(device).uuid}"


def show_only(
    chosen: Sequence[int], device_type: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make only the visible devices of these numbers visible.

    The numbers count within what is visible now, as everywhere in torch.

    >>> show_only([1, 3], "cuda", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    {'CUDA_VISIBLE_DEVICES': '5,7'}
    """
    if device_type != "cuda":
        raise ValueError(
            f"devices={list(chosen)}: choosing devices works for CUDA, and here is {device_type}; "
            "leave devices out, and set nproc"
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    known = [name.strip() for name in visible] if visible != [""] else None
    wrong = [i for i in chosen if i < 0 or (known is not None and i >= len(known))]
    if wrong or len(set(chosen)) < len(chosen) or not chosen:
        raise ValueError(
            f"devices={list(chosen)}: give each rank its own index within the visible devices"
            + (f", which are CUDA_VISIBLE_DEVICES={','.join(known)}" if known else "")
        )
    names = [str(i) if known is None else known[i] for i in chosen]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


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
