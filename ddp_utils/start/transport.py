"""How do functions, arguments, results and errors travel between the parent and its ranks?

As bytes: pickled by value, never through shared memory or file descriptors, which would need a
living sender. Frames are length-prefixed, so that one loop can read many sockets at once.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Iterator
from typing import Any

from ddp_utils.ground.errors import StartError

__all__ = ["FrameReader", "check_picklable", "dumps", "frame", "loads"]

LARGE = 64 * 2**20
HEADER = struct.Struct("!Q")


class _ByValue(pickle.Pickler):
    """A pickler that brings tensors to the CPU: the receiver may see other devices."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.device.type != "cpu":
            moved = obj.detach().cpu().requires_grad_(obj.requires_grad)
            return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def dumps(value: Any) -> bytes:
    """Return ``value`` as bytes; accelerator tensors arrive on the CPU."""
    buffer = io.BytesIO()
    _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


loads = pickle.loads


def frame(payload: bytes) -> bytes:
    """Return ``payload`` behind its length."""
    return HEADER.pack(len(payload)) + payload


class FrameReader:
    """Collects bytes as they come and gives back whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add ``data`` and yield the payload of each frame that is complete now."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[HEADER.size : end])
            del self._buffer[:end]
            yield payload


def check_picklable(fn: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the pickled arguments, or say which of them does not pickle, and where in it.

    Raises:
        StartError: names the argument and the path inside it.
    """
    try:
        payload = dumps((args, kwargs))
    except Exception as error:
        named = {f"argument {i}": value for i, value in enumerate(args)}
        named |= {f"argument {name!r}": value for name, value in kwargs.items()}
        where, culprit = next(
            (found for name, value in named.items() if (found := _first_unpicklable(value, name))),
            ("the arguments", None),
        )
        raise StartError(
            f"{fn}: {where} cannot be sent to the ranks "
            f"({type(culprit).__name__}: {error}). Build it inside the function, on each rank, "
            "or define what it holds at the top level of a module."
        ) from error
    return payload


def _first_unpicklable(value: Any, path: str, depth: int = 0) -> tuple[str, Any] | None:
    """Return the path and the object of the innermost thing in ``value`` that does not pickle."""
    try:
        dumps(value)
    except Exception:
        pass
    else:
        return None
    if depth < 8:
        for step, child in _parts(value):
            found = _first_unpicklable(child, path + step, depth + 1)
            if found is not None:
                return found
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        yield from ((f".{name}", child) for name, child in vars(value).items())
