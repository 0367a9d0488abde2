"""Turn a single-GPU PyTorch script into DistributedDataParallel, piece by piece.

Everything public is a name in this module. A name's own module is imported when it is first
asked for, so that ``import ddp_utils`` costs next to nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_utils.agree.in_sync import check_equal_steps, check_in_sync
    from ddp_utils.agree.loggers import get_logger
    from ddp_utils.agree.rank_zero import rank_zero_first, rank_zero_only, rank_zero_print
    from ddp_utils.agree.seeding import seed_everything
    from ddp_utils.data.in_order import gather_in_order
    from ddp_utils.data.iterable import shard_iterable
    from ddp_utils.data.loaders import make_loader
    from ddp_utils.data.samplers import make_sampler
    from ddp_utils.data.wrapped import shard_batch_sampler
    from ddp_utils.ground.errors import (
        AbsentRanksError,
        DistributedError,
        LauncherError,
        OneRankSectionError,
        RankEnd,
        RankFailedError,
        RanksDisagreeError,
        RankZeroError,
        RendezvousError,
        StartError,
    )
    from ddp_utils.ground.unwrapping import unwrap
    from ddp_utils.launching import distributed_main, launch
    from ddp_utils.models.accumulate import accumulate, global_scale
    from ddp_utils.models.batchnorm import revert_sync_batchnorm
    from ddp_utils.models.checkpoint import load_checkpoint, save_checkpoint
    from ddp_utils.models.preemption import stop_requested
    from ddp_utils.models.prefixes import load_model_state, strip_module_prefix
    from ddp_utils.models.random_states import RandomStates
    from ddp_utils.models.wrap import wrap_ddp, wrap_dp
    from ddp_utils.process_group import init_distributed, shutdown_distributed
    from ddp_utils.talk.collectives import (
        all_gather,
        all_ranks,
        all_reduce_max,
        all_reduce_mean,
        all_reduce_min,
        all_reduce_sum,
        any_rank,
        barrier,
        broadcast,
        gather_cat,
    )
    from ddp_utils.world.arguments import add_local_rank_argument
    from ddp_utils.world.moving import to_device, to_numpy
    from ddp_utils.world.world import (
        World,
        current_world,
        detect_world,
        get_device,
        get_local_rank,
        get_local_world_size,
        get_node_rank,
        get_rank,
        get_world_size,
        is_distributed,
        is_rank_zero,
    )

__version__ = "0.1.0"

__all__ = [
    "AbsentRanksError",
    "DistributedError",
    "LauncherError",
    "OneRankSectionError",
    "RankEnd",
    "RandomStates",
    "RankFailedError",
    "RankZeroError",
    "RanksDisagreeError",
    "RendezvousError",
    "StartError",
    "World",
    "accumulate",
    "add_local_rank_argument",
    "all_gather",
    "all_ranks",
    "all_reduce_max",
    "all_reduce_mean",
    "all_reduce_min",
    "all_reduce_sum",
    "any_rank",
    "barrier",
    "broadcast",
    "check_equal_steps",
    "check_in_sync",
    "current_world",
    "detect_world",
    "distributed_main",
    "gather_cat",
    "gather_in_order",
    "get_device",
    "get_local_rank",
    "get_local_world_size",
    "get_logger",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "global_scale",
    "init_distributed",
    "is_distributed",
    "is_rank_zero",
    "launch",
    "load_checkpoint",
    "load_model_state",
    "make_loader",
    "make_sampler",
    "rank_zero_first",
    "rank_zero_only",
    "rank_zero_print",
    "revert_sync_batchnorm",
    "save_checkpoint",
    "seed_everything",
    "shard_batch_sampler",
    "shard_iterable",
    "shutdown_distributed",
    "stop_requested",
    "strip_module_prefix",
    "to_device",
    "to_numpy",
    "unwrap",
    "wrap_ddp",
    "wrap_dp",
]

_WHERE = {
    "agree.in_sync": "check_equal_steps check_in_sync",
    "agree.loggers": "get_logger",
    "agree.rank_zero": "rank_zero_first rank_zero_only rank_zero_print",
    "agree.seeding": "seed_everything",
    "data.in_order": "gather_in_order",
    "data.iterable": "shard_iterable",
    "data.loaders": "make_loader",
    "data.samplers": "make_sampler",
    "data.wrapped": "shard_batch_sampler",
    "ground.errors": "AbsentRanksError DistributedError LauncherError OneRankSectionError RankEnd"
    " RankFailedError RankZeroError RanksDisagreeError RendezvousError StartError",
    "launching": "distributed_main launch",
    "models.accumulate": "accumulate global_scale",
    "models.checkpoint": "load_checkpoint save_checkpoint",
    "models.preemption": "stop_requested",
    "models.prefixes": "load_model_state strip_module_prefix",
    "ground.unwrapping": "unwrap",
    "models.batchnorm": "revert_sync_batchnorm",
    "models.random_states": "RandomStates",
    "models.wrap": "wrap_ddp wrap_dp",
    "process_group": "init_distributed shutdown_distributed",
    "talk.collectives": "all_gather all_ranks all_reduce_max all_reduce_mean all_reduce_min"
    " all_reduce_sum any_rank barrier broadcast gather_cat",
    "world.arguments": "add_local_rank_argument",
    "world.moving": "to_device to_numpy",
    "world.world": "World current_world detect_world get_device get_local_rank"
    " get_local_world_size get_node_rank get_rank get_world_size is_distributed is_rank_zero",
}
_HOME = {name: module for module, names in _WHERE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
