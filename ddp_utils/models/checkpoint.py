"""How is the state of a training written to a file by one rank, and read back by all?

Rank zero writes; the others learn how it went, through the store. What a file may hold is told
in :mod:`~ddp_utils.models.plain_types`, how it is replaced in
:mod:`~ddp_utils.models.atomic_file`, how ranks wait for each other in
:mod:`~ddp_utils.models.shared_call`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, BinaryIO

import torch

from ddp_utils.callsite import call_site
from ddp_utils.ground.errors import OneRankSectionError, RanksDisagreeError
from ddp_utils.models import spread
from ddp_utils.models.atomic_file import replacing
from ddp_utils.models.filling import fill_all
from ddp_utils.models.plain_types import check_readable, to_plain
from ddp_utils.models.random_states import RandomStates
from ddp_utils.models.reading import (
    MapLocation,
    StrPath,
    identity_of,
    open_if_there,
    open_the_same,
    read_file,
)
from ddp_utils.models.shared_call import SharedCall, relayed
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["load_checkpoint", "save_checkpoint"]


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
        RanksDisagreeError: The ranks gave different paths, or are not in the same call, or only
            some gave :class:`RandomStates`. Rank zero, which waits for nobody, may be through by
            then: it sees the job end.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> save_checkpoint("last.pt", model=model, epoch=3)
        >>> torch.load("last.pt")["epoch"]
        3
    """
    own_random = {name: v.own() for name, v in state.items() if isinstance(v, RandomStates)}
    if not wait:
        if get_rank() == 0:
            if own_random and get_world_size() > 1:
                raise ValueError("wait=False: rank zero alone has no random states of the others")
            _write(path, state | {name: [own] for name, own in own_random.items()}, weights_only)
        return
    call = _shared_call("save_checkpoint", own_random)
    if call.rank > 0:
        _hear_of_save(call, path, own_random)
        return
    told = {"path": _told(path), "site": call_site(), "random": list(own_random)}
    with call.telling("done", told):
        gathered = _of_all_ranks(call) if own_random else {}
        _write(path, state | gathered, weights_only)


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
        DistributedError: Another rank failed, or sees another file than rank zero, or only some
            gave :class:`RandomStates`.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> save_checkpoint("last.pt", model=model, epoch=3)
        >>> load_checkpoint("last.pt", model=model)
        {'epoch': 3}
    """

    def read(file: BinaryIO) -> Any:
        return read_file(file, path, map_location, weights_only)

    if broadcast and not wait:
        raise ValueError("broadcast=True is for all ranks together: leave out wait=False")
    if not wait:
        try:
            with open(path, "rb") as file:
                content = read(file)
        except FileNotFoundError:
            if missing_ok:
                return {}
            raise
        return fill_all(content, targets, strict, path)
    call = _shared_call("load_checkpoint", None)
    try:
        random = [name for name, v in targets.items() if isinstance(v, RandomStates)]
        content = _common_content(call, path, read, broadcast, weights_only, random)
        if content is None and missing_ok:
            rest = {}
        elif content is None:
            raise FileNotFoundError(
                errno.ENOENT, "rank zero sees no such checkpoint", os.fspath(path)
            )
        else:
            rest = fill_all(content, targets, strict, path)
    except BaseException as error:
        if not hasattr(error, "effect_of"):
            call.fail(error)
        raise
    call.agree("end")
    call.close(call.size)
    return rest


def _shared_call(operation: str, part: Any) -> SharedCall:
    try:
        return SharedCall(operation, part)
    except OneRankSectionError as error:
        raise OneRankSectionError(f"{error} Or pass wait=False, for this rank alone.") from None


def _hear_of_save(call: SharedCall, path: StrPath, random: Collection[str]) -> None:
    """Wait until rank zero has saved; raise if it could not."""
    told = call.hear("done", 0)
    call.close(call.size - 1)
    _check_same(call, "path", told["path"], _told(path))
    # Rank zero has waited for nobody, so an earlier call that it made alone would pass for this.
    _check_same(call, "line", _line(told["site"]), _line(call_site()))
    if told["error"] is not None:
        raise relayed(told["error"])
    _check_random(call, {0: told["random"], call.rank: random})


def _told(path: StrPath) -> str:
    """Return a path as rank zero tells it, also one that is none: others wait for its word."""
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else repr(path)


def _check_same(call: SharedCall, what: str, there: str, here: str) -> None:
    """Raise unless rank zero's n-th call of this kind is the one that this rank makes.

    Raises:
        RanksDisagreeError: It has another path, or stands at another line.
    """
    if here != there:
        raise RanksDisagreeError(
            f"rank {call.rank} came to {call.operation} with {what} {here!r}, and rank zero "
            f"with {there!r}. All ranks make the same calls at one line with one path "
            "(ddp_utils.broadcast(path) gives everybody rank zero's); where only rank zero "
            "calls it, pass wait=False."
        )


def _line(site: str) -> str:
    return os.path.basename(site)  # machines may keep the program in different folders


def _of_all_ranks(call: SharedCall) -> dict[str, list[Any]]:
    """Wait for the random states of every rank, and return them by name, then by rank."""
    parts = {rank: call.hear("come", rank) for rank in range(call.size)}
    _check_random(call, parts)
    return {name: [part[name] for part in parts.values()] for name in parts[0]}


def _check_random(call: SharedCall, names: Mapping[int, Collection[str]]) -> None:
    """Raise unless these ranks gave their random states under the same names.

    Raises:
        RanksDisagreeError: One lacks what another has: it would draw other numbers than before.
    """
    for name in dict.fromkeys(name for given in names.values() for name in given):
        lacking = [rank for rank, given in names.items() if name not in given]
        if lacking:
            raise RanksDisagreeError(
                f"{call.operation}({name}=RandomStates()): rank {lacking[0]} did not give it. "
                "Every rank has states of its own, so all of them have to."
            )


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
    call: SharedCall,
    path: StrPath,
    read: Callable[[BinaryIO], Any],
    broadcast: bool,
    weights_only: bool,
    random: Collection[str],
) -> Any:
    """Return what the file holds, or None on all ranks if rank zero sees none."""
    if call.rank == 0:
        return _content_for_all(call, path, read, broadcast, random)
    told = call.hear("found", 0)
    _check_same(call, "path", told["path"], _told(path))
    if told["error"] is not None:
        raise relayed(told["error"])
    _check_random(call, {0: told["random"], call.rank: random})
    if told["identity"] is None:
        return None
    if told["size"] is not None:
        call.agree("ready")
        return spread.receive(told["size"], weights_only, partial(call.agree, "placed"))
    with open_the_same(path, told["identity"]) as file:
        return read(file)


def _content_for_all(
    call: SharedCall,
    path: StrPath,
    read: Callable[[BinaryIO], Any],
    broadcast: bool,
    random: Collection[str],
) -> Any:
    """As rank zero: open the file, tell the others, and read it; send it if so wanted."""
    told: dict[str, Any] = {"path": _told(path), "random": list(random)}
    told |= {"identity": None, "size": None}
    content, description = None, b""
    with ExitStack() as files:
        with call.telling("found", told):
            file = open_if_there(os.fspath(path))
            if file is not None:
                files.enter_context(file)
                told["identity"] = identity_of(file)
                if broadcast and call.size > 1:
                    content = read(file)
                    description = spread.describe(content)
                    told["size"] = len(description)
        if file is None or not description:
            return None if file is None else read(file)
    call.agree("ready")
    spread.send(content, description, partial(call.agree, "placed"))
    return content
