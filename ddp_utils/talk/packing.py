"""How do the numbers of a tree become one row, and reduced numbers leaves again?

Pure functions. A number of a row takes eight bytes: a float as a float64, an int or a bool as an
int64, so that floats keep all their digits and ints are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_utils.ground.trees import paths_of
from ddp_utils.talk.agreement import digest_of

__all__ = [
    "Leaf",
    "Operation",
    "Plan",
    "common_kind",
    "from_row",
    "leaf_of",
    "numbers_of",
    "plan_for",
    "plan_for_types",
    "plan_of",
    "rebuild_leaf",
    "reduce_rows",
    "result_dtype",
    "to_row",
]

Operation = Literal["mean", "sum", "min", "max"]
Kind = Literal["bool", "int", "float"]
Form = Literal["python", "scalar", "array", "tensor"]
KINDS: tuple[Kind, ...] = ("bool", "int", "float")


@dataclass(frozen=True, eq=False)  # each is made once: identity is enough, and is fast
class Leaf:
    """What a leaf of numbers is: the kind and shape that ranks must agree on, and its own form.

    ``form`` is ``python``, ``scalar`` or ``array`` (NumPy's), or ``tensor``; ``dtype`` is
    NumPy's or torch's, None for a Python number.
    """

    kind: Kind
    shape: tuple[int, ...] = ()
    form: Form = "python"
    dtype: Any = None

    def __str__(self) -> str:
        if self.form == "python":
            return f"a Python {self.kind}"
        if self.form == "scalar":
            return f"a NumPy {self.dtype}"
        return f"{self.form} of shape {self.shape}, {self.dtype}"

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def terms(self) -> str:
        """What the ranks must agree on, as text."""
        return f"{self.kind} {self.shape}"


PYTHON = {float: Leaf("float"), int: Leaf("int"), bool: Leaf("bool")}
INTEGERS = {
    getattr(torch, name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def leaf_of(value: Any) -> Leaf:
    """Return what a leaf is.

    Raises:
        TypeError: It holds no real numbers of at most 64 bits. The text goes on from the path.
    """
    leaf = PYTHON.get(type(value))
    if leaf is not None:
        return leaf
    if type(value) is torch.Tensor or isinstance(value, torch.Tensor):  # the first is faster
        if value.layout is not torch.strided or value.is_meta:
            raise TypeError(f"is a tensor of {value.layout} on {value.device}: make it dense")
        return _tensor_leaf(value.dtype, value.shape)
    if isinstance(value, np.ndarray):
        return _numpy_leaf(value.dtype, value.shape, "array")
    if isinstance(value, np.generic):
        return _numpy_leaf(value.dtype, (), "scalar")
    for kind in (int, float):
        if isinstance(value, kind):  # an IntEnum and its like
            return PYTHON[kind]
    raise TypeError(f"is a {type(value).__name__}, which is no number, array or tensor")


@lru_cache(maxsize=1024)
def _tensor_leaf(dtype: torch.dtype, shape: torch.Size) -> Leaf:
    if dtype is torch.bool:
        return Leaf("bool", tuple(shape), "tensor", dtype)
    if dtype.is_floating_point:
        return Leaf("float", tuple(shape), "tensor", dtype)
    if dtype in INTEGERS:
        return Leaf("int", tuple(shape), "tensor", dtype)
    raise TypeError(f"is a tensor of {dtype}, which are no real numbers")


@lru_cache(maxsize=1024)
def _numpy_leaf(dtype: np.dtype[Any], shape: tuple[int, ...], form: Form) -> Leaf:
    kinds: dict[str, Kind] = {"b": "bool", "i": "int", "u": "int", "f": "float"}
    if dtype.kind not in kinds or dtype.itemsize > 8:
        raise TypeError(f"is NumPy's {dtype}, which are no real numbers of at most 64 bits")
    return Leaf(kinds[dtype.kind], shape, form, dtype)


def common_kind(leaves: Iterable[Leaf]) -> Kind | None:
    """Return the kind of number that ranks agree on, or None where they do not.

    A Python number stands for a wider kind too, as it does in torch and NumPy: the ``loss = 0``
    of a rank without data goes with the others' floats.
    """
    leaves = list(leaves)
    widest = max((leaf.kind for leaf in leaves), key=KINDS.index)
    typed = {leaf.kind for leaf in leaves if leaf.form != "python"}
    return widest if typed <= {widest} else None


@dataclass(frozen=True)
class Plan:
    """How the leaves of a tree lie in a row of numbers."""

    paths: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    ends: tuple[int, ...]
    """Where each leaf ends in the row."""
    floats: NDArray[np.bool_]
    """Which numbers of the row are floats, shape ``(size,)``."""
    all_floats: bool
    plain: bool
    """All leaves are Python numbers."""
    digest: bytes
    """Of what all ranks must agree on, 16 bytes."""

    @property
    def size(self) -> int:
        """How many numbers a row holds."""
        return self.ends[-1] if self.ends else 0

    def parts(self, row: Sequence[Any]) -> list[Any]:
        """Cut a row of numbers into the leaves'."""
        return [row[start:end] for start, end in zip((0, *self.ends), self.ends, strict=False)]


@lru_cache(maxsize=64)
def plan_for(operation: str, structure: Hashable, leaves: tuple[Leaf, ...]) -> Plan:
    """Return the plan for a tree with this structure and these leaves.

    >>> plan_for("all_reduce_sum", None, (Leaf("float", (2, 3)),)).size
    6
    """
    return plan_of(operation, paths_of(structure), leaves)


@lru_cache(maxsize=64)
def plan_for_types(operation: str, structure: Hashable, types: tuple[type, ...]) -> Plan | None:
    """Return the plan for a tree with leaves of these types, None unless all are Python numbers."""
    leaves = tuple(map(PYTHON.get, types))
    return None if None in leaves else plan_of(operation, paths_of(structure), leaves)  # type: ignore[arg-type]


def plan_of(operation: str, paths: Sequence[str], leaves: Sequence[Leaf]) -> Plan:
    """Return the plan for leaves at these paths."""
    is_float = [leaf.kind == "float" for leaf in leaves]
    floats = np.repeat(np.array(is_float, np.bool_), [leaf.size for leaf in leaves])
    terms = [f"{path}\t{leaf.terms}" for path, leaf in zip(paths, leaves, strict=True)]
    digest = digest_of(operation, *terms)
    return Plan(
        paths=tuple(paths),
        leaves=tuple(leaves),
        ends=tuple(accumulate(leaf.size for leaf in leaves)),
        floats=floats,
        all_floats=all(is_float),
        plain=all(leaf.form == "python" for leaf in leaves),
        digest=digest,
    )


def numbers_of(value: Any, leaf: Leaf) -> list[Any]:
    """Return a leaf's numbers, flat, as Python's."""
    if leaf.form == "python":
        return [value]
    if not leaf.shape:
        return [value.item()]
    numbers: list[Any] = value.reshape(-1).tolist()
    return numbers


def to_row(operation: Operation, numbers: Sequence[Any], plan: Plan) -> bytes:
    """Return numbers as eight bytes each; for a mean all as floats.

    Raises:
        OverflowError: An int does not fit in 64 bits.
    """
    if operation == "mean" or plan.all_floats:
        return np.array(numbers, np.float64).tobytes()
    row = np.empty(plan.size, np.int64)
    column = np.array(numbers, object)
    row[plan.floats] = column[plan.floats].astype(np.float64).view(np.int64)
    try:
        row[~plan.floats] = column[~plan.floats].astype(np.int64)
    except OverflowError:
        raise OverflowError(TOO_LARGE) from None
    return row.tobytes()


TOO_LARGE = "holds an int that does not fit in 64 bits with a sign"


def from_row(operation: Operation, row: NDArray[np.int64], plan: Plan) -> list[Any]:
    """Return the numbers that :func:`to_row` wrote."""
    if operation == "mean" or plan.all_floats:
        return row.view(np.float64).tolist()  # type: ignore[no-any-return]
    numbers = row.astype(object)
    numbers[plan.floats] = row[plan.floats].view(np.float64)
    return numbers.tolist()  # type: ignore[no-any-return]


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
        return _mean(rows.view(np.float64), weights).tolist()  # type: ignore[no-any-return]
    reduced = np.empty(len(floats), object)
    with np.errstate(all="ignore"):
        reduced[floats] = REDUCE[operation](rows[:, floats].view(np.float64), axis=0)
    ints = rows[:, ~floats]
    # Python's ints: a sum may leave the 64 bits.
    reduced[~floats] = REDUCE[operation](ints.astype(object), axis=0) if ints.size else []
    return reduced.tolist()  # type: ignore[no-any-return]


REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "min": np.min, "max": np.max}


def _mean(rows: NDArray[np.float64], weights: NDArray[np.float64] | None) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):
        if weights is None:
            return np.add.reduce(rows) / len(rows)  # type: ignore[no-any-return]
        counted = weights != 0
        total = (weights[counted, None] * rows[counted]).sum(axis=0)
        return total / weights.sum()  # type: ignore[no-any-return]


def rebuild_leaf(operation: Operation, leaf: Leaf, numbers: Sequence[Any]) -> Any:
    """Return reduced numbers in the form of a leaf; a tensor on the CPU.

    Raises:
        OverflowError: An int does not fit in the result's dtype.
    """
    if leaf.form == "python":
        as_bool = leaf.kind == "bool" and operation in ("min", "max")
        return bool(numbers[0]) if as_bool else numbers[0]
    dtype = result_dtype(operation, leaf)
    try:
        if leaf.form == "tensor":
            return _tensor(numbers, dtype, leaf.shape)
        if leaf.form == "scalar":
            return dtype.type(numbers[0])
        return np.array(numbers, dtype).reshape(leaf.shape)
    except OverflowError:
        raise OverflowError(f"reduces to an int that does not fit in {dtype}") from None


def result_dtype(operation: Operation, leaf: Leaf) -> Any:
    """Return the dtype of a reduced tensor or array.

    Floats keep theirs. Means of ints and bools are float64, sums of them 64 bits wide, as with
    ``torch.sum`` and ``numpy.sum``.
    """
    if leaf.kind == "float" or operation in ("min", "max"):
        return leaf.dtype
    name = "float64"
    if operation == "sum":
        name = "uint64" if str(leaf.dtype).endswith("uint64") else "int64"
    return getattr(torch, name) if leaf.form == "tensor" else np.dtype(name)


def _tensor(numbers: Sequence[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of numbers; through NumPy where that can, which is faster by far."""
    like = NUMPY_DTYPES.get(dtype)
    if like is None:
        return torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(shape)
    if not shape:
        return torch.from_numpy(np.array(numbers[0], like))
    return torch.from_numpy(np.array(numbers, like).reshape(shape))


NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]]
NUMPY_DTYPES = {torch.float64: np.dtype("float64"), torch.float32: np.dtype("float32")}
NUMPY_DTYPES |= {dtype: np.dtype(str(dtype).removeprefix("torch.")) for dtype in INTEGERS}
