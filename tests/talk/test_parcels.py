"""Any value as one run of bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddp_utils.talk.parcels import pack, unpack

CPU = torch.device("cpu")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.complex64,
    torch.int8,
    torch.uint16,
    torch.bool,
]


@dataclasses.dataclass
class Result:
    scores: Any
    name: str


def through(value: Any) -> Any:
    parcel = pack(value)
    laid = parcel.lay_out(CPU)
    assert laid.shape == (parcel.size,)
    return unpack(laid)


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    )
)
def test_plain_values_come_through(value: Any) -> None:
    assert through(value) == value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_tensors_of_every_kind_come_through(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    again = through([tensor, "between", tensor])
    for each in (again[0], again[2]):
        assert each.dtype == dtype
        assert each.shape == tensor.shape
        assert torch.equal(each.to(torch.complex128), tensor.to(torch.complex128))


def test_views_that_are_not_contiguous_come_through_as_they_look() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = [base.T, base[:, ::2], base[1], base.expand(2, 4, 6), torch.tensor([1 + 2j]).conj()]
    for view in views:
        assert torch.equal(through(view), view)


def test_a_value_of_many_kinds_comes_through() -> None:
    value = Result({"a": (np.arange(3), torch.ones(2), None)}, "run")
    again = through(value)
    assert again.name == "run"
    assert type(again.scores["a"]) is tuple
    assert again.scores["a"][0].tolist() == [0, 1, 2]
    model = nn.Linear(2, 1)
    assert torch.equal(through(model).weight, model.weight)
    assert isinstance(through(model).weight, nn.Parameter)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(through(sparse).to_dense(), torch.eye(3))


def test_tensors_arrive_detached_and_share_nothing() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    again = through([tensor, tensor])
    assert not again[0].requires_grad
    again[0].zero_()
    assert again[1].tolist() == [2.0, 2.0]
    assert tensor.tolist() == [2.0, 2.0]


def test_what_does_not_pickle_is_an_error() -> None:
    with pytest.raises(Exception, match="pickle"):
        pack(lambda: None)


def test_only_values_with_tensors_that_are_all_there_are_on_an_accelerator() -> None:
    assert not pack("text").on_accelerator
    assert not pack(torch.ones(2)).on_accelerator
