"""How is a nested container taken apart into leaves, and put together again?

A tree is any nesting of mappings, lists, tuples, named tuples and dataclass instances.
Everything else is a leaf. Mappings are walked in one canonical key order, so that two ranks
that filled a dictionary in different orders still see the same sequence of leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

__all__ = ["flatten", "leaves_with_paths", "map_leaves", "merge", "paths_of", "unflatten"]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of ``tree`` with ``fn`` applied to each leaf, in canonical order.

    Containers keep their type and mappings their own key order; the input is untouched.

    >>> map_leaves(lambda x: 2 * x, {"a": 1, "b": (2, [3])})
    {'a': 2, 'b': (4, [6])}
    """
    structure, leaves = flatten(tree)
    return unflatten(tree, structure, [fn(leaf) for leaf in leaves])


def leaves_with_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` in canonical order; a path reads like Python.

    >>> list(leaves_with_paths({"b": [1, 2], "a": 0}))
    [("['a']", 0), ("['b'][0]", 1), ("['b'][1]", 2)]
    """
    structure, leaves = flatten(tree)
    yield from zip(paths_of(structure, path), leaves, strict=True)


def flatten(tree: Any) -> tuple[Hashable, list[Any]]:
    """Return the tree's structure and its leaves, in canonical order.

    The structure is hashable: it is None for a leaf, else the kind of path step, the keys in
    canonical order and the structures below them.

    >>> flatten({"b": 1, "a": [2]})
    (('[]', ('a', 'b'), (('[]', (0,), (None,)), None)), [2, 1])
    """
    leaves: list[Any] = []
    return _flatten(tree, leaves), leaves


def unflatten(tree: Any, structure: Any, leaves: Sequence[Any]) -> Any:
    """Return a copy of ``tree``, whose structure is given, that holds other ``leaves``."""
    return _unflatten(tree, structure, iter(leaves))


def paths_of(structure: Any, path: str = "") -> list[str]:
    """Return the path of each leaf, in canonical order."""
    if structure is None:
        return [path]
    step, keys, below = structure
    paths: list[str] = []
    for key, child in zip(keys, below, strict=True):
        paths += paths_of(child, f"{path}.{key}" if step == "." else f"{path}[{key!r}]")
    return paths


def merge(trees: Sequence[Any], path: str = "") -> Any:
    """Return a tree like the first, with the mapping keys of all of them.

    Where two trees have the same leaf, the first one's is kept.

    Raises:
        ValueError: with the path at which the trees differ by more than the keys of a mapping.

    >>> merge([{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"d": 4}}])
    {'a': 1, 'b': {'c': 2, 'd': 4}}
    """
    first = trees[0]
    splits = [split(tree) if (split := _SPLITS[type(tree)]) else None for tree in trees]
    if not any(splits):
        return first
    if all(isinstance(tree, Mapping) for tree in trees):
        merged: Any = copy.copy(first)
        for key in dict.fromkeys(key for tree in trees for key in tree):
            merged[key] = merge([tree[key] for tree in trees if key in tree], f"{path}[{key!r}]")
        return merged
    if not all(splits) or len({split[:2] for split in splits if split}) > 1:
        raise ValueError(path)
    step, keys, _ = splits[0]  # type: ignore[misc]  # all of them are there
    children = []
    for key, *each in zip(keys, *(split[2] for split in splits if split), strict=True):
        children.append(merge(each, f"{path}.{key}" if step == "." else f"{path}[{key!r}]"))
    return _rebuild(first, keys, children)


def _flatten(node: Any, leaves: list[Any]) -> Any:
    split = _SPLITS[type(node)]
    if split is None:
        leaves.append(node)
        return None
    step, keys, children = split(node)
    return step, keys, tuple([_flatten(child, leaves) for child in children])


def _unflatten(node: Any, structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    _, keys, below = structure
    if any(below):
        _, _, children = _SPLITS[type(node)](node)  # type: ignore[misc]  # a container splits
        new = [_unflatten(*pair, leaves) for pair in zip(children, below, strict=True)]
    else:
        new = list(islice(leaves, len(below)))
    return _rebuild(node, keys, new)


Split = Callable[[Any], tuple[str, tuple[Any, ...], Sequence[Any]]]


class _Splits(dict[type, "Split | None"]):
    """What splits a container of a type into (step, keys, children); None for a leaf's type."""

    def __missing__(self, kind: type) -> Split | None:
        self[kind] = split = _how_to_split(kind)
        return split


def _how_to_split(kind: type) -> Split | None:
    if issubclass(kind, Mapping):
        return _split_mapping
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = kind._fields
        return lambda node: (".", fields, node)
    if issubclass(kind, (list, tuple)):
        return lambda node: ("[]", tuple(range(len(node))), node)
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        return lambda node: (".", names, [getattr(node, name) for name in names])
    return None


_SPLITS = _Splits()


def _split_mapping(node: Mapping[Any, Any]) -> tuple[str, tuple[Any, ...], list[Any]]:
    keys = _in_order(tuple(node))
    return "[]", keys, [node[key] for key in keys]


@lru_cache(maxsize=256)
def _in_order(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(keys, key=_canonical))


def _canonical(key: Any) -> tuple[str, str]:
    return type(key).__name__, key if isinstance(key, str) else repr(key)


def _rebuild(node: Any, keys: tuple[Any, ...], children: list[Any]) -> Any:
    """Return a container like ``node`` that holds ``children``."""
    kind = type(node)
    if kind is dict:
        by_key = dict(zip(keys, children, strict=True))
        return {key: by_key[key] for key in node}
    if kind in (list, tuple):
        return kind(children)
    if isinstance(node, Mapping):
        new: Any = copy.copy(node)
        for key, child in zip(keys, children, strict=True):
            new[key] = child
        return new
    if isinstance(node, (list, tuple)):
        return kind(*children) if hasattr(node, "_fields") else kind(children)
    new = copy.copy(node)
    for name, child in zip(keys, children, strict=True):
        object.__setattr__(new, name, child)
    return new
