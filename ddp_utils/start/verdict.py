"""Which rank's failure is the cause, and how is the whole job's end told?

Pure functions over the ranks' ends.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Sequence

from ddp_utils.ground.errors import RankEnd

__all__ = ["comes_from_a_lost_peer", "describe", "root_cause", "tell", "user_traceback"]

TALKING = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/graph.py")
OURS = "/ddp_utils/"
LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "gloo/transport",
    "remote process exited",
    "nccl communicator was aborted",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "sendbytes failed",
    "recvvector failed",
    "should dump",
)


def comes_from_a_lost_peer(error: BaseException) -> bool:
    """Whether an exception is only the echo of another rank's end.

    It is one if it left a collective, judged by the innermost frame, and its text speaks of a
    connection. A dataset's own ``ConnectionResetError`` passes through no collective and is a
    cause; so is a ``TypeError`` for a wrong argument of ``all_reduce``. An exception with
    ``effect_of`` was raised for what another rank has told of its own.
    """
    if hasattr(error, "effect_of"):
        return True
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if not isinstance(chain, (RuntimeError, OSError)):
            return False
        text = summary(chain).lower()  # str() of a user's exception may raise
        if any(sign in text for sign in LOSS) and _left_a_collective(chain):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False


def _left_a_collective(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    innermost = frames[-1].filename.replace("\\", "/")
    return any(place in innermost for place in TALKING) or OURS in innermost


def root_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the end that brought down the others, or None where all is well.

    The earliest failure that is no echo; among echoes only, the rank that left the others
    waiting; SystemExit(0) is a failure only where some other rank did not exit alike.
    """
    failures = [end for end in ends if is_failure(end)]
    own = [end for end in failures if not end.lost_peer]
    if own:
        return min(own, key=lambda end: end.time)
    left = [end for end in ends if is_clean_exit(end)]
    if failures and not left:
        left = [end for end in ends if end.kind == "returned"]
    if left and len(left) < len(ends):
        exits_alone = [end for end in left if is_clean_exit(end)]
        if failures or exits_alone:
            return min(exits_alone or left, key=lambda end: end.time)
    return min(failures, key=lambda end: end.time) if failures else None


def is_failure(end: RankEnd) -> bool:
    """Whether an end would fail the job by itself."""
    if end.kind == "exited":
        return end.exit_code != 0
    return end.kind in ("raised", "killed")


def is_clean_exit(end: RankEnd) -> bool:
    """Whether a rank left by ``sys.exit(0)``."""
    return end.kind == "exited" and end.exit_code == 0


def tell(root: RankEnd, ends: Sequence[RankEnd], world_size: int, tail: str = "") -> str:
    """Return the report of a failed job; it ends with the traceback of the root cause.

    ``tail`` is what that rank last wrote, where the user has not seen it.
    """
    others = [end for end in ends if end.rank != root.rank]
    lines = [
        f"rank {root.rank} of {world_size}, {root.time:.1f} s after the start, {describe(root)}"
    ]
    if root.kind == "returned" or is_clean_exit(root):
        lines[0] += " while other ranks still waited for it"
    lines += [f"  {text}" for text in _folded(others)]
    if root.signal == "SIGKILL":
        lines.append("  SIGKILL often means that the kernel had run out of memory (see dmesg).")
    if root.kind == "returned" or is_clean_exit(root):
        lines += _where_they_waited(others)
    if tail:
        lines += ["", tail.rstrip()]
    if root.traceback:
        lines += ["", f"Traceback of rank {root.rank}:", root.traceback.rstrip()]
    return "\n".join(lines)


def describe(end: RankEnd) -> str:
    """Return a rank's end as the second half of a sentence."""
    if end.kind == "raised":
        lost = " (it lost its peer)" if end.lost_peer else ""
        return f"failed: {end.summary}{lost}"
    if end.kind == "returned":
        return "returned"
    if end.kind == "killed":
        return f"was killed by {end.signal}{end.summary}"
    if end.kind == "ended":
        return "was ended because of that"
    if end.exit_code == 0:
        return "left by sys.exit(0)"
    return f"exited with code {end.exit_code}{end.summary}"


def _folded(ends: Iterable[RankEnd]) -> list[str]:
    """Return one line for all ranks that ended alike."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        groups.setdefault(describe(end), []).append(end.rank)
    return [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in groups.items()
    ]


def _where_they_waited(ends: Sequence[RankEnd]) -> list[str]:
    waiting = next((end for end in ends if end.traceback), None)
    if waiting is None:
        return []
    return ["", f"Where rank {waiting.rank} waited:", waiting.traceback.rstrip()]


def user_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without this package's outermost frames."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        if OURS + "start/" not in tb.tb_frame.f_code.co_filename.replace("\\", "/"):
            break
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def summary(error: BaseException) -> str:
    """Return an exception's last line, as Python prints it."""
    told = traceback.TracebackException(type(error), error, None)
    told.__notes__ = None  # type: ignore[attr-defined]  # they would come last (Python 3.11)
    return list(told.format_exception_only())[-1].strip()


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
