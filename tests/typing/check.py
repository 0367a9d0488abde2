"""What do type checkers see? Only checked, never run: mypy --strict and pyright read this file."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from typing_extensions import assert_type

import ddp_utils as ddp
from ddp_utils.testing import run_distributed


@ddp.distributed_main
def plain(epochs: int, *, lr: float = 0.1) -> str:
    return f"{epochs} {lr}"


@ddp.distributed_main(nproc=2, output="rank_zero")
def with_options(epochs: int) -> list[float]:
    return [0.5] * epochs


# A decorated function keeps its parameters and its result.
assert_type(plain(3, lr=0.2), str)
assert_type(with_options(3), list[float])
same: Callable[[int], list[float]] = with_options
plain("three")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
with_options(3, lr=0.1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
ddp.distributed_main(ranks=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def work(rank: int) -> float:
    return rank / 2


# launch and its kind give a list of what the function gives.
assert_type(ddp.launch(work, (1,), nproc=2), list[float])
assert_type(run_distributed(work, 1, world_size=2), list[float])

# Trees keep their type.
metrics = {"loss": 0.5, "accuracy": 0.9}
assert_type(ddp.all_reduce_mean(metrics), dict[str, float])
counts = {"right": 3}
assert_type(ddp.all_reduce_mean(counts), dict[str, float])
assert_type(ddp.all_reduce_mean(0.5, weight=3), float)
assert_type(ddp.all_reduce_mean(torch.ones(2)), torch.Tensor)
assert_type(ddp.all_reduce_max(torch.ones(2)), torch.Tensor)
assert_type(ddp.all_reduce_min([1, 2]), list[int])
assert_type(ddp.all_gather({"a": 1}), list[dict[str, int]])
assert_type(ddp.gather_cat(torch.ones(2)), torch.Tensor)
assert_type(ddp.broadcast("a name"), str)
assert_type(ddp.any_rank(True), bool)
assert_type(ddp.all_ranks(True), bool)


def trees(numbers: tuple[int, float], batch: tuple[torch.Tensor, list[str]]) -> None:
    assert_type(ddp.all_reduce_sum(numbers), tuple[int, float])
    assert_type(ddp.to_device(batch), tuple[torch.Tensor, list[str]])


# One-rank sections: without broadcast= the other ranks get None.
@ddp.rank_zero_only
def count(path: str) -> int:
    return len(path)


@ddp.rank_zero_only(broadcast=True)
def count_for_all(path: str) -> int:
    return len(path)


assert_type(count("a"), int | None)
assert_type(count_for_all("a"), int)
count(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
with ddp.rank_zero_first(local=True):
    pass

# Models, data.
model = ddp.wrap_ddp(nn.Linear(2, 1))
module: nn.Module = ddp.unwrap(model)
with ddp.accumulate(model, step=0, every=2) as window:
    assert_type(window.scale, float)
    assert_type(window.is_last, bool)
dataset: Dataset[tuple[torch.Tensor, ...]] = TensorDataset(torch.ones(4, 2))
assert_type(
    ddp.make_loader(dataset, global_batch_size=2, shuffle=True),
    DataLoader[tuple[torch.Tensor, ...]],
)
sampler: DistributedSampler[int] = ddp.make_sampler(100)
assert_type(ddp.seed_everything(1), int)
assert_type(ddp.get_device(), torch.device)
assert_type(ddp.current_world(), ddp.World)
assert_type(ddp.stop_requested(), bool)
assert_type(ddp.strip_module_prefix({"module.a": torch.ones(1)}), dict[str, torch.Tensor])
