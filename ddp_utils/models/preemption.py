"""Do all ranks stop now, at the same step, because one of them was asked to?

At each step the ranks reduce their flags over a gloo group of their own, without waiting: the
answer is that of the step before, which has come in beside the training. The store would not
do: to stop at one step, no rank may pass a step before it knows that nobody stops there, so
every step needs word from every rank, and that is a reduction.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_utils.callsite import refuse_in_section
from ddp_utils.models import stop_signals
from ddp_utils.models.shared_call import PATIENCE, SharedCall
from ddp_utils.talk.circle import circle_of

__all__ = ["stop_requested"]

NEVER = timedelta(days=3650)
"""Between two calls rank zero may evaluate for hours. Whoever dies is noticed by the connection."""

LONGEST_PAUSE = 0.01

_logger = logging.getLogger("ddp_utils")


def stop_requested() -> bool:
    """Whether the ranks have been asked to stop: the same answer on all of them.

    Call it on every rank, once a step. The first call arms SIGTERM and SIGUSR1, unless
    ``distributed_main(stop_signals=...)`` has armed others. From then on such a signal does not
    end a rank: the same call of this function returns True on all ranks, at most one step after
    the signal came to one of them. So do all later calls. Then save, and return from the main
    function. More signals within 2 s are the same request; a later one ends the rank at once. A
    rank that fails is an error and never a stop.

    A collective, but one that waits for no step of the others except the one before. It does not
    wait for the accelerator.

    Raises:
        OneRankSectionError: Called where only one rank runs.
        RuntimeError: Another rank has died.

    Example:
        >>> for step in range(1000):  # doctest: +SKIP
        ...     train(step)
        ...     if stop_requested():
        ...         break
    """
    global _agreement
    if not stop_signals.armed():
        stop_signals.arm()
    circle = circle_of(None, "stop_requested")
    asked = stop_signals.first_signal() or 0
    if circle.size == 1:
        return bool(asked)
    refuse_in_section("stop_requested")
    if _agreement is None or _agreement.world is not dist.group.WORLD:
        _agreement = _Agreement()
    return bool(_agreement.next_step(asked))


class _Agreement:
    """The steps of the ranks of one process group, and what they have agreed on."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        call = SharedCall("stop_requested")  # tells who is missing, which new_group would not
        call.agree("ready")
        call.close(call.size)
        self._group = dist.new_group(backend="gloo", timeout=NEVER)
        self._round: _Round | None = None
        self._signal = 0

    def next_step(self, asked: int) -> int:
        """Return the signal for which all ranks stop at this step, or 0."""
        if not self._signal:
            before, self._round = self._round, _Round(self._group, asked)
            self._signal = 0 if before is None else before.result()
            if self._signal:
                _logger.info("signal %d: all ranks stop at this step", self._signal)
        return self._signal


class _Round:
    """One reduction of what the ranks were asked, under way."""

    def __init__(self, group: dist.ProcessGroup | None, asked: int) -> None:
        self._asked = torch.tensor([asked], dtype=torch.int32, device="cpu")
        self._work = dist.all_reduce(self._asked, dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> int:
        """Wait for the slowest rank, and return the highest number."""
        started = time.monotonic()
        pause, told = 0.0002, False
        while not self._work.is_completed():  # unlike wait(), this can be interrupted
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if not told and time.monotonic() - started > PATIENCE:
                told = True
                _logger.warning(
                    "rank %d has waited %d s in stop_requested for ranks that are a step behind. "
                    "Every rank has to call it at every step.",
                    dist.get_rank(),
                    PATIENCE,
                )
        self._work.wait()  # raises what went wrong
        return int(self._asked.item())


_agreement: _Agreement | None = None
