"""How does a rank read a checkpoint's file, and know that it is the one that rank zero sees?"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from typing import Any, BinaryIO, TypeAlias

import torch
from torch.serialization import default_restore_location, get_unsafe_globals_in_checkpoint

from ddp_utils.ground.errors import RanksDisagreeError
from ddp_utils.world.world import get_device, get_rank

__all__ = ["MapLocation", "StrPath", "identity_of", "open_if_there", "open_the_same", "read_file"]

StrPath: TypeAlias = "str | os.PathLike[str]"
MapLocation: TypeAlias = Any
"""What ``torch.load`` takes: a device, its name, a mapping of names, or a function."""

TAIL = 2**20
"""Bytes at the end of a file that tell it from another: torch puts every part's checksum there."""

LAG = 10.0
"""Seconds that a shared folder may take to show a rank what rank zero has put there."""


def open_if_there(path: StrPath) -> BinaryIO | None:
    """Open a file for reading; None where there is none, and an error where that is not known."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


def identity_of(file: BinaryIO) -> list[Any]:
    """Return what tells one file from another: its length and a digest of its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL))
    digest = hashlib.sha256(file.read()).hexdigest()
    file.seek(0)
    return [size, digest]


def open_the_same(path: StrPath, identity: list[Any]) -> BinaryIO:
    """Open the file that rank zero sees; a shared folder may take a moment to show it here."""
    deadline = time.monotonic() + LAG
    while True:
        file, seen = open_if_there(path), "no such file"
        if file is not None:
            own = identity_of(file)
            if own == identity:
                return file
            file.close()
            seen = f"another file ({own[0]} bytes)"
        if time.monotonic() > deadline:
            raise RanksDisagreeError(
                f"rank {get_rank()} sees {seen} at {os.fspath(path)!r}, where rank zero sees "
                f"one of {identity[0]} bytes. If the folder is not shared between the machines, "
                "pass broadcast=True: then rank zero reads for all."
            )
        _refresh(os.path.dirname(os.path.abspath(path)))
        time.sleep(0.1)


def _refresh(folder: str) -> None:
    """Have a network file system look again: listing a folder drops what it remembers of it."""
    try:
        os.listdir(folder)
    except OSError:
        pass


def read_file(file: BinaryIO, path: StrPath, map_location: MapLocation, weights_only: bool) -> Any:
    """Return the content of a file, with errors that name the file and what to do."""
    where = f"rank {get_rank()} cannot read {os.fspath(path)!r}"
    place = _to_own_device if map_location is None else map_location
    try:
        return torch.load(file, map_location=place, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        refused = _refused_classes(file)
        if not refused:
            raise pickle.UnpicklingError(f"{where}: {error}") from None
        raise pickle.UnpicklingError(
            f"{where}: it holds {', '.join(refused)}, which weights_only=True does not build, "
            "because building it may run code. If you trust the file, "
            f"load_checkpoint({os.fspath(path)!r}, weights_only=False) reads it."
        ) from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a broken file makes torch raise anything
        raise RuntimeError(
            f"{where}: {type(error).__name__}: {error}. So it is with a file that was cut off, or "
            "that torch.save has not written."
        ) from error


def _refused_classes(file: BinaryIO) -> list[str]:
    file.seek(0)
    try:
        return get_unsafe_globals_in_checkpoint(file)  # type: ignore[no-any-return,unused-ignore]
    except Exception:
        return []  # a file of another format: torch's own message has to do


def _to_own_device(storage: Any, tag: str) -> Any:
    """Keep on the CPU what was there, and bring the rest to this rank's device."""
    if tag == "cpu":
        return storage
    return default_restore_location(storage, str(get_device()))  # type: ignore[no-untyped-call]
