"""What does a checkpoint hold in place of an object, so that ``weights_only=True`` reads it back?

An object with a ``state_dict()`` is held as its state, a model's under bare keys. A namespace is
held as a dictionary, a path as a string, a NumPy number as Python's. Everything else stays what
it is, and whether a file may hold it is for torch to say.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import io
import os
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from ddp_utils.models.prefixes import strip_module_prefix

__all__ = ["check_readable", "has_state", "to_plain"]

NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
SCALARS = (bool, int, float, complex, str, bytes)
CONTAINERS = (dict, OrderedDict, list, tuple)
READABLE = {*SCALARS, *CONTAINERS, type(None), torch.Tensor, nn.Parameter} - {bytes}
"""The classes that need no question to torch: whatever their value, it reads it."""


def to_plain(value: Any) -> Any:
    """Return ``value`` with states in place of objects, and plain types in place of others.

    Containers in which nothing changes are the same objects; the input is untouched.

    >>> from pathlib import Path
    >>> to_plain({"args": argparse.Namespace(lr=np.float64(0.5), out=Path("runs"))})
    {'args': {'lr': 0.5, 'out': 'runs'}}
    """
    if isinstance(value, nn.Module):
        return to_plain(strip_module_prefix(value.state_dict(), model=value))
    if has_state(value):
        return to_plain(value.state_dict())
    if isinstance(value, NAMESPACES):
        return to_plain(vars(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return _plain_number(value)
    if isinstance(value, dict):
        return _plain_dict(value)
    if type(value) in (list, tuple):
        children = [to_plain(child) for child in value]
        same = all(new is old for new, old in zip(children, value, strict=True))
        return value if same else type(value)(children)
    return value


def has_state(value: Any) -> bool:
    """Whether a value is an object that saves itself by ``state_dict``."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


def _plain_number(value: np.generic) -> Any:
    number = float(value) if isinstance(value, np.longdouble) else value.item()
    return number if type(number) in SCALARS else value


def _plain_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    pairs = [(to_plain(key), to_plain(child)) for key, child in value.items()]
    if all(a is b and c is d for (a, c), (b, d) in zip(pairs, value.items(), strict=True)):
        return value
    new: dict[Any, Any] = {} if type(value) is dict else copy.copy(value)
    new.clear()  # a copy keeps the type, and what torch hangs on a state (``_metadata``)
    new.update(pairs)
    if len(new) < len(value):
        raise ValueError(f"two of these keys are the same as plain values: {list(value)}")
    return new


def check_readable(value: Any, path: str = "") -> None:
    """Raise for the first thing in a tree that ``torch.load(weights_only=True)`` would refuse.

    Raises:
        TypeError: Names its path and class, and what to write instead.
    """
    for step, child in _children(value):
        check_readable(child, path + step)
    if type(value) not in READABLE and (names := _refused(value)):
        raise TypeError(
            f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: a file that is "
            f"read without running code has no {', '.join(names)}. Store {_advice(value)}; or "
            "keep the class, with torch.serialization.add_safe_globals before saving and before "
            "loading, or with weights_only=False in both calls."
        )


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if type(key) not in SCALARS:
                yield f"'s key {key!r}", key
            yield f"[{key!r}]", child
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))


def _refused(value: Any) -> list[str]:
    """Return what torch would refuse to build from a file that holds this value."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # what pickle cannot write raises anything
        return [f"way to write it ({error})"]
    buffer.seek(0)
    return get_unsafe_globals_in_checkpoint(buffer)  # type: ignore[no-any-return,unused-ignore]


def _advice(value: Any) -> str:
    """Return what to write for a value that a checkpoint cannot hold, as a piece of code."""
    if isinstance(value, np.ndarray):
        return "torch.from_numpy(x) or x.tolist()"
    if isinstance(value, np.generic):
        return "x.item() or str(x)"
    if isinstance(value, enum.Enum):
        return "x.value"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict(x)"
    if isinstance(value, Mapping):
        return "dict(x)"
    if hasattr(value, "__iter__"):
        return "list(x)"
    return "what it holds, as numbers, strings, tensors, lists and dictionaries of these"
