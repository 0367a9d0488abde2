"""Where is every rank, while one has been waiting for long? (``DDP_UTILS_DEBUG=1``)

A thread on each rank watches its main thread. When that has been in one call that waits for
other ranks for ``DDP_UTILS_DEBUG_WAIT`` seconds, the thread asks all ranks, through the store,
to leave word of their stacks; rank zero collects them and prints one report. It covers torch's
own collectives too, since it looks at the frames that a call passes through.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType

import torch
import torch.distributed as dist

from ddp_utils import callsite
from ddp_utils.ground import settings
from ddp_utils.ground.saying import say
from ddp_utils.process_group import introduce, shared_store, whereabouts
from ddp_utils.talk.agreement import named_ranks, told_by_rank
from ddp_utils.world.world import get_rank, get_world_size, is_distributed

__all__ = ["watch", "where_are"]

TORCH = os.path.dirname(torch.__file__) + os.sep
START = os.path.join(callsite.OURS, "start", "")
STANDARD = os.path.dirname(threading.__file__) + os.sep
WAITING = (
    os.path.join(TORCH, "distributed", ""),
    os.path.join(TORCH, "nn", "parallel", "distributed.py"),
    os.path.join(TORCH, "autograd", "graph.py"),
    os.path.join(callsite.OURS, "talk", ""),
)
"""A call that passes through one of these files may be waiting for other ranks."""
ANSWER_WITHIN = 5.0
"""Seconds that ranks have to leave word of their stacks."""

_watcher: threading.Thread | None = None
_ending = threading.Event()
_round = 0
"""How many reports have been asked for, as far as this rank knows."""


def watch() -> None:
    """Start watching, once in a process."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():
        introduce()
        atexit.register(_end)
        _watcher = threading.Thread(target=_watch, name="ddp_utils stack report", daemon=True)
        _watcher.start()


def where_are(ranks: Sequence[int]) -> list[str]:
    """Ask all ranks for their stacks, and return where each of ``ranks`` is, as far as known."""
    asked = _round
    _ask(asked, f"misses {named_ranks(ranks)}")
    answers = _answers(asked, ranks)
    return [answer["where"] if (answer := answers.get(rank)) else "no answer" for rank in ranks]


def _watch() -> None:
    limit = settings.DEBUG_WAIT.get()
    call: FrameType | None = None
    since = time.monotonic()
    while is_distributed():
        try:
            if shared_store().check([f"stacks/{_round}/asked"]):
                _answer()
                since = float("inf")  # a report for the call of now is on its way
            now = _waiting_call()
            if now is not call:
                call, since = now, time.monotonic()
            elif call is not None and time.monotonic() - since > limit:
                _ask(_round, f"has waited {limit:g} s in one call")
        except (RuntimeError, ValueError):
            return  # the group, or its store, has gone
        if _ending.wait(min(0.5, limit / 4)):
            return


def _end() -> None:
    """End the thread before the interpreter does, which could catch it in the store's code."""
    _ending.set()
    if _watcher is not None:
        _watcher.join(2.0)


def _waiting_call() -> FrameType | None:
    """Return the outermost frame of a call that may wait for other ranks, if there is one.

    The frame, not its number: as long as it is held here, no later call can be taken for it.
    """
    frame = _main_frame()
    outermost, waiting = None, False
    while frame is not None and _is_library(frame.f_code.co_filename):
        waiting = waiting or frame.f_code.co_filename.startswith(WAITING)
        outermost, frame = frame, frame.f_back
    return outermost if waiting else None


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_library(file: str) -> bool:
    if file.startswith((TORCH, callsite.OURS)):
        return True
    return file.startswith((STANDARD, "<frozen")) and "-packages" not in file


def _ask(number: int, why: str) -> None:
    shared_store().compare_set(f"stacks/{number}/asked", "", f"rank {get_rank()} {why}")


def _answer() -> None:
    """Leave word of this rank's stack; rank zero collects everybody's."""
    global _round
    number, _round = _round, _round + 1
    frame = _main_frame()
    answer = {
        "where": _line_of_the_users(frame),
        "stack": _text_of(frame),
    }
    shared_store().set(f"stacks/{number}/{get_rank()}", json.dumps(answer))
    if get_rank() == 0:
        say(_report(number))
        shared_store().set(f"stacks/{number}/reported", "")


def _text_of(frame: FrameType | None) -> str:
    """Return the stack as Python prints it, without the frames of this package's own start."""
    frames = traceback.extract_stack(frame)
    ours = [i for i, each in enumerate(frames) if each.filename.startswith(START)]
    return "".join(traceback.format_list(frames[max(ours, default=-1) + 1 :])).rstrip()


def _line_of_the_users(frame: FrameType | None) -> str:
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "at its end"
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _report(number: int) -> str:
    ranks = range(get_world_size())
    answers = _answers(number, ranks)
    texts = []
    for rank in ranks:
        if rank in answers:
            texts.append("\n" + answers[rank]["stack"])
        else:
            texts.append(
                f"no answer within {ANSWER_WITHIN:g} s ({whereabouts(rank)}); it has ended, or is "
                "in C code that lets no Python run"
            )
    why = shared_store().get(f"stacks/{number}/asked").decode()
    return f"ddp_utils: {why}. Where each rank is:\n{told_by_rank(texts, ranks)}"


def _answers(number: int, ranks: Sequence[int]) -> dict[int, dict[str, str]]:
    """Return the answers of those ranks that give one in time."""
    store = dist.PrefixStore(f"stacks/{number}", shared_store())
    deadline = time.monotonic() + ANSWER_WITHIN
    answers: dict[int, dict[str, str]] = {}
    while len(answers) < len(ranks) and time.monotonic() < deadline:
        for rank in set(ranks) - answers.keys():
            if store.check([str(rank)]):
                answers[rank] = json.loads(store.get(str(rank)))
        time.sleep(0.02)
    return answers
