"""How is the state of a training written to a file by one rank, and read back by all?

Rank zero writes; the others learn how it went, through the store. What a file may hold is told
in :mod:`~ddp_utils.models.plain_types`, how it is replaced in
:mod:`~ddp_utils.models.atomic_file`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import nn
from torch.serialization import default_restore_location, get_unsafe_globals_in_checkpoint

from ddp_utils.callsite import call_site
from ddp_utils.ground.errors import OneRankSectionError, RanksDisagreeError
from ddp_utils.models import spread
from ddp_utils.models.atomic_file import replacing
from ddp_utils.models.meeting import Meeting, relayed
from ddp_utils.models.plain_types import check_readable, to_plain
from ddp_utils.models.prefixes import load_model_state
from ddp_utils.models.random_states import RandomStates
from ddp_utils.world.world import get_device, get_rank, get_world_size

__all__ = ["load_checkpoint", "save_checkpoint"]

StrPath: TypeAlias = "str | os.PathLike[str]"
MapLocation = Any
"""What ``torch.load`` takes: a device, its name, a mapping of names, or a function."""

TAIL = 2**20
"""Bytes at the end of a file that tell it from another: torch puts every part's checksum there."""

LAG = 10.0
"""Seconds that a shared folder may take to show a rank what rank zero has put there."""


def save_checkpoint(
    path: StrPath, /, *, wait: bool = True, weights_only: bool = True, **state: Any
) -> None:
    """Write the state of a training to a file, on rank zero, in one step.

    The file is written under another name, brought to the disk, and takes its name at once:
    whenever the job is killed, ``path`` is the old or the new file, whole. All ranks call this,
    and come back when the file is there, or raise what rank zero raised.

    Args:
        path: The file, in a folder that exists. Rank zero's is used; all must give the same.
        wait: A collective: every rank calls it. With False it is not: only rank zero does
            something, and nobody waits for it. (No rank waits for the others' arrival either way,
            unless :class:`RandomStates` are given.)
        weights_only: Store only what ``torch.load(weights_only=True)`` reads. With False any
            class that pickle knows is stored, and has to be loaded with False too.
        **state: What to store, by name. Objects with a ``state_dict()`` (modules, optimizers,
            schedulers, scalers, loaders), also in lists and dictionaries, are stored as their
            state, modules under the keys of the bare model. Namespaces become dictionaries,
            paths strings, NumPy numbers Python's. Tensors and plain types stay.

    Raises:
        OSError: The folder is missing, read-only or full; on all ranks. The old file stays.
        TypeError: A value that could not be loaded again, on rank zero; RankZeroError elsewhere.
        RanksDisagreeError: The ranks gave different paths, or are not in the same call.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> save_checkpoint("/tmp/last.pt", model=model, epoch=3)
        >>> torch.load("/tmp/last.pt")["epoch"]
        3
    """
    own_random = {name: v.own() for name, v in state.items() if isinstance(v, RandomStates)}
    if not wait:
        if get_rank() == 0:
            if own_random and get_world_size() > 1:
                raise ValueError("wait=False: rank zero alone has no random states of the others")
            _write(path, state | {name: [own] for name, own in own_random.items()}, weights_only)
        return
    meeting = _meeting("save_checkpoint", own_random)
    if meeting.rank > 0:
        _hear_of_save(meeting, path)
        return
    told = {"path": os.fspath(path), "site": call_site(), "error": None}
    try:
        gathered = {name: _of_all_ranks(meeting, name) for name in own_random}
        _write(path, state | gathered, weights_only)
    except BaseException as error:
        meeting.tell("done", told | {"error": meeting.account_of(error)})
        raise
    meeting.tell("done", told)


def load_checkpoint(
    path: StrPath,
    /,
    *,
    missing_ok: bool = False,
    map_location: MapLocation = None,
    strict: bool = True,
    weights_only: bool = True,
    broadcast: bool = False,
    wait: bool = True,
    **targets: Any,
) -> dict[str, Any]:
    """Read a file of :func:`save_checkpoint` or ``torch.save``, and fill the given targets.

    A collective: all ranks come back when all have loaded, or all raise. Rank zero decides
    whether the file is there, so that no rank can take another branch than the others; each
    rank then makes sure that it reads the file that rank zero sees.

    Args:
        path: The file.
        missing_ok: Return an empty dictionary, on all ranks, where there is no file yet.
        map_location: As in ``torch.load``. By default what was on an accelerator comes to this
            rank's own (to the CPU where it has none), and the rest to the CPU.
        strict: Whether a model's missing or unexpected key is an error.
        weights_only: False reads any class, and runs whatever code the file names: for files
            that you trust.
        broadcast: Only rank zero reads the file, and sends it to the others: for a file that
            only its machine has, or a disk that many readers would slow down.
        wait: With False this is not a collective: this rank reads, now, and asks nobody.
        **targets: What to fill, in this order: objects with ``load_state_dict``, also in lists
            and dictionaries. Models may be wrapped or bare, whatever they were when saved.

    Returns:
        What the file holds beside the targets, by name.

    Raises:
        FileNotFoundError: Rank zero sees no such file; on all ranks.
        ValueError: ``broadcast`` without ``wait``.
        KeyError: The file has no such name.
        pickle.UnpicklingError: The file holds classes that ``weights_only=True`` refuses.
        DistributedError: Another rank failed, or sees another file than rank zero.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> save_checkpoint("/tmp/last.pt", model=model, epoch=3)
        >>> load_checkpoint("/tmp/last.pt", model=model)
        {'epoch': 3}
    """

    def read(file: BinaryIO) -> Any:
        return _read(file, path, map_location, weights_only)

    if broadcast and not wait:
        raise ValueError("broadcast=True is for all ranks together: leave out wait=False")
    if not wait:
        try:
            with open(path, "rb") as file:
                return _fill_all(read(file), targets, strict, path)
        except FileNotFoundError:
            if missing_ok:
                return {}
            raise
    meeting = _meeting("load_checkpoint", None)
    try:
        content = _common_content(meeting, path, read, broadcast, weights_only)
        if content is None and missing_ok:
            rest = {}
        elif content is None:
            raise FileNotFoundError(2, "rank zero sees no such checkpoint", os.fspath(path))
        else:
            rest = _fill_all(content, targets, strict, path)
    except BaseException as error:
        if not hasattr(error, "effect_of"):
            meeting.fail(error)
        raise
    meeting.agree("end")
    meeting.close(meeting.size)
    return rest


def _meeting(operation: str, part: Any) -> Meeting:
    try:
        return Meeting(operation, part)
    except OneRankSectionError as error:
        raise OneRankSectionError(f"{error} Or pass wait=False, for this rank alone.") from None


def _hear_of_save(meeting: Meeting, path: StrPath) -> None:
    """Wait until rank zero has saved; raise if it could not."""
    told = meeting.hear("done", 0)
    meeting.close(meeting.size - 1)
    _check_same(meeting, "path", told["path"], os.fspath(path))
    # Rank zero has waited for nobody, so an earlier call that it made alone would pass for this.
    _check_same(meeting, "line", _line(told["site"]), _line(call_site()))
    if told["error"] is not None:
        raise relayed(told["error"])


def _check_same(meeting: Meeting, what: str, there: str, here: str) -> None:
    """Raise unless rank zero's n-th call of this kind is the one that this rank makes.

    Raises:
        RanksDisagreeError: It has another path, or stands at another line.
    """
    if here != there:
        raise RanksDisagreeError(
            f"rank {meeting.rank} came to {meeting.operation} with {what} {here!r}, and rank zero "
            f"with {there!r}. All ranks make the same calls at one line with one path "
            "(ddp_utils.broadcast(path) gives everybody rank zero's); where only rank zero "
            "calls it, pass wait=False."
        )


def _line(site: str) -> str:
    return os.path.basename(site)  # machines may keep the program in different folders


def _of_all_ranks(meeting: Meeting, name: str) -> list[Any]:
    """Wait for every rank's part of this name, and return them by rank."""
    parts = [meeting.hear("come", rank) for rank in range(meeting.size)]
    lacking = [rank for rank, part in enumerate(parts) if name not in part]
    if lacking:
        raise RanksDisagreeError(
            f"save_checkpoint({name}=RandomStates()): rank {lacking[0]} did not give it. Every "
            "rank has states of its own, so all of them have to."
        )
    return [part[name] for part in parts]


def _write(path: StrPath, state: dict[str, Any], weights_only: bool) -> None:
    """Write a file in one step, and give the reason that the system gave if that fails."""
    plain = {name: to_plain(value) for name, value in state.items()}
    if weights_only:
        for name, value in plain.items():
            check_readable(value, name)
    with replacing(path) as file:
        try:
            torch.save(plain, file)
        except RuntimeError as error:
            reason = error.__context__  # torch hides what the file said behind its own error
            if not isinstance(reason, OSError):
                raise
            raise OSError(reason.errno, reason.strerror, os.fspath(path)) from None


def _common_content(
    meeting: Meeting,
    path: StrPath,
    read: Callable[[BinaryIO], Any],
    broadcast: bool,
    weights_only: bool,
) -> Any:
    """Return what the file holds, or None on all ranks if rank zero sees none."""
    if meeting.rank == 0:
        return _content_for_all(meeting, path, read, broadcast)
    told = meeting.hear("found", 0)
    _check_same(meeting, "path", told["path"], os.fspath(path))
    if told["error"] is not None:
        raise relayed(told["error"])
    if told["identity"] is None:
        return None
    if told["size"] is not None:
        meeting.agree("ready")
        return spread.receive(told["size"], weights_only)
    with _open_the_same(meeting, path, told["identity"]) as file:
        return read(file)


def _content_for_all(
    meeting: Meeting, path: StrPath, read: Callable[[BinaryIO], Any], broadcast: bool
) -> Any:
    """As rank zero: open the file, tell the others, and read it; send it if so wanted."""
    told: dict[str, Any] = {"path": os.fspath(path), "error": None, "identity": None, "size": None}
    description = content = None
    try:
        with open(path, "rb") as file:
            told["identity"] = _identity(file)
            if broadcast and meeting.size > 1:
                content = read(file)
                description = spread.describe(content)
                told["size"] = len(description)
            meeting.tell("found", told)
            if description is None:
                return read(file)
    except FileNotFoundError:
        meeting.tell("found", told)
        return None
    except BaseException as error:
        meeting.tell("found", told | {"error": meeting.account_of(error)})
        raise
    meeting.agree("ready")
    spread.send(content, description)
    return content


def _identity(file: BinaryIO) -> list[Any]:
    """Return what tells one file from another: its length and a digest of its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL))
    digest = hashlib.sha256(file.read()).hexdigest()
    file.seek(0)
    return [size, digest]


def _open_the_same(meeting: Meeting, path: StrPath, identity: list[Any]) -> BinaryIO:
    """Open the file that rank zero sees; a shared folder may take a moment to show it here."""
    deadline = time.monotonic() + LAG
    while True:
        size = None
        try:
            file = open(path, "rb")  # noqa: SIM115  # returned open
        except FileNotFoundError:
            pass
        else:
            own = _identity(file)
            if own == identity:
                return file
            size = own[0]
            file.close()
        if time.monotonic() > deadline:
            seen = "no such file" if size is None else f"another file ({size} bytes)"
            raise RanksDisagreeError(
                f"rank {meeting.rank} sees {seen} at {os.fspath(path)!r}, where rank zero sees "
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


def _read(file: BinaryIO, path: StrPath, map_location: MapLocation, weights_only: bool) -> Any:
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


def _fill_all(
    content: Any, targets: Mapping[str, Any], strict: bool, path: StrPath
) -> dict[str, Any]:
    """Fill the targets in their order, and return what is left of the content."""
    wanted = {name: target for name, target in targets.items() if target is not None}
    content = _by_name(content, wanted, path)
    missing = [name for name in wanted if name not in content]
    if missing:
        raise KeyError(
            f"{os.fspath(path)!r} holds no {', '.join(missing)}; it holds {_some(content)}"
        )
    for name, target in wanted.items():
        _fill(target, content[name], name, strict)
    _warn_of_strange_optimizers(wanted)
    return {name: value for name, value in content.items() if name not in wanted}


def _by_name(content: Any, wanted: Mapping[str, Any], path: StrPath) -> Mapping[str, Any]:
    """Return the content as a mapping of names; a bare model state is the one model's."""
    if not isinstance(content, Mapping):
        raise TypeError(
            f"{os.fspath(path)!r} holds a {type(content).__name__} and no dictionary of names: "
            "read it with torch.load"
        )
    models = [name for name, target in wanted.items() if isinstance(target, nn.Module)]
    bare = content and all(isinstance(value, torch.Tensor) for value in content.values())
    if bare and len(models) == 1 and models[0] not in content:
        return {models[0]: content}
    return content


def _fill(target: Any, state: Any, name: str, strict: bool) -> None:
    if isinstance(target, RandomStates):
        target.restore(state)
    elif isinstance(target, nn.Module):
        load_model_state(target, state, strict=strict)
    elif callable(getattr(target, "load_state_dict", None)):
        target.load_state_dict(state)
    elif isinstance(target, Mapping) and isinstance(state, Mapping):
        for key, part in target.items():
            _fill(part, state[key], f"{name}[{key!r}]", strict)
    elif isinstance(target, (list, tuple)) and isinstance(state, (list, tuple)):
        for i, (part, part_state) in enumerate(zip(target, state, strict=True)):
            _fill(part, part_state, f"{name}[{i}]", strict)
    else:
        raise TypeError(
            f"load_checkpoint({name}=...) fills objects with load_state_dict, and a "
            f"{type(target).__name__} is none. Leave it out: what is not asked for is returned."
        )


def _warn_of_strange_optimizers(targets: Mapping[str, Any]) -> None:
    """Warn of an optimizer that holds the parameters of a model that has since been replaced."""
    models = {name: t for name, t in targets.items() if isinstance(t, nn.Module)}
    for name, optimizer in targets.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        held = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(p) for model in models.values() for p in model.parameters()}
        if any(id(p) in known for p in held):
            continue
        for model_name, model in models.items():
            if [p.shape for p in model.parameters()] == [p.shape for p in held]:
                warnings.warn(
                    f"load_checkpoint: {name} steps parameters like those of {model_name}, but "
                    "not those: it was made before the model was replaced, so the model would "
                    "never train. Make the optimizer last.",
                    stacklevel=4,
                )


def _some(names: Mapping[str, Any], most: int = 8) -> str:
    shown = ", ".join(map(repr, list(names)[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
