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


def flatten(tree: Any, *, lists_are_leaves: bool = False) -> tuple[Hashable, list[Any]]:
    """Return the tree's structure and its leaves, in canonical order.

    The structure is hashable: None for a leaf, else the steps of the paths from here, the keys,
    and the structures that they lead to. ``lists_are_leaves`` where a list holds rows.

    >>> flatten({"b": 1, "a": (2,)})
    ((("['a']", "['b']"), ('a', 'b'), ((('[0]',), range(0, 1), (None,)), None)), [2, 1])
    """
    leaves: list[Any] = []
    return _flatten(tree, leaves, _BUT_LISTS if lists_are_leaves else _SPLITTERS), leaves


def unflatten(tree: Any, structure: Any, leaves: Sequence[Any]) -> Any:
    """Return a copy of ``tree``, whose structure is given, that holds other ``leaves``."""
    return _unflatten(tree, structure, iter(leaves))


def paths_of(structure: Any, path: str = "") -> list[str]:
    """Return the path of each leaf, in canonical order."""
    if structure is None:
        return [path]
    return [
        longer
        for step, _, below in zip(*structure, strict=True)
        for longer in paths_of(below, path + step)
    ]


def merge(trees: Sequence[Any], path: str = "") -> Any:
    """Return a tree like the first, with the mapping keys of all of them.

    Where two trees have the same leaf, the first one's is kept.

    Raises:
        ValueError: with the path at which the trees differ by more than the keys of a mapping.

    >>> merge([{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"d": 4}}])
    {'a': 1, 'b': {'c': 2, 'd': 4}}
    """
    first = trees[0]
    if all(isinstance(tree, Mapping) for tree in trees):
        merged: Any = copy.copy(first)
        for key in dict.fromkeys(key for tree in trees for key in tree):
            merged[key] = merge([tree[key] for tree in trees if key in tree], f"{path}[{key!r}]")
        return merged
    steps, keys, _ = _split(first)
    if any(_split(tree)[0] != steps for tree in trees):
        raise ValueError(path)
    if not steps:
        return first
    below = zip(*(_split(tree)[2] for tree in trees), strict=True)
    return _rebuild(
        first, keys, [merge(each, path + step) for step, each in zip(steps, below, strict=True)]
    )


Steps = tuple[str, ...]
Splitter = Callable[[Any], tuple[Steps, Sequence[Any], Sequence[Any]]]


def _split(node: Any) -> tuple[Steps | None, Sequence[Any], Sequence[Any]]:
    """Return a container's steps, keys and children, in canonical order; no steps for a leaf."""
    splitter = _SPLITTERS[type(node)]
    return (None, (), ()) if splitter is None else splitter(node)


def _flatten(node: Any, leaves: list[Any], splitters: _Splitters) -> Any:
    splitter = splitters[type(node)]
    if splitter is None:
        leaves.append(node)
        return None
    steps, keys, children = splitter(node)
    if any(splitters[kind] for kind in set(map(type, children))):
        return steps, keys, tuple([_flatten(child, leaves, splitters) for child in children])
    leaves += children  # the common case, and this makes it fast
    return steps, keys, (None,) * len(steps)


def _unflatten(node: Any, structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    _, keys, below = structure
    if any(below):
        _, _, children = _split(node)
        new = [_unflatten(*pair, leaves) for pair in zip(children, below, strict=True)]
    else:
        new = list(islice(leaves, len(below)))
    return _rebuild(node, keys, new)


class _Splitters(dict[type, "Splitter | None"]):
    """What splits the containers of a type, found once for each; None for a leaf's type."""

    def __init__(self, *, lists_are_leaves: bool = False) -> None:
        super().__init__()
        self.lists_are_leaves = lists_are_leaves

    def __missing__(self, kind: type) -> Splitter | None:
        is_leaf = self.lists_are_leaves and issubclass(kind, list)
        self[kind] = splitter = None if is_leaf else _splitter_for(kind)
        return splitter


def _splitter_for(kind: type) -> Splitter | None:
    if issubclass(kind, Mapping):
        return _split_mapping
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = kind._fields
        dotted = tuple(f".{name}" for name in fields)
        return lambda node: (dotted, fields, node)
    if issubclass(kind, (list, tuple)):
        return lambda node: (_numbered(len(node)), range(len(node)), node)
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        dotted = tuple(f".{name}" for name in names)
        return lambda node: (dotted, names, [getattr(node, name) for name in names])
    return None


_SPLITTERS = _Splitters()
_BUT_LISTS = _Splitters(lists_are_leaves=True)


def _split_mapping(node: Mapping[Any, Any]) -> tuple[Steps, tuple[Any, ...], list[Any]]:
    steps, keys = _in_order(tuple(node), tuple(map(type, node)))
    return steps, keys, [node[key] for key in keys]


@lru_cache(maxsize=256)
def _in_order(keys: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Steps, tuple[Any, ...]]:
    """Return the steps and the keys of a mapping; their types tell 1 from True in the cache."""
    ordered = tuple(sorted(keys, key=_canonical))
    return tuple(f"[{key!r}]" for key in ordered), ordered


def _canonical(key: Any) -> tuple[str, str]:
    return type(key).__name__, key if isinstance(key, str) else repr(key)


@lru_cache(maxsize=256)
def _numbered(length: int) -> Steps:
    return tuple(f"[{index}]" for index in range(length))


def _rebuild(node: Any, keys: Sequence[Any], children: list[Any]) -> Any:
    """Return a container like ``node`` that holds ``children``."""
    kind = type(node)
    if kind is dict:
        in_order: dict[Any, Any] = dict.fromkeys(node)
        in_order.update(zip(keys, children, strict=True))
        return in_order
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
