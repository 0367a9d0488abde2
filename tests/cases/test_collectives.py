"""Public reports about reductions and gathers: rows C*, and T08, of the list of cases.

Each test's docstring begins with its row and names where it was reported. Where plain torch is
silently wrong, the test first shows that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_utils import (
    AbsentRanksError,
    RanksDisagreeError,
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
    barrier,
    gather_cat,
    get_rank,
)
from ddp_utils.talk import circle
from ddp_utils.testing import run_distributed
from ddp_utils.world import devices
from ddp_utils.world.devices import backend_for


def error_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def everybodys(own: Any) -> list[Any]:
    """Return what each rank has, by torch's own gather: ours are what is tested."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


@pytest.mark.distributed(world_size=2)
def test_c01_ints_and_bools_have_true_means() -> None:
    """C01, meta-pytorch/torchcomms#287."""
    rank = get_rank()
    ints, flags = torch.tensor([1, 2 + rank]), torch.tensor([True, rank == 0])
    with pytest.raises(RuntimeError, match="can't be cast"):  # the line that everybody writes
        ints.clone().div_(2)
    logical = flags.clone()
    dist.all_reduce(logical)
    assert logical.tolist() == [True, True]  # plain torch: a sum of bools is their "or"
    means = all_reduce_mean({"ints": ints, "flags": flags, "python": 1 + rank})
    assert ints.tolist() == [1, 2 + rank]
    assert (means["ints"].tolist(), means["ints"].dtype) == ([1.0, 2.5], torch.float64)
    assert means["flags"].tolist() == [1.0, 0.5]
    assert (means["python"], type(means["python"])) == (1.5, float)
    assert all_reduce_sum(flags).tolist() == [2, 1]


@pytest.mark.distributed(world_size=2)
def test_c02_a_mean_is_a_sum_divided_on_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """C02, pytorch/pytorch#149781, #162338."""
    original = dist.all_reduce

    def watched(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        assert op != dist.ReduceOp.AVG
        return original(tensor, op, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", watched)
    rank = get_rank()
    values = [torch.full((size,), 0.1 * (rank + 1), dtype=torch.float64) for size in (3, 3000)]
    manual = values[0].clone()
    original(manual)
    means = [all_reduce_mean(value) for value in values]
    assert torch.equal(means[0], manual / 2)
    assert [mean[0].item() for mean in means] == [(0.1 + 0.2) / 2] * 2


@pytest.mark.parametrize(
    ("config", "own", "everywhere", "road"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", False, "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", True, "cuda"),
        ("cuda:nccl", "cuda", False, "cuda"),
        ("cuda:nccl", "cuda", True, "cuda"),
        ("cpu:gloo,cuda:gloo", "cpu", True, "cpu"),
        ("cpu:gloo", "cuda", True, "cpu"),
    ],
)
def test_c03_a_cpu_value_travels_by_a_road_that_the_backend_has(
    config: str, own: str, everywhere: bool, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C03, pytorch/examples#1031, #1032; Lightning-AI/pytorch-lightning#2205."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(circle, "get_device", lambda: torch.device(own))
    here = circle.Circle(None, 0, 2)
    assert circle.road_for(here, all_on_accelerator=everywhere).type == road


def test_c03_the_default_backend_has_a_road_for_the_cpu() -> None:
    """C03, pytorch/examples#1031: the group that this package makes takes CPU tensors too."""
    assert devices.accelerator_type() in ("cpu", "cuda")
    assert backend_for("cuda").startswith("cpu:gloo,")


@pytest.mark.distributed(world_size=3)
def test_c05_losses_are_averaged_by_name_and_not_by_order() -> None:
    """C05, facebookresearch/maskrcnn-benchmark#309; facebookresearch/habitat-lab#917."""
    items = [("a", 1.0), ("b", 10.0), ("c", 100.0)]
    rank = get_rank()
    losses = dict(items[rank:] + items[:rank])
    means = all_reduce_mean(losses)
    assert list(means) == list(losses)
    assert list(all_reduce_mean({key: torch.full((200,), x) for key, x in losses.items()})) == list(
        losses
    )
    assert means == {"a": 1.0, "b": 10.0, "c": 100.0}


@pytest.mark.distributed(world_size=2)
def test_c06_gathers_take_uneven_sizes_and_refuse_unlike_dtypes_before_gloo_aborts() -> None:
    """C06, huggingface/accelerate#235; facebookresearch/maskrcnn-benchmark#383."""
    rank = get_rank()
    rows = torch.arange(2.0 * (1 + 2 * rank)).reshape(-1, 2)
    unlike = rows.to(torch.float64 if rank else torch.float32)
    assert gather_cat(rows).tolist() == [[0, 1], [0, 1], [2, 3], [4, 5]]
    assert [tuple(each.shape) for each in all_gather(rows)] == [(1, 2), (3, 2)]
    dtypes = error_of(RanksDisagreeError, lambda: gather_cat(unlike))
    shapes = error_of(RanksDisagreeError, lambda: gather_cat(rows.reshape(-1) if rank else rows))
    assert "rank 0: tensor of torch.float32" in dtypes
    assert "rank 1: tensor of torch.float64" in dtypes
    assert "rows of shape ()" in shapes
    assert [each.dtype for each in all_gather(unlike)] == [torch.float32, torch.float64]
    ours, theirs = everybodys((dtypes, shapes))
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_c07_tensors_in_objects_arrive_on_the_receivers_side() -> None:
    """C07, pytorch/pytorch#75619, #76865."""
    objects = all_gather({"tensor": torch.tensor([float(get_rank())]), "name": str(get_rank())})
    assert [
        (each["tensor"].tolist(), each["tensor"].device.type, each["name"]) for each in objects
    ] == [([0.0], "cpu", "0"), ([1.0], "cpu", "1")]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.distributed(world_size=2)
def test_c08_unlike_shapes_are_an_error_on_all(size: int) -> None:
    """C08, Lightning-AI/pytorch-lightning#19106: plain torch gives rank 0 a number."""
    value = torch.ones(size + 2 * get_rank())
    said = error_of(RanksDisagreeError, lambda: all_reduce_mean(value))
    assert f"rank 0: tensor of shape ({size},)" in said
    assert f"rank 1: tensor of shape ({size + 2},)" in said
    ours, theirs = everybodys(said)
    assert ours == theirs


def skip_one_barrier() -> list[str]:
    texts = []
    if get_rank() != 1:
        texts.append(error_of(RanksDisagreeError, lambda: barrier()))
    if get_rank() == 1:
        texts.append(error_of(RanksDisagreeError, lambda: barrier()))
    return texts


def test_t08_a_skipped_barrier_is_found_at_once_and_both_lines_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T08, pytorch/pytorch#138322: barriers match by order, not by place in the program."""
    monkeypatch.setenv("DDP_UTILS_DEBUG", "1")
    (text,), *others = run_distributed(skip_one_barrier, world_size=3)
    assert others == [[text]] * 2
    assert f"ranks 0, 2: barrier at {__file__}:" in text
    assert f"rank 1: barrier at {__file__}:" in text


def skip_the_last_barrier() -> str:
    barrier()
    return "" if get_rank() == 1 else error_of(AbsentRanksError, barrier)


def test_t08_without_debug_the_rank_that_is_gone_is_named() -> None:
    """T08, pytorch/pytorch#138322: the barrier that nobody else comes to is an error at once."""
    text, _ = run_distributed(skip_the_last_barrier)
    assert text.startswith("rank 1 has returned without coming to barrier")
