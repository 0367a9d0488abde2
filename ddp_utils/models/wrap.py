"""How does a model become one that trains on several ranks?"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ddp_utils.agree.facts import require_same_facts
from ddp_utils.agree.loggers import get_logger
from ddp_utils.ground.errors import DistributedError
from ddp_utils.models.batchnorm import convert_sync_batchnorm, revert_sync_batchnorm
from ddp_utils.models.comm_hooks import CommHook, check_hook_runs, checked_hook
from ddp_utils.models.gradient_watch import models_that_average
from ddp_utils.models.wrapper import WrappedModel
from ddp_utils.talk.exchange import Call
from ddp_utils.world.devices import accelerator_type, visible_devices
from ddp_utils.world.world import (
    SIMULATED,
    get_device,
    get_rank,
    get_world_size,
    is_distributed,
)

__all__ = ["wrap_ddp", "wrap_dp"]

M = TypeVar("M", bound=nn.Module)

_logger = get_logger("ddp_utils.models")


def wrap_ddp(
    model: M,
    *,
    sync_batchnorm: bool = False,
    sync_buffers: bool = True,
    comm_hook: CommHook = None,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    **ddp_kwargs: Any,
) -> M:
    """Wrap a model so that its gradients are averaged over the ranks in each backward.

    The model is moved to this rank's device, unless it already spans several devices; all ranks
    then have rank zero's weights and buffers. Collective, and so is every forward of the result
    in ``train()`` mode. A forward in ``eval()`` mode is not: any rank may evaluate alone.

    What comes back is a ``DistributedDataParallel``. Attributes that it does not have itself are
    read from the model, and written and deleted there where the model has that name. Buffers
    that a training forward changed are rank zero's on all ranks afterwards. In the first steps,
    and in all of them with ``DDP_UTILS_DEBUG=1``, a ``RuntimeWarning`` names the parameters whose
    gradients were not averaged. A synchronised backward that leaves a parameter without a
    gradient is an error on that rank, instead of the other ranks' wait for it.

    Args:
        model: Any module, also one that ``torch.compile`` returned.
        sync_batchnorm: Turn batch-norm layers into ``SyncBatchNorm`` where that can work (an
            accelerator and more than one rank); :func:`revert_sync_batchnorm` undoes it.
        sync_buffers: Whether buffers are kept the same on all ranks after the start. The one
            spelling of torch's ``broadcast_buffers`` and ``forward_sync_buffers``.
        comm_hook: How gradients travel: ``"fp16"`` or ``"bf16"`` (half the bytes),
            ``"post_local_sgd"`` (after 100 steps only inside each machine, or not at all with one
            machine: to be used with torch's ``PostLocalSGDOptimizer``), or a communication hook
            ``hook(state, bucket)``, whose state is the group, or ``hook(bucket)``.
        find_unused_parameters: The loss may leave parameters out.
        static_graph: Every step has the same graph.
        ddp_kwargs: Anything else that ``DistributedDataParallel`` takes. ``device_ids`` and
            ``output_device`` are left out where they do not apply, and gradients are views of
            the communication buckets unless ``gradient_as_bucket_view=False`` is given.

    Returns:
        The wrapped model, also in a group of one rank. Without a group, or if the model has
        nothing to train, the model itself, on its device. For a type checker it is of the
        model's type, whose attributes it has.

    Raises:
        RanksDisagreeError: On every rank, if the models or the arguments differ between ranks:
            names the parameters. Or another rank could not take part, and why.
        ValueError: The model or a part of it is wrapped already, or it has no place to be
            (meta tensors, several kinds of devices), or the backend cannot run the hook, or it
            shares a parameter with a wrapped model that keeps gradients in the other way.
        TypeError: ``model`` is no module.
        DistributedError: A launcher started several ranks, but there is no process group yet.

    Example:
        >>> net = wrap_ddp(nn.Linear(4, 2))  # in a started rank: a DistributedDataParallel
        >>> net(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """
    group = _group_of(ddp_kwargs)
    if not is_distributed() and SIMULATED.get() is not None:
        return _without_group(model)
    call = Call.of("wrap_ddp", group)
    with call.preparing():
        _check_model(model)
        checked_hook(comm_hook)
        _check_names(ddp_kwargs)
        model = _placed(model, ddp_kwargs)
        if not is_distributed():
            return _without_group(model)
        ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        _check_sharing(model, ddp_kwargs["gradient_as_bucket_view"])
        model = _with_batchnorm_that_works(model, sync_batchnorm, group)
        options = {
            "sync_batchnorm": sync_batchnorm,
            "sync_buffers": sync_buffers,
            "comm_hook": comm_hook if isinstance(comm_hook, str) else comm_hook is not None,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
        }
        facts = _facts(model, options | ddp_kwargs)
    require_same_facts(
        call,
        facts,
        what="wrap_ddp: the ranks do not wrap the same model in the same way:",
        instead="Build the model from the same code and configuration on every rank.",
    )
    return _wrapped(
        model,
        comm_hook=comm_hook,
        sync_buffers=sync_buffers,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        **ddp_kwargs,
    )


def wrap_dp(model: M) -> M:
    """Wrap a model in ``DataParallel``: one process, all visible devices, a thread for each.

    The batch size of the loader is then the TOTAL over the devices. With fewer than two devices
    the model itself comes back, on its device. Prefer :func:`wrap_ddp`, which is faster. Never
    communicates.

    Raises:
        DistributedError: There are several ranks already; each would use all devices.
        ValueError: The model or a part of it is wrapped already.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> unwrapped = getattr(wrap_dp(net), "module", net)  # a DataParallel on a 2-GPU machine
        >>> unwrapped is net
        True
    """
    _check_model(model, "wrap_dp")
    if get_world_size() > 1:
        raise DistributedError(
            f"rank {get_rank()}: wrap_dp is for one process, which uses all devices by itself; "
            f"with {get_world_size()} ranks use wrap_ddp"
        )
    kind = accelerator_type()
    count = visible_devices(kind)
    if count < 2:
        return model.to(get_device())
    _logger.info("wrap_dp: each batch is split over %d devices, along its first dimension", count)
    return cast(M, DataParallel(model.to(torch.device(kind, 0))))


def _group_of(ddp_kwargs: Mapping[str, Any]) -> dist.ProcessGroup | None:
    mesh = ddp_kwargs.get("device_mesh")
    group: dist.ProcessGroup | None = ddp_kwargs.get("process_group")
    return group if mesh is None else mesh.get_group(mesh_dim=0)


def _check_model(model: nn.Module, function: str = "wrap_ddp") -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, not {type(model).__name__}")
    for path, part in model.named_modules():
        if isinstance(part, (DistributedDataParallel, DataParallel)):
            where = f"its part {path!r}" if path else "it"
            raise ValueError(
                f"{function}: {where} is wrapped in {type(part).__name__} already. Wrap the whole "
                "model, once: unwrap(model) gives what is inside."
            )
    for name, tensor in _state(model):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ValueError(
                f"{function}: {name!r} has no shape yet (a lazy module). Run one batch through "
                "the model first."
            )
        if tensor.is_meta:
            raise ValueError(
                f"{function}: {name!r} is on the meta device and has no values. Load the weights "
                "(or model.to_empty(device=...)) first."
            )


def _check_names(ddp_kwargs: Mapping[str, Any]) -> None:
    """Refuse what DDP does not take, also where there is no group and it would not be asked."""
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        if name in ddp_kwargs:
            raise TypeError(
                f"wrap_ddp: write sync_buffers={ddp_kwargs[name]} instead of {name}, which means "
                "different things in different versions of torch"
            )
    known = inspect.signature(DistributedDataParallel.__init__).parameters.keys()
    unknown = [name for name in ddp_kwargs if name not in known - {"self", "module"}]
    if unknown:
        raise TypeError(
            f"wrap_ddp: neither it nor this torch's DistributedDataParallel takes {unknown[0]!r}"
        )


def _check_sharing(model: nn.Module, as_views: bool) -> None:
    """Refuse a parameter whose gradient one wrapped model would replace under another's hands.

    Torch keeps the gradient where the model that takes views has it, and the sum of two losses
    comes out averaged by one of the two, or by none.
    """
    name = _kept_in_two_ways(model, as_views)
    if name is not None:
        gc.collect()  # a model that was wrapped before and dropped is no other model
        name = _kept_in_two_ways(model, as_views)
    if name is not None:
        raise ValueError(
            f"wrap_ddp: {name!r} belongs to another wrapped model too, which has "
            f"gradient_as_bucket_view={not as_views}: its gradient would be wrong. Give both "
            "gradient_as_bucket_view=False."
        )


def _kept_in_two_ways(model: nn.Module, as_views: bool) -> str | None:
    for name, parameter in model.named_parameters():
        others = models_that_average(parameter)
        if any(other.gradient_as_bucket_view != as_views for other in others):
            return name
    return None


def _placed(model: M, ddp_kwargs: dict[str, Any]) -> M:
    """Return the model where it is to train, and put what DDP must know of that into the kwargs."""
    names = ("device_ids", "output_device")
    asked: dict[str, Any] = {name: ddp_kwargs.pop(name) for name in names if name in ddp_kwargs}
    devices = {parameter.device for parameter in model.parameters()}
    device, where = placement(devices, get_device(), asked)
    ddp_kwargs.update(where)
    return model if device is None else model.to(device)


def placement(
    devices: Collection[torch.device], own: torch.device, asked: Mapping[str, Any]
) -> tuple[torch.device | None, dict[str, Any]]:
    """Return where a model is to be moved, None for nowhere, and DDP's arguments about it.

    Args:
        devices: Those of its parameters.
        own: This rank's device.
        asked: The ``device_ids`` and ``output_device`` that were given, if any.

    Raises:
        ValueError: The model is on several kinds of devices.

    >>> placement([torch.device("cpu")], torch.device("cpu"), {"device_ids": [0]})
    (device(type='cpu'), {})
    >>> placement([torch.device("cpu")], torch.device("cuda", 1), {})
    (device(type='cuda', index=1), {'device_ids': [1]})
    >>> placement([torch.device("cuda", 0), torch.device("cuda", 1)], torch.device("cuda", 0), {})
    (None, {})
    """
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            f"wrap_ddp: the parameters are on {', '.join(sorted(map(str, devices)))}. DDP takes a "
            "model on one device, or on several of one kind: move it with model.to(device)."
        )
    if len(devices) > 1:
        return None, {}
    if own.type == "cpu":
        return own, {}
    wanted = asked.get("device_ids") or [own]
    index = wanted[0] if isinstance(wanted[0], int) else torch.device(wanted[0]).index
    others = {name: value for name, value in asked.items() if name == "output_device"}
    return torch.device(own.type, index), {"device_ids": [index], **others}


def _without_group(model: M) -> M:
    _logger.info("wrap_ddp: there is no process group, so the model stays as it is")
    return model


def _with_batchnorm_that_works(
    model: M, sync_batchnorm: bool, group: dist.ProcessGroup | None
) -> M:
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if sync_batchnorm and not on_cpu and dist.get_world_size(group) > 1:
        return convert_sync_batchnorm(model, group)
    has_synced = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
    if sync_batchnorm or (has_synced and on_cpu):
        _logger.info(
            "wrap_ddp: SyncBatchNorm needs an accelerator and more than one rank; the plain "
            "batch-norm layers are used"
        )
    return revert_sync_batchnorm(model) if has_synced and on_cpu else model


def _facts(model: nn.Module, options: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be the same on all ranks, as short texts by name."""
    facts = {name: _told(tensor) for name, tensor in _state(model)}
    for name, value in options.items():
        if name not in ("device_ids", "output_device") and isinstance(
            value, (bool, int, float, str, type(None))
        ):
            facts[f"{name}="] = repr(value)
    return facts


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _told(tensor: torch.Tensor) -> str:
    text = (
        f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"
    )
    if not tensor.is_contiguous():
        text += f", strides {tensor.stride()}"
    return text + (", trained" if tensor.requires_grad else "")


def _wrapped(model: M, *, comm_hook: CommHook, **options: Any) -> M:
    group = _group_of(options)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _logger.info("wrap_ddp: the model has nothing to train, so it stays as it is")
        _take_from_rank_zero(model, group)
        return model
    check_hook_runs(comm_hook, next(model.parameters()).device, group)
    wrapped = WrappedModel(model, comm_hook=comm_hook, **options)
    shadowed = wrapped.shadowed_names()
    if shadowed:
        _logger.info(
            "wrap_ddp: through the wrapped model, %s mean DistributedDataParallel's own; write "
            "unwrap(model).%s for the model's",
            ", ".join(shadowed),
            shadowed[0],
        )
    return cast(M, wrapped)


def _take_from_rank_zero(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every rank the same values, as DDP would, also of a model that is not trained."""
    source = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    for _, tensor in _state(model):
        values = tensor.detach().reshape(-1).contiguous()
        if len(values):
            dist.broadcast(values.view(torch.uint8), source, group=group)  # bytes: of any dtype
            tensor.data.copy_(values.view(tensor.shape))
