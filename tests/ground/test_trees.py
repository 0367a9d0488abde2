"""Trees: what is a leaf, in which order, and what comes back."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_utils.ground.trees import flatten, leaves_with_paths, map_leaves, merge, unflatten


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    images: Any
    labels: Any


keys = st.one_of(st.text(max_size=3), st.integers(0, 5), st.booleans())
trees = st.recursive(
    st.one_of(st.integers(), st.floats(allow_nan=False), st.none(), st.text(max_size=2)),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(keys, below, max_size=4),
        st.dictionaries(keys, below, max_size=4).map(OrderedDict),
        st.builds(Point, below, below),
        st.builds(Batch, below, below),
    ),
    max_leaves=12,
)


@given(trees)
def test_taking_apart_and_putting_together_gives_the_same(tree: Any) -> None:
    structure, leaves = flatten(tree)
    again = unflatten(tree, structure, leaves)
    assert again == tree
    assert repr(again) == repr(tree)  # the order of keys, and True beside 1, too
    hash(structure)


@given(trees)
def test_paths_lead_to_their_leaves(tree: Any) -> None:
    for path, leaf in leaves_with_paths(tree):
        assert eval("tree" + path) is leaf


@given(st.dictionaries(keys, st.integers(), max_size=6), st.randoms())
def test_the_order_in_which_a_dictionary_was_filled_does_not_matter(
    tree: dict[Any, int], random: Any
) -> None:
    items = list(tree.items())
    random.shuffle(items)
    assert list(leaves_with_paths(dict(items))) == list(leaves_with_paths(tree))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (defaultdict(list, a=1), defaultdict(list, a=2)),
        (Counter("aab"), Counter({"a": 4, "b": 2})),
        (Point(1, [2]), Point(2, [4])),
        (Batch(1, (2, 3)), Batch(2, (4, 6))),
        ([], []),
        ({}, {}),
        (5, 10),
    ],
)
def test_containers_keep_their_type(tree: Any, expected: Any) -> None:
    doubled = map_leaves(lambda leaf: 2 * leaf, tree)
    assert doubled == expected
    assert type(doubled) is type(tree)
    if isinstance(tree, defaultdict):
        assert doubled.default_factory is list


def test_classes_strings_and_sets_are_leaves() -> None:
    leaves = [Batch, "text", b"bytes", {1, 2}, None, range(3)]
    assert [leaf for _, leaf in leaves_with_paths(leaves)] == leaves


def test_a_dataclass_keeps_what_is_no_field() -> None:
    @dataclasses.dataclass
    class Meter:
        total: float

    meter = Meter(1.0)
    meter.name = "loss"  # type: ignore[attr-defined]
    doubled = map_leaves(lambda leaf: 2 * leaf, meter)
    assert (doubled.total, doubled.name, meter.total) == (2.0, "loss", 1.0)


def test_merging_takes_every_key_and_the_first_ones_leaves() -> None:
    ours = {"loss": 1, "parts": [{"a": 2}]}
    theirs = {"extra": (3, 4), "parts": [{"b": 5, "a": 6}], "loss": 7}
    assert merge([ours, theirs]) == {"loss": 1, "parts": [{"a": 2, "b": 5}], "extra": (3, 4)}
    assert merge([theirs, ours])["loss"] == 7
    assert ours == {"loss": 1, "parts": [{"a": 2}]}


@pytest.mark.parametrize(
    ("ours", "theirs", "path"),
    [
        ({"a": [1]}, {"a": [1, 2]}, "['a']"),
        ({"a": 1}, {"a": {"b": 1}}, "['a']"),
        ({"a": {"b": 1}}, {"a": 1}, "['a']"),
        ([Point(1, 2)], [[1, 2]], "[0]"),
        ({0: 1, 1: 2}, [1], ""),
    ],
)
def test_what_differs_by_more_than_keys_does_not_merge(ours: Any, theirs: Any, path: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(path)}$"):
        merge([ours, theirs])
