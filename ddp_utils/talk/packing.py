"""How do the numbers of a tree become one buffer, and reduced numbers a tree again?

Pure functions. A number travels in eight bytes: a float as a float64, an int or a bool as an
int64, so that floats keep all their digits and ints are exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_utils.ground.trees import paths_of

__all__ = [
    "Leaf",
    "Plan",
    "leaf_of",
    "numbers_of",
    "plan_for",
    "reduce_rows",
    "rebuild_leaf",
    "to_row",
]

Operation = Literal["mean", "sum", "min", "max"]
Kind = Literal["bool", "int", "float"]
KINDS: tuple[Kind, ...] = ("bool", "int", "float")


@dataclass(frozen=True)
class Leaf:
    """What a leaf of numbers is: the kind and shape that ranks must agree on, and its own form.

    ``form`` is ``python``, ``scalar`` or ``array`` (NumPy's), or ``tensor``; ``dtype`` is
    NumPy's or torch's, None for a Python number.
    """

    kind: Kind
    shape: tuple[int, ...] = ()
    form: Literal["python", "scalar", "array", "tensor"] = "python"
    dtype: Any = None

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


PYTHON = {float: Leaf("float"), int: Leaf("int"), bool: Leaf("bool")}
INTEGERS = {
    getattr(torch, name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def leaf_of(value: Any) -> Leaf:
    """Return what a leaf is.

    Raises:
        TypeError: It holds no real numbers that a reduction could keep exact.
    """
    leaf = PYTHON.get(type(value))
    if leaf is not None:
        return leaf
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            raise TypeError(f"is a {value.layout} tensor on {value.device}; make it dense")
        return _tensor_leaf(value.dtype, tuple(value.shape))
    if isinstance(value, (np.ndarray, np.generic)):
        form: Literal["array", "scalar"] = "array" if isinstance(value, np.ndarray) else "scalar"
        return _numpy_leaf(value.dtype, value.shape, form)
    for kind, leaf in PYTHON.items():
        if isinstance(value, kind):
            return leaf
    raise TypeError(f"is a {type(value).__name__}, not a number, an array or a tensor")


@lru_cache(maxsize=1024)
def _tensor_leaf(dtype: torch.dtype, shape: tuple[int, ...]) -> Leaf:
    if dtype is torch.bool:
        return Leaf("bool", shape, "tensor", dtype)
    if dtype.is_floating_point:
        return Leaf("float", shape, "tensor", dtype)
    if dtype in INTEGERS:
        return Leaf("int", shape, "tensor", dtype)
    raise TypeError(f"is a tensor of {dtype}; only real numbers can be reduced")


@lru_cache(maxsize=1024)
def _numpy_leaf(
    dtype: np.dtype[Any], shape: tuple[int, ...], form: Literal["array", "scalar"]
) -> Leaf:
    kinds: dict[str, Kind] = {"b": "bool", "i": "int", "u": "int", "f": "float"}
    if dtype.kind not in kinds or dtype.itemsize > 8:
        raise TypeError(f"is NumPy's {dtype}; only real numbers of up to 64 bits can be reduced")
    return Leaf(kinds[dtype.kind], shape, form, dtype)


@dataclass(frozen=True)
class Plan:
    """How the leaves of one structure lie in a row of numbers."""

    paths: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    size: int
    floats: NDArray[np.bool_]
    """Which numbers of the row are floats, shape ``(size,)``."""
    digest: bytes
    """Of what all ranks must agree on, 16 bytes."""


@lru_cache(maxsize=64)
def plan_for(operation: str, structure: Hashable, leaves: tuple[Leaf, ...]) -> Plan:
    """Return the plan for a tree with this structure and these leaves.

    >>> plan_for("mean", None, (Leaf("float", (2, 3)),)).size
    6
    """
    paths = tuple(paths_of(structure))
    sizes = [leaf.size for leaf in leaves]
    floats = np.repeat(np.array([leaf.kind == "float" for leaf in leaves], np.bool_), sizes)
    lines = [f"{p}\t{leaf.kind}\t{leaf.shape}" for p, leaf in zip(paths, leaves, strict=True)]
    digest = hashlib.blake2b("\n".join([operation, *lines]).encode(), digest_size=16).digest()
    return Plan(paths, leaves, sum(sizes), floats, digest)


def numbers_of(value: Any, leaf: Leaf) -> list[Any]:
    """Return a leaf's numbers, flat, as Python's."""
    if leaf.form == "python":
        return [value]
    if not leaf.shape:
        return [value.item()]
    numbers: list[Any] = value.reshape(-1).tolist()
    return numbers


def to_row(operation: Operation, numbers: Sequence[Any], floats: NDArray[np.bool_]) -> bytes:
    """Return numbers as eight bytes each; for a mean all as floats.

    Raises:
        OverflowError: An int does not fit in 64 bits.
    """
    if operation == "mean" or floats.all():
        return np.array(numbers, np.float64).tobytes()
    row = np.empty(len(numbers), np.int64)
    row[~floats] = [x for x, is_float in zip(numbers, floats, strict=True) if not is_float]
    row[floats] = np.array(
        [x for x, is_float in zip(numbers, floats, strict=True) if is_float], np.float64
    ).view(np.int64)
    return row.tobytes()


def reduce_rows(
    operation: Operation,
    rows: NDArray[np.int64],
    floats: NDArray[np.bool_],
    weights: NDArray[np.float64] | None = None,
) -> list[Any]:
    """Reduce the ranks' rows, shape ``(ranks, size)``, to one list of numbers.

    A mean is ``sum(w x) / sum(w)``; a rank of weight zero does not count, even with a NaN.
    """
    if operation == "mean":
        return _mean(rows.view(np.float64), weights)
    reduced: list[Any] = [0] * len(floats)
    with np.errstate(all="ignore"):
        of_floats = FLOATS[operation](rows[:, floats].view(np.float64), 0).tolist()
    of_ints = [INTS[operation](column) for column in rows[:, ~floats].T.tolist()]
    for is_float, numbers in ((True, of_floats), (False, of_ints)):
        for index, number in zip(np.flatnonzero(floats == is_float), numbers, strict=True):
            reduced[index] = number
    return reduced


FLOATS: dict[str, Callable[..., NDArray[np.float64]]] = {
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
}
INTS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "min": min, "max": max}


def _mean(rows: NDArray[np.float64], weights: NDArray[np.float64] | None) -> list[float]:
    with np.errstate(all="ignore"):
        if weights is None:
            mean = rows.sum(0) / len(rows)
        else:
            counted = weights != 0
            mean = weights[counted] @ rows[counted] / weights.sum()
    numbers: list[float] = mean.tolist()
    return numbers


def rebuild_leaf(operation: Operation, leaf: Leaf, numbers: Sequence[Any], like: Any) -> Any:
    """Return reduced numbers in the form of a leaf, on the device of ``like``.

    Means of ints and bools are float64, sums of them int64 as with ``torch.sum``.

    Raises:
        OverflowError: An int does not fit in its dtype.
    """
    if leaf.form == "python":
        return bool(numbers[0]) if leaf.kind == "bool" and operation in "min max" else numbers[0]
    dtype = result_dtype(operation, leaf)
    if leaf.form == "scalar":
        return dtype.type(numbers[0])
    if leaf.form == "array":
        return np.array(numbers, dtype).reshape(leaf.shape)
    return _tensor(numbers, dtype, leaf.shape).to(like.device)


def result_dtype(operation: Operation, leaf: Leaf) -> Any:
    """Return the dtype of a reduced tensor or array."""
    if operation in ("min", "max") or leaf.kind == "float":
        return leaf.dtype
    name = (
        "float64" if operation == "mean" else "uint64" if "uint64" in str(leaf.dtype) else "int64"
    )
    return getattr(torch, name) if leaf.form == "tensor" else np.dtype(name)


def _tensor(numbers: Sequence[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of numbers; through NumPy where it can, which is faster by far."""
    like = _NUMPY_DTYPES.get(dtype)
    if like is None:
        return torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(shape)
    with np.errstate(over="ignore"):  # too large for float32 is infinity, as in torch
        array = np.array(numbers if shape else numbers[0], like)
    return torch.from_numpy(array.reshape(shape))


_NUMPY_DTYPES = {torch.float64: np.dtype("float64"), torch.float32: np.dtype("float32")}
_NUMPY_DTYPES |= {dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in INTEGERS}
