"""Numbers into rows and back: kinds, exactness, and the form that comes back."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_utils.ground.trees import flatten
from ddp_utils.talk import bulk
from ddp_utils.talk.packing import (
    Leaf,
    common_kind,
    from_row,
    leaf_of,
    numbers_of,
    plan_for,
    rebuild_leaf,
    reduce_rows,
    to_row,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT64 = st.floats(width=64)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kind", "form"),
    [
        (1.5, "float", "python"),
        (3, "int", "python"),
        (True, "bool", "python"),
        (Color.RED, "int", "python"),
        (np.float64(2), "float", "scalar"),
        (np.float16(2), "float", "scalar"),
        (np.uint8(2), "int", "scalar"),
        (np.bool_(True), "bool", "scalar"),
        (np.zeros((2, 3), np.float32), "float", "array"),
        (torch.zeros(()), "float", "tensor"),
        (torch.zeros(2, dtype=torch.bfloat16), "float", "tensor"),
        (torch.zeros(2, dtype=torch.uint16), "int", "tensor"),
        (torch.zeros(2, dtype=torch.bool), "bool", "tensor"),
    ],
)
def test_what_a_leaf_is(value: Any, kind: str, form: str) -> None:
    leaf = leaf_of(value)
    assert (leaf.kind, leaf.form) == (kind, form)
    assert leaf.shape == tuple(getattr(value, "shape", ()))


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        None,
        1j,
        torch.zeros(2, dtype=torch.complex64),
        np.complex64(1),
        np.longdouble(1),
        np.array(["a"]),
        np.array([None]),
        np.datetime64("2024-01-01"),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        {1.0},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_real_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        leaf_of(value)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, 2.0], "float"),
        ([0, 1.5], "float"),
        ([False, 3], "int"),
        ([0, torch.tensor(1.5)], "float"),
        ([torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)], "float"),
        ([np.float32(1), torch.tensor(1.5)], "float"),
        ([torch.tensor(1), torch.tensor(1.5)], None),
        ([torch.tensor(1), 1.5], None),
        ([torch.tensor(True), torch.tensor(1)], None),
        ([np.int64(1), 2.5], None),
    ],
)
def test_python_numbers_stand_for_wider_kinds_and_others_do_not(
    values: list[Any], kind: str | None
) -> None:
    assert common_kind(map(leaf_of, values)) == kind
    assert common_kind(map(leaf_of, reversed(values))) == kind


@given(st.lists(st.one_of(INT64, FLOAT64, st.booleans()), max_size=20))
def test_a_row_gives_back_every_number_to_the_last_bit(numbers: list[Any]) -> None:
    structure, leaves = flatten(numbers)
    plan = plan_for("sum", structure, tuple(map(leaf_of, leaves)))
    row = np.frombuffer(to_row("sum", numbers, plan), np.int64)
    again = from_row("sum", row, plan)
    assert list(map(repr, again)) == [
        repr(int(x)) if x is True or x is False else repr(x) for x in numbers
    ]


@pytest.mark.parametrize("operation", ["sum", "min", "max"])
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_an_int_of_more_than_64_bits_is_refused(operation: Any, number: int) -> None:
    plan = plan_for(operation, None, (leaf_of(number),))
    with pytest.raises(OverflowError):
        to_row(operation, [number], plan)
    with pytest.raises(OverflowError):
        bulk.to_flat(operation, number, leaf_of(number))


def test_a_uint64_of_more_than_63_bits_is_refused() -> None:
    for value in (np.array([2**63], np.uint64), torch.tensor([2**63], dtype=torch.uint64)):
        leaf = leaf_of(value)
        with pytest.raises(OverflowError):
            to_row("sum", numbers_of(value, leaf), plan_for("sum", None, (leaf,)))
        with pytest.raises(OverflowError):
            bulk.to_flat("sum", value, leaf)


def test_the_digest_tells_apart_what_ranks_must_agree_on_and_nothing_else() -> None:
    def digest(tree: Any, operation: str = "mean") -> bytes:
        structure, leaves = flatten(tree)
        return plan_for(operation, structure, tuple(map(leaf_of, leaves))).digest

    one = torch.zeros(2)
    same = [{"a": one, "b": 1.0}, {"b": np.float32(3), "a": np.ones(2)}]
    assert len({digest(tree) for tree in same}) == 1
    others = [
        {"a": one},
        {"a": one, "c": 1.0},
        {"a": torch.zeros(3), "b": 1.0},
        {"a": torch.zeros(2, 1), "b": 1.0},
        {"a": one, "b": 1},
        {"a": one, "b": [1.0]},
        {"a": one, 1: 1.0},
        {"a": one, "1": 1.0},
    ]
    digests = {digest(tree) for tree in [same[0], *others]} | {digest(same[0], "sum")}
    assert len(digests) == len(others) + 2


shapes = st.sampled_from([(), (0,), (3,), (2, 2)])
FORMS: dict[str, list[Any]] = {
    "float": [torch.float64, torch.float32, np.dtype("float64"), np.dtype("float32")],
    "int": [torch.int64, torch.int32, torch.uint8, np.dtype("int64"), np.dtype("int8")],
    "bool": [torch.bool, np.dtype("bool")],
}


@st.composite
def stacks(draw: Any) -> list[Any]:
    """Values of one leaf from several ranks, as tensors or arrays."""
    dtype = draw(st.sampled_from([dtype for dtypes in FORMS.values() for dtype in dtypes]))
    shape = draw(shapes)
    name = str(dtype).removeprefix("torch.")
    if name == "bool":
        numbers: Any = st.booleans()
    elif name.startswith("float"):
        numbers = st.floats(width=int(name[5:]))
    else:
        info = np.iinfo(name)
        numbers = st.integers(int(info.min), int(info.max))
    size = math.prod(shape)
    values = []
    for _ in range(draw(st.integers(1, 4))):
        array = np.array(draw(st.lists(numbers, min_size=size, max_size=size)), name).reshape(shape)
        values.append(torch.from_numpy(array) if isinstance(dtype, torch.dtype) else array)
    return values


def reduced_in_numpy(operation: str, values: list[Any]) -> Any:
    """Return what NumPy makes of the stacked values, ints in numbers of any size."""
    stacked = np.stack([np.asarray(value) for value in values])
    with np.errstate(all="ignore"):
        if operation == "mean":
            return stacked.astype(np.float64).sum(axis=0) / len(stacked)
        if operation == "sum" and stacked.dtype.kind == "f":
            return stacked.astype(np.float64).sum(axis=0)
        if operation == "sum":
            return stacked.astype(object).sum(axis=0)
        return getattr(np, operation)(stacked, axis=0)


def same_numbers(ours: Any, expected: Any) -> bool:
    ours = np.asarray(ours)
    return ours.shape == np.shape(expected) and np.array_equal(
        ours, np.asarray(expected).astype(ours.dtype), equal_nan=ours.dtype.kind == "f"
    )


@pytest.mark.parametrize("operation", ["mean", "sum", "min", "max"])
@given(values=stacks())
def test_rows_reduce_as_numpy_reduces_the_stacked_values(operation: Any, values: list[Any]) -> None:
    leaf = leaf_of(values[0])
    plan = plan_for(operation, None, (leaf,))
    rows = [to_row(operation, numbers_of(value, leaf), plan) for value in values]
    stacked = np.frombuffer(b"".join(rows), np.int64).reshape(len(rows), -1)
    check(
        operation,
        leaf,
        values,
        lambda: rebuild_leaf(operation, leaf, reduce_rows(operation, stacked, plan.floats)),
    )


@pytest.mark.parametrize("operation", ["mean", "sum", "min", "max"])
@given(values=stacks())
def test_bulks_reduce_as_numpy_reduces_the_stacked_values(
    operation: Any, values: list[Any]
) -> None:
    leaf = leaf_of(values[0])
    flat = [bulk.to_flat(operation, value, leaf) for value in values]
    stacked = torch.stack([bulk.encode(operation, [part]) for part in flat])
    reduce = {"min": lambda x: x.amin(0), "max": lambda x: x.amax(0)}
    reduced = reduce.get(operation, lambda x: x.sum(0))(stacked)
    (part,) = bulk.decode(operation, reduced, [leaf])
    if operation == "mean":
        part = part / len(values)
    check(operation, leaf, values, lambda: bulk.rebuild_bulk_leaf(operation, leaf, part))


def check(operation: str, leaf: Leaf, values: list[Any], ours: Any) -> None:
    """Compare with NumPy's; a sum of ints that leaves 64 bits must be an error."""
    expected = reduced_in_numpy(operation, values)
    if leaf.kind == "int" and operation == "sum":
        too_large = [not -(2**63) <= x < 2**63 for x in np.ravel(expected).tolist()]
        if any(too_large):
            with pytest.raises(OverflowError):
                ours()
            return
    result = ours()
    with np.errstate(all="ignore"):
        assert same_numbers(result, expected)
    assert type(result) is type(values[0]) or leaf.shape == ()
    if leaf.kind == "float" or operation in ("min", "max"):
        assert result.dtype == values[0].dtype
    else:
        assert str(result.dtype).endswith("float64" if operation == "mean" else "int64")


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=5))
def test_a_weighted_mean_is_sum_wx_by_sum_w(pairs: list[tuple[float, float]]) -> None:
    weights, numbers = np.array(pairs).T
    rows = numbers[:, None].copy().view(np.int64)
    (mean,) = reduce_rows("mean", rows, np.array([True]), weights)
    if weights.sum() == 0:
        assert math.isnan(mean)
    else:
        assert mean == pytest.approx((weights * numbers).sum() / weights.sum(), abs=1e-9)


def test_a_rank_of_weight_zero_does_not_count_even_with_a_nan() -> None:
    rows = np.array([[1.0], [math.nan]]).view(np.int64)
    assert reduce_rows("mean", rows, np.array([True]), np.array([2.0, 0.0])) == [1.0]
    part = torch.tensor([math.nan], dtype=torch.float64)
    assert bulk.encode("mean", [part], 0.0).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_small_floats_are_reduced_in_double_precision(dtype: torch.dtype) -> None:
    value = torch.tensor([400.0, -0.0, 0.5], dtype=dtype)
    leaf = leaf_of(value)
    plan = plan_for("mean", None, (leaf,))
    rows = np.frombuffer(to_row("mean", numbers_of(value, leaf), plan) * 300, np.int64)
    mean = rebuild_leaf("mean", leaf, reduce_rows("mean", rows.reshape(300, 3), plan.floats))
    assert mean.dtype == dtype  # their sum, 120,000, is beyond float16
    assert mean.tolist() == value.tolist()
