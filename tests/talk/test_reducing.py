"""Reductions between real ranks."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import collectives_in, from_all_ranks

from ddp_utils import (
    DistributedError,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
    get_rank,
)
from ddp_utils.ground.trees import leaves_with_paths
from ddp_utils.talk import reducing

REDUCE: dict[str, Callable[..., Any]] = {
    "mean": all_reduce_mean,
    "sum": all_reduce_sum,
    "min": all_reduce_min,
    "max": all_reduce_max,
}


class Metrics(NamedTuple):
    loss: Any
    counts: Any


def error_of(call: Callable[[], Any]) -> str:
    """Return the error of a call that must fail, as text."""
    with pytest.raises(Exception) as error:  # noqa: PT011  # the text is compared
        call()
    return f"{error.type.__name__}: {error.value}"


# -- one rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "value", "expected"),
    [
        ("mean", 3, 3.0),
        ("mean", True, 1.0),
        ("mean", np.int32(3), np.float64(3)),
        ("mean", torch.tensor([1, 2]), torch.tensor([1.0, 2.0], dtype=torch.float64)),
        ("mean", torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([1.5]).bfloat16()),
        ("sum", True, 1),
        ("sum", torch.tensor([True, False]), torch.tensor([1, 0])),
        ("sum", np.uint8(200), np.int64(200)),
        ("sum", 2**62, 2**62),
        ("max", True, True),
        ("max", torch.tensor([True]), torch.tensor([True])),
        ("min", np.int8(-3), np.int8(-3)),
        ("min", {}, {}),
        ("mean", [], []),
    ],
    ids=str,
)
def test_alone_the_types_are_those_among_many(operation: str, value: Any, expected: Any) -> None:
    result = REDUCE[operation](value)
    assert type(result) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    else:
        assert result == expected


def test_ranks_without_a_group_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    for name, value in (facts | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=r"rank 1 of 2 called all_reduce_mean.*init_dist"):
        all_reduce_mean(1.0)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be a finite number"):
        all_reduce_mean(1.0, weight=weight)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'error' or 'skip', not 'ignore'"):
        all_reduce_mean(1.0, missing="ignore")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"all_reduce_sum: what is at \['a'\]\[1\] is a str"):
        all_reduce_sum({"a": [1, "2"]})
    with pytest.raises(TypeError, match="the value is a NoneType"):
        all_reduce_mean(None)


# -- against NumPy ------------------------------------------------------------------------------

INT64 = st.integers(-(2**62), 2**62 - 1)
NUMBERS = {
    "float": st.floats(width=64),
    "int": INT64,
    "bool": st.booleans(),
    "float32": st.floats(width=32).map(np.float32),
    "int8": st.integers(-128, 127).map(np.int8),
    "vector": st.lists(st.floats(width=32), min_size=3, max_size=3).map(torch.tensor),
    "matrix": st.lists(INT64, min_size=4, max_size=4).map(lambda x: np.array(x).reshape(2, 2)),
    "scalar": st.floats(width=64).map(lambda x: torch.tensor(x, dtype=torch.float64)),
    "empty": st.just(torch.zeros(0, 2)),
}


@st.composite
def trees_of_ranks(draw: Any) -> list[dict[str, Any]]:
    """Two trees of one structure, with dictionaries in different orders."""
    kinds = draw(st.lists(st.sampled_from(sorted(NUMBERS)), max_size=6))
    trees: list[dict[str, Any]] = []
    for _ in range(2):
        leaves = [(f"{i}", draw(NUMBERS[kind])) for i, kind in enumerate(kinds)]
        trees.append({"nested": [dict(draw(st.permutations(leaves)))], "at": Metrics(1.0, (2,))})
    return trees


def expected_of(operation: str, values: list[Any]) -> Any:
    stacked = np.stack([np.asarray(value) for value in values])
    with np.errstate(all="ignore"):
        if operation == "mean":
            return stacked.astype(np.float64).sum(0) / 2
        if operation == "sum" and stacked.dtype.kind == "f":
            return stacked.astype(np.float64).sum(0)
        if operation == "sum":
            return stacked.astype(np.int64).sum(0)
        return getattr(np, operation)(stacked, 0)


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("small", [256, -1], ids=["in the first message", "by all_reduce"])
def test_any_tree_reduces_as_numpy_reduces_the_stacked_leaves(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "SMALL", small)
    compared = 0

    # The same trees are drawn on both ranks, and each reduces its own.
    @settings(
        derandomize=True, database=None, max_examples=40, deadline=None, phases=[Phase.generate]
    )
    @given(trees_of_ranks(), st.sampled_from(sorted(REDUCE)))
    def compare(trees: list[dict[str, Any]], operation: str) -> None:
        nonlocal compared
        mine = trees[get_rank()]
        before = copy.deepcopy(mine)
        result = REDUCE[operation](mine)
        assert repr(mine) == repr(before)
        assert list(result["nested"][0]) == list(mine["nested"][0])
        assert type(result["at"]) is Metrics
        by_rank = [[leaf for _, leaf in leaves_with_paths(tree)] for tree in trees]
        ours = [leaf for _, leaf in leaves_with_paths(result)]
        for leaf, own, *values in zip(ours, by_rank[get_rank()], *by_rank, strict=True):
            expected = np.asarray(expected_of(operation, values))
            with np.errstate(over="ignore"):
                expected = expected.astype(np.asarray(leaf).dtype)
            np.testing.assert_array_equal(np.asarray(leaf), expected)
            assert isinstance(leaf, torch.Tensor) == isinstance(own, torch.Tensor)
            compared += 1

    compare()
    first, second = from_all_ranks(compared)
    assert first == second > 100


# -- what comes out, by kind --------------------------------------------------------------------


@pytest.mark.distributed(world_size=2)
def test_what_comes_out_by_kind() -> None:
    rank = get_rank()
    grown = torch.ones(2, requires_grad=True) * (rank + 1)
    base = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    results = [
        all_reduce_mean(grown),
        all_reduce_sum(base.T[1:3, ::2]),
        all_reduce_mean(OrderedDict(b=rank, a=True)),
        all_reduce_sum([2**63 - 1, torch.tensor(5, dtype=torch.int16), rank == 0]),
        all_reduce_max([rank == 0, rank, -rank, float(rank)]),
        all_reduce_min(torch.tensor([math.nan if rank else 1.0, math.inf, -0.5 * rank])),
        all_reduce_max([math.nan if rank else 1.0, -math.inf]),
        all_reduce_sum([math.inf, -math.inf if rank else math.inf]),
        all_reduce_mean([0.1 + 0.2, 1e300]),
    ]
    assert not results[0].requires_grad
    assert grown.requires_grad
    first, second = from_all_ranks(results)
    assert repr(first) == repr(second)
    mean, strided, ordered, ints, greatest, least, nan, infinite, doubles = results
    assert mean.tolist() == [1.5, 1.5]
    assert strided.tolist() == (torch.arange(12.0).reshape(3, 4).T[1:3, ::2] * 3).tolist()
    assert list(ordered.items()) == [("b", 0.5), ("a", 1.0)]
    assert ints == [2**64 - 2, torch.tensor(10), 1]
    assert ints[1].dtype == torch.int64
    assert [(type(x), x) for x in greatest] == [(bool, True), (int, 1), (int, 0), (float, 1.0)]
    assert str(least.tolist()) == "[nan, inf, -0.5]"
    assert str(nan) == "[nan, -inf]"
    assert str(infinite) == "[inf, nan]"
    assert doubles == [0.1 + 0.2, 1e300]


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("size", [1, 300])
def test_a_sum_of_ints_that_leaves_64_bits_is_an_error_on_all(size: int) -> None:
    text = error_of(lambda: all_reduce_sum(torch.full((size,), 2**62)))
    assert text.startswith("OverflowError: ")
    assert "all_reduce_sum: the value reduces to an int that does not fit in" in text
    assert from_all_ranks(text) == [text] * 2


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("value", [1.0, [1.0] * 256, torch.ones(256)], ids=["1", "256", "tensor"])
def test_up_to_256_numbers_take_one_collective(value: Any) -> None:
    assert collectives_in(lambda: all_reduce_mean({"a": value})) == ["all_gather"]


@pytest.mark.distributed(world_size=2)
def test_more_numbers_take_two() -> None:
    many = {"a": torch.ones(257)}
    assert sorted(collectives_in(lambda: all_reduce_mean(many))) == ["all_gather", "all_reduce"]


# -- weights ------------------------------------------------------------------------------------


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("size", [2, 300])
def test_weighted_means(size: int) -> None:
    rank = get_rank()
    value = torch.full((size,), float(rank))
    nothing = torch.full((size,), math.nan)
    results = [
        all_reduce_mean(value, weight=1 + 2 * rank)[0].item(),
        all_reduce_mean(nothing if rank else value + 5, weight=torch.tensor(1 - rank))[0].item(),
        all_reduce_mean(value, weight=0)[0].item(),
        error_of(lambda: all_reduce_mean(value, weight=3 if rank else None)).splitlines()[0],
        error_of(lambda: all_reduce_mean(value, weight=-1 if rank else 1)),
    ]
    first, second = from_all_ranks(results)
    assert first[:2] == second[:2] == [0.75, 5.0]
    assert math.isnan(first[2])
    assert first[3] == second[3]
    assert "different collectives" in first[3]
    assert first[4].startswith("RanksDisagreeError: rank 1 could not take part in all_reduce_mean")
    assert second[4] == "ValueError: weight must be a finite number of at least 0, not -1"


# -- ranks that differ --------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "shape": (torch.zeros(1), torch.zeros(3), "in what they brought"),
    "rank": (torch.zeros(2, 3), torch.zeros(3, 2), "in what they brought"),
    "key": ({"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0}, "at ['b']"),
    "length": ([1, 2], [1, 2, 3], "at [2]"),
    "kind": ({"n": torch.tensor(1)}, {"n": torch.tensor(1.0)}, "at ['n']"),
    "python float beside int tensor": (torch.tensor(1), 1.5, "in what they brought"),
    "swapped kinds": ([1, torch.zeros(1)], [1, torch.zeros(1).int()], "at [1]"),
    "nesting": ({"a": [1.0]}, {"a": 1.0}, "at ['a'][0]"),
    "large beside small": (torch.zeros(1), torch.zeros(1000), "in what they brought"),
    "large": ({"x": torch.zeros(500)}, {"x": torch.zeros(501)}, "at ['x']"),
    "empty": ({}, {"a": 1}, "at ['a']"),
}


@pytest.mark.distributed(world_size=[2, 3])
def test_ranks_that_differ_get_the_same_error_naming_ranks_path_and_lines() -> None:
    world_size = dist.get_world_size()
    texts = []
    for values in DIFFERENT.values():
        calls = [partial(reduce, values[get_rank() % 2]) for reduce in REDUCE.values()]
        texts.append(list(map(error_of, calls)))
    assert all_reduce_sum(1) == world_size  # and the ranks are still together
    assert from_all_ranks(texts) == [texts] * world_size
    for own, (_, _, where) in zip(texts, DIFFERENT.values(), strict=True):
        for name, text in zip(REDUCE, own, strict=True):
            head, *lines = text.splitlines()
            assert head == f"RanksDisagreeError: all_reduce_{name}: the ranks differ {where}:"
            assert len(lines) == 2
            assert all(f"({__file__}:" in line for line in lines)
            ranks = "ranks 0, 2" if world_size == 3 else "rank 0"
            assert [line.split(":")[0].strip() for line in lines] == [ranks, "rank 1"]


@pytest.mark.distributed(world_size=3)
def test_no_combination_of_differences_cancels() -> None:
    # Ranks 0 and 1 differ from each other, and rank 2 is their average, or their mirror.
    cases = [(1, 3, 2), (0, 4, 2), (5, 1, 3), (4, 4, 1)]
    sizes = [case[get_rank()] for case in cases]
    texts = [error_of(lambda size=size: all_reduce_mean(torch.zeros(size))) for size in sizes]
    assert from_all_ranks(texts) == [texts] * 3
    assert all(text.startswith("RanksDisagreeError") for text in texts)


@pytest.mark.distributed(world_size=2)
def test_a_rank_that_cannot_take_part_tells_the_others() -> None:
    rank = get_rank()
    values: list[Any] = ["text" if rank else 1.0, 2**70 if rank else 1, None]
    texts = [error_of(lambda value=value: all_reduce_sum(value)) for value in values]
    first, second = from_all_ranks(texts)
    assert [text.split(":")[0] for text in second] == ["TypeError", "OverflowError", "TypeError"]
    assert [text.split(":")[0] for text in first] == [*["RanksDisagreeError"] * 2, "TypeError"]
    assert "rank 1 could not take part in all_reduce_sum: TypeError: all_reduce_sum" in first[0]


# -- kinds that go together ---------------------------------------------------------------------


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("size", [1, 300])
def test_python_numbers_go_with_wider_kinds(size: int) -> None:
    rank = get_rank()
    filler = torch.zeros(size)
    pairs: list[tuple[Any, Any]] = [
        (torch.tensor(1.5), 0),
        (2.5, False),
        (3, True),
        (np.float32(0.5), 1),
        (torch.tensor(2**62), 2**62 - 1),
    ]
    results = [[reduce([pair[rank], filler])[0] for pair in pairs] for reduce in REDUCE.values()]
    first, second = from_all_ranks(results)
    for ours, theirs in zip(first, second, strict=True):
        assert [float(x) for x in ours] == [float(x) for x in theirs]
    mean, total, least, greatest = first
    assert [float(x) for x in mean] == [0.75, 1.25, 2.0, 0.75, 2.0**62]
    assert [float(x) for x in total[:4]] == [1.5, 2.5, 4, 1.5]
    assert (total[4].item(), second[1][4]) == (2**63 - 1, 2**63 - 1)
    assert [float(x) for x in least] == [0, 0, 1, 0.5, 2.0**62]
    assert [float(x) for x in greatest] == [1.5, 2.5, 3, 1, 2.0**62]
    assert isinstance(total[0], torch.Tensor)
    assert (type(second[1][0]), type(second[1][2])) == (float, int)
    assert (second[2][1], type(second[2][1])) == (0.0, float)


# -- missing keys -------------------------------------------------------------------------------


@pytest.mark.distributed(world_size=3)
@pytest.mark.parametrize("size", [1, 300])
def test_missing_keys_are_averaged_over_those_who_have_them(size: int) -> None:
    rank = get_rank()
    filler = torch.zeros(size)
    ours = {"loss": 1.0 + rank, "filler": filler}
    trees: list[Any] = [
        ours | ({"extra": torch.tensor([3.0, 5.0])} if rank == 1 else {}),
        {"deep": [ours | {f"only {rank}": {"x": (rank, 2.0)}}]},
        ours,
        {} if rank else ours,
    ]
    extra, deep, same, some = (all_reduce_mean(tree, missing="skip") for tree in trees)
    weighted = all_reduce_mean(trees[0], missing="skip", weight=1 + rank)
    longer = [ours] * (1 + rank)
    length = error_of(lambda: all_reduce_mean(longer, missing="skip")).splitlines()[0]
    wrong = ours | {"x": torch.zeros(2 + rank)}
    shape = error_of(lambda: all_reduce_mean(wrong, missing="skip")).splitlines()[0]

    assert (extra["loss"], extra["extra"].tolist()) == (2.0, [3.0, 5.0])
    assert {key: value for key, value in deep["deep"][0].items() if key != "filler"} == {
        "loss": 2.0,
        **{f"only {other}": {"x": (float(other), 2.0)} for other in range(3)},
    }
    assert same["loss"] == 2.0
    assert some["loss"] == 1.0
    assert weighted["loss"] == pytest.approx((1 + 2 * 2 + 3 * 3) / 6)
    assert weighted["extra"].tolist() == [3.0, 5.0]
    assert "by more than keys that are missing" in length
    assert shape.endswith("the ranks differ at ['x']:")
    if rank == 0:
        assert list(extra) == ["loss", "filler", "extra"]
    if rank == 1:
        assert list(deep["deep"][0])[:3] == ["loss", "filler", "only 1"]


# -- groups -------------------------------------------------------------------------------------


@pytest.mark.distributed(world_size=4)
def test_groups_reduce_by_themselves() -> None:
    rank = get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine, other = (odd, even) if rank % 2 else (even, odd)
    total = all_reduce_sum({"rank": rank}, group=mine)
    mean = all_reduce_mean(torch.full((300,), float(rank)), group=mine)[0].item()
    differ = error_of(lambda: all_reduce_max(torch.zeros(rank), group=mine)).splitlines()[1]
    strange = error_of(lambda: all_reduce_max(1, group=other))
    assert total == {"rank": [2, 4][rank % 2]}
    assert mean == [1.0, 2.0][rank % 2]
    assert differ.split(":")[0] == ["  rank 0", "  rank 1"][rank % 2]
    assert f"rank {rank} called all_reduce_max with a group that it is not in" in strange
    assert all_reduce_sum(1) == 4
