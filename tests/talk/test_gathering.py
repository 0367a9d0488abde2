"""Gathers, broadcasts and flags between real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import from_all_ranks

from ddp_utils import all_gather, all_ranks, any_rank, broadcast, gather_cat, get_rank


class Odd(Exception):
    """Something that is no plain value."""


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011  # the text is compared
        call()
    return f"{error.type.__name__}: {error.value}"


def test_alone_each_gives_its_answer() -> None:
    tensor = torch.arange(3, dtype=torch.uint8)
    (gathered,) = all_gather([tensor, None, "a"])
    assert gathered[0].tolist() == [0, 1, 2]
    assert gathered[0] is not tensor
    assert gathered[1:] == [None, "a"]
    assert gather_cat({"x": np.ones((2, 3)), "none": None})["x"].shape == (2, 3)
    assert gather_cat(torch.tensor(5)).tolist() == [5]
    assert broadcast({"a": 1}) == {"a": 1}
    assert (any_rank(0), any_rank(torch.tensor(True)), all_ranks([])) == (False, True, False)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"src=1 is not among the group's ranks \[0\]"):
        broadcast(1, src=1)
    with pytest.raises(TypeError, match=r"what is at \['a'\] is a float; all_gather takes any"):
        gather_cat({"a": 1.0})
    with pytest.raises(Exception, match="pickle"):
        all_gather(lambda: None)


# -- all_gather ---------------------------------------------------------------------------------


@pytest.mark.distributed(world_size=[2, 3])
def test_values_of_any_type_shape_and_size_are_gathered_by_rank() -> None:
    rank, world_size = get_rank(), dist.get_world_size()
    values: list[Any] = [
        rank,
        None if rank else {"a": [1, (2, "x")]},
        torch.arange(rank * 3, dtype=torch.bfloat16),
        torch.ones(rank + 1, 2, dtype=torch.int64 if rank else torch.float32),
        {"big": torch.full((1000 * (rank + 1),), rank), "small": torch.tensor(rank)},
        b"x" * 5000 if rank else b"",
        Odd("odd", rank),
        torch.ones(2, requires_grad=True) * rank,
    ]
    ranks, nested, uneven, unlike, trees, sizes, odd, grown = map(all_gather, values)
    assert ranks == list(range(world_size))
    assert nested == [{"a": [1, (2, "x")]}] + [None] * (world_size - 1)
    assert [each.tolist() for each in uneven] == [list(range(3 * r)) for r in range(world_size)]
    assert uneven[0].dtype == torch.bfloat16
    assert [each.dtype for each in unlike[:2]] == [torch.float32, torch.int64]
    assert [tuple(each.shape) for each in unlike] == [(r + 1, 2) for r in range(world_size)]
    for r, tree in enumerate(trees):
        assert tree["big"].tolist() == [r] * (1000 * (r + 1))
        assert tree["small"].item() == r
    assert sizes == [b""] + [b"x" * 5000] * (world_size - 1)
    assert [(type(each), each.args) for each in odd] == [
        (Odd, ("odd", r)) for r in range(world_size)
    ]
    assert [each.tolist() for each in grown] == [[r, r] for r in range(world_size)]
    assert not any(each.requires_grad for each in grown)


@pytest.mark.distributed(world_size=2)
def test_a_value_that_does_not_pickle_is_an_error_on_all() -> None:
    text = error_of(lambda: all_gather((lambda: 1) if get_rank() else 1))
    assert ["rank 1 could not take part in all_gather", "pickle"][get_rank()] in text


# -- gather_cat ---------------------------------------------------------------------------------


@pytest.mark.distributed(world_size=[2, 3])
def test_rows_of_uneven_numbers_are_joined_by_rank() -> None:
    rank, world_size = get_rank(), dist.get_world_size()
    rows = [torch.arange(1000 * r).reshape(-1, 4) for r in range(world_size)]
    tree: Any = gather_cat({"x": torch.full((rank, 2), float(rank)), "y": (np.array([rank]), None)})
    large = gather_cat(rows[rank])
    numbers = gather_cat(torch.tensor(rank))
    empty = gather_cat(torch.zeros(0, 7))
    assert tree["x"].tolist() == [[float(r)] * 2 for r in range(world_size) for _ in range(r)]
    assert tree["y"][0].tolist() == list(range(world_size))
    assert tree["y"][1] is None
    assert torch.equal(large, torch.cat(rows))
    assert numbers.tolist() == list(range(world_size))
    assert empty.shape == (0, 7)


UNLIKE: list[tuple[Any, Any, str]] = [
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "in what they brought"),
    (torch.zeros(2, 3), torch.zeros(2, 4), "in what they brought"),
    (torch.zeros(2, 3), torch.zeros(2), "in what they brought"),
    (torch.zeros(2), np.zeros(2, np.float32), "in what they brought"),
    ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, "at ['a']"),
    ([torch.zeros(2), None], [torch.zeros(2), torch.zeros(2)], "at [1]"),
    (torch.zeros(10**6), torch.zeros(10**6, dtype=torch.int32), "in what they brought"),
]


@pytest.mark.distributed(world_size=2)
def test_rows_that_do_not_fit_are_the_same_error_on_all() -> None:
    rank = get_rank()
    texts = [error_of(lambda pair=pair: gather_cat(pair[rank])) for pair in UNLIKE]
    texts.append(error_of(lambda: gather_cat("text" if rank else torch.zeros(2))))
    first, second = from_all_ranks(texts)
    assert first[:-1] == second[:-1]
    for text, (_, _, where) in zip(first[:-1], UNLIKE, strict=True):
        head, *lines = text.splitlines()
        assert head == f"RanksDisagreeError: gather_cat: the ranks differ {where}:"
        assert [line.split(":")[0] for line in lines] == ["  rank 0", "  rank 1"]
    assert "rank 1 could not take part in gather_cat: TypeError" in first[-1]
    assert second[-1].startswith("TypeError: gather_cat joins tensors and arrays")


# -- broadcast and flags ------------------------------------------------------------------------


@pytest.mark.distributed(world_size=2)
def test_a_value_is_broadcast_from_any_rank() -> None:
    rank = get_rank()
    own = {"rank": rank, "weights": torch.full((2000,), float(rank))}
    sent = broadcast(own, src=1)
    assert (sent is own) == (rank == 1)
    results = [
        sent["rank"],
        sent["weights"].sum().item(),
        broadcast(f"run {rank}"),
        broadcast(object() if rank else None),
        error_of(lambda: broadcast(1, src=5)),
        error_of(lambda: broadcast(1, src=rank)),
        error_of(lambda: broadcast(1 if rank else (lambda: 1))),
    ]
    first, second = from_all_ranks(results)
    assert first[:5] == second[:5]
    assert first[:4] == [1, 2000.0, "run 0", None]
    assert first[4] == "ValueError: src=5 is not among the group's ranks [0, 1]"
    assert first[5] == second[5]
    assert "rank 0: broadcast(src=0) at" in first[5]
    assert "pickle" in first[6]
    assert "rank 0 could not take part in broadcast(src=0)" in second[6]


@pytest.mark.distributed(world_size=3)
def test_flags_are_the_same_on_all() -> None:
    rank = get_rank()
    results = [
        any_rank(rank == 1),
        any_rank(rank == 5),
        all_ranks(rank < 5),
        all_ranks(rank != 1),
        error_of(lambda: any_rank(torch.ones(2) if rank else True)),
    ]
    first, second, third = from_all_ranks(results)
    assert first[:4] == second[:4] == third[:4] == [True, False, True, False]
    assert "ranks" not in first[4]
    assert "rank 1 could not take part in any_rank: RuntimeError" in first[4]
    assert second[4].startswith("RuntimeError: Boolean value of Tensor")


# -- different operations, and groups -----------------------------------------------------------


@pytest.mark.distributed(world_size=[2, 3])
def test_ranks_in_different_collectives_are_told_so() -> None:
    rank = get_rank()
    mixed: list[list[Callable[[], Any]]] = [
        [lambda: all_gather(1), lambda: broadcast(1)],
        [lambda: gather_cat(torch.zeros(10**6)), lambda: any_rank(True)],
        [lambda: any_rank(True), lambda: all_ranks(True)],
    ]
    texts = [error_of(pair[rank % 2]) for pair in mixed]
    assert from_all_ranks(texts) == [texts] * dist.get_world_size()
    names = [("all_gather", "broadcast(src=0)"), ("gather_cat", "any_rank"), ("any_rank", "all_r")]
    for text, (ours, theirs) in zip(texts, names, strict=True):
        head, *lines = text.splitlines()
        assert head == "RanksDisagreeError: the ranks came to different collectives:"
        assert f": {ours} at {__file__}:" in lines[0]
        assert f"  rank 1: {theirs}" in lines[1]


@pytest.mark.distributed(world_size=4)
def test_groups_gather_by_themselves() -> None:
    rank = get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = odd if rank % 2 else even
    results = [
        all_gather(rank, group=mine),
        gather_cat(torch.full((rank,), rank), group=mine).tolist(),
        broadcast(rank, src=rank % 2 + 2, group=mine),
        any_rank(rank == 3, group=mine),
        error_of(lambda: broadcast(rank, src=(rank + 1) % 4, group=mine)).split(":")[0],
    ]
    expected = [
        [[0, 2], [2, 2], 2, False, "ValueError"],
        [[1, 3], [1, 3, 3, 3], 3, True, "ValueError"],
    ]
    assert results == expected[rank % 2]
