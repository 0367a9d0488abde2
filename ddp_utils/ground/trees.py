"""How is a nested container taken apart into leaves, and put together again?

A tree is any nesting of mappings, lists, tuples, named tuples and dataclass instances.
Everything else is a leaf. Mappings are walked in one canonical key order, so that two ranks
that filled a dictionary in different orders still see the same sequence of leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["leaves_with_paths", "map_leaves"]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of ``tree`` with ``fn`` applied to each leaf, in canonical order.

    Containers keep their type and mappings their own key order; the input is untouched.

    >>> map_leaves(lambda x: 2 * x, {"a": 1, "b": (2, [3])})
    {'a': 2, 'b': (4, [6])}
    """
    branches = _branches(tree)
    if branches is None:
        return fn(tree)
    return _rebuild(tree, {key: map_leaves(fn, child) for key, child in branches})


def leaves_with_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` in canonical order; a path reads like Python.

    >>> list(leaves_with_paths({"b": [1, 2], "a": 0}))
    [("['a']", 0), ("['b'][0]", 1), ("['b'][1]", 2)]
    """
    branches = _branches(tree)
    if branches is None:
        yield path, tree
        return
    by_name = dataclasses.is_dataclass(tree) or hasattr(tree, "_fields")
    for key, child in branches:
        yield from leaves_with_paths(child, f"{path}.{key}" if by_name else f"{path}[{key!r}]")


def _branches(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the node's ``(key, child)`` pairs in canonical order, or None for a leaf."""
    if isinstance(node, Mapping):
        return sorted(node.items(), key=_canonical)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _canonical(item: tuple[Any, Any]) -> tuple[str, str]:
    key = item[0]
    return type(key).__name__, key if isinstance(key, str) else repr(key)


def _rebuild(node: Any, children: dict[Any, Any]) -> Any:
    """Return a container like ``node`` that holds ``children``."""
    if type(node) is dict:
        return {key: children[key] for key in node}
    if type(node) in (list, tuple):
        return type(node)(children.values())
    if isinstance(node, Mapping):
        new = copy.copy(node)
        for key in node:
            new[key] = children[key]  # type: ignore[index]  # every mapping in use is mutable
        return new
    if isinstance(node, (list, tuple)):
        return (
            type(node)(*children.values())
            if hasattr(node, "_fields")
            else type(node)(children.values())
        )
    new = copy.copy(node)
    for name, child in children.items():
        object.__setattr__(new, name, child)
    return new
