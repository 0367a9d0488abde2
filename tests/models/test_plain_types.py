"""Does what goes into a checkpoint come out of it, under ``weights_only=True``?"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import types
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from ddp_utils.models.plain_types import check_readable, to_plain


def through_a_file(value: Any) -> Any:
    plain = to_plain(value)
    check_readable(plain, "value")
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN |= st.binary(min_size=1) | st.complex_numbers(allow_nan=False)
NUMPY = st.one_of(
    st.integers(-100, 100).map(np.int64),
    st.integers(0, 200).map(np.uint8),
    st.booleans().map(np.bool_),
    st.floats(-1, 1, width=32).map(np.float32),
    st.floats(-1, 1).map(np.float64),
    st.floats(-1, 1).map(np.longdouble),
    st.text().map(np.str_),
)
PATHS = st.sampled_from([Path("runs/3"), PurePosixPath("/data")])
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text("abcxyz", min_size=1)
    return st.one_of(
        st.lists(children),
        st.lists(children).map(tuple),
        st.dictionaries(KEYS, children),
        st.dictionaries(KEYS, children).map(collections.OrderedDict),
        st.dictionaries(names, children).map(lambda d: argparse.Namespace(**d)),
        st.dictionaries(names, children).map(lambda d: types.SimpleNamespace(**d)),
    )


@given(st.recursive(PLAIN, containers, max_leaves=10).filter(lambda v: "amespace(" not in repr(v)))
def test_plain_trees_come_out_as_they_went_in(tree: Any) -> None:
    assert to_plain(tree) is tree
    assert through_a_file(tree) == tree


@given(st.recursive(PLAIN | NUMPY | PATHS, containers, max_leaves=12))
def test_any_tree_of_such_things_can_be_stored_and_is_plain_then(tree: Any) -> None:
    plain = to_plain(tree)
    assert to_plain(plain) is plain
    assert through_a_file(tree) == plain


def test_each_thing_becomes_its_plain_counterpart() -> None:
    args = argparse.Namespace(lr=np.float64(0.5), out=Path("runs"), inner=argparse.Namespace(n=1))
    value = {"args": args, np.int64(3): [np.bool_(True)], "t": torch.float32}
    assert through_a_file(value) == {
        "args": {"lr": 0.5, "out": "runs", "inner": {"n": 1}},
        3: [True],
        "t": torch.float32,
    }
    assert isinstance(value["args"], argparse.Namespace)  # the input is untouched


def test_keys_that_would_meet_are_an_error() -> None:
    with pytest.raises(ValueError, match="the same"):
        to_plain({Path("a"): 1, "a": 2})


def test_a_state_keeps_its_order_its_type_and_what_torch_hangs_on_it() -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    held = through_a_file(nn.DataParallel(bare))
    assert list(held) == list(bare.state_dict())
    assert held._metadata == bare.state_dict()._metadata  # type: ignore[attr-defined]


def test_objects_in_lists_and_dictionaries_are_held_as_their_state() -> None:
    models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models.values()]
    held = through_a_file({"models": models, "optimizers": optimizers})
    assert list(held["models"]["b"]) == ["weight", "bias"]
    assert held["optimizers"][1]["param_groups"][0]["lr"] == 0.5


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Config:
    lr: float = 0.1


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (np.zeros(2), "torch.from_numpy(x)"),
        (Colour.RED, "x.value"),
        (Config(), "dataclasses.asdict(x)"),
        (Pair(1, 2), "list(x)"),
        (frozenset([1]), "list(x)"),
        (collections.defaultdict(int, a=1), "dict(x)"),
        (np.datetime64("2026-01-01"), "str(x)"),
        (lambda: 0, "numbers, strings"),
        (b"", "list(x)"),  # pickle's second protocol has no letter for it
        (nn.Linear, "numbers, strings"),
    ],
    ids=lambda value: getattr(type(value), "__name__", "?"),
)
def test_what_would_not_load_again_is_named_before_it_is_written(value: Any, advice: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_readable({"a": [0, {"b": value}]}, "config")
    text = str(caught.value)
    assert text.startswith("config['a'][1]['b'] is a ")
    assert advice in text
    assert "weights_only=False" in text


def test_a_key_is_looked_at_too() -> None:
    with pytest.raises(TypeError, match="config's key"):
        check_readable({Colour.RED: 1}, "config")


def test_classes_that_torch_was_told_to_trust_are_fine() -> None:
    with torch.serialization.safe_globals([Config]):
        check_readable(Config(), "config")


def test_every_scheduler_of_torch_can_be_stored() -> None:
    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)

    optimizer = sgd()
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    schedulers: list[Any] = [
        lr_scheduler.OneCycleLR(sgd(), 0.1, 10),
        lr_scheduler.CyclicLR(sgd(), 0.1, 0.2),
        lr_scheduler.ReduceLROnPlateau(sgd()),
        lr_scheduler.LambdaLR(sgd(), lambda epoch: 1.0),
        lr_scheduler.MultiStepLR(sgd(), [1, 2]),
        lr_scheduler.CosineAnnealingWarmRestarts(sgd(), 3),
        lr_scheduler.SequentialLR(optimizer, parts, [2]),
        lr_scheduler.ChainedScheduler(parts),
        torch.optim.swa_utils.SWALR(sgd(), 0.1),
        torch.amp.GradScaler("cpu"),
    ]
    for scheduler in schedulers:
        through_a_file(scheduler)
