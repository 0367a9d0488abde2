"""How does one rank do something alone, while the others skip it or wait for it?

They wait at the store, never in a collective: rank zero may take an hour, and its failure is
everybody's within moments.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

from typing_extensions import ParamSpec

from ddp_utils.agree.stand_in import only_where
from ddp_utils.callsite import Section, call_site, one_rank_section, refuse_in_section
from ddp_utils.ground import settings
from ddp_utils.ground.errors import RankZeroError
from ddp_utils.process_group import find_rank, init_distributed, introduce, shared_store
from ddp_utils.talk import debug
from ddp_utils.talk.circle import circle_of
from ddp_utils.talk.collectives import all_gather
from ddp_utils.talk.collectives import broadcast as broadcast_value
from ddp_utils.talk.waiting import wait_for_word
from ddp_utils.world.world import current_world, get_rank, is_distributed, is_rank_zero

__all__ = ["rank_zero_first", "rank_zero_only", "rank_zero_print"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


@overload
def rank_zero_only(fn: type[T], *, local: bool = False) -> type[T]: ...
@overload
def rank_zero_only(fn: Callable[P, R], *, local: bool = False) -> Callable[P, R | None]: ...
@overload
def rank_zero_only(
    fn: Callable[P, R], *, local: bool = False, broadcast: Literal[True]
) -> Callable[P, R]: ...
@overload
def rank_zero_only(
    *, local: bool = False, broadcast: Literal[True]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def rank_zero_only(*, local: bool = False) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
def rank_zero_only(fn: Any = None, *, local: bool = False, broadcast: bool = False) -> Any:
    """Let only rank zero run a function or make an object; decided at each call.

    Args:
        fn: A function, or a class such as ``SummaryWriter``. From a class the other ranks get
            stand-ins, which take attribute access, calls, items, ``with`` and iteration in
            silence, and refuse to be taken for a truth value or a number.
        local: Rank zero of each machine, instead of the only one.
        broadcast: Give all ranks what rank zero returned. Then this is a collective, and the
            others wait for rank zero without any timeout, as long as it lives.

    Returns:
        Without ``broadcast`` the call never communicates: the other ranks get None at once, and
        an exception on rank zero is rank zero's. With it all get rank zero's value (with
        ``local`` that of their own machine).

    Raises:
        RankZeroError: With ``broadcast``, on the other ranks, if rank zero raises.
        OneRankSectionError: The function calls a collective of this package, to which the other
            ranks will not come.

    Example:
        >>> @rank_zero_only
        ... def report(loss: float) -> None:
        ...     print(f"loss {loss}")
        >>> report(0.5)
        loss 0.5
        >>> @rank_zero_only(broadcast=True)
        ... def run_name() -> str:
        ...     return "run-7"
        >>> run_name()
        'run-7'
    """
    if fn is None:
        return functools.partial(rank_zero_only, local=local, broadcast=broadcast)
    section = _section_of(fn)
    if isinstance(fn, type):
        if broadcast:
            raise TypeError(f"broadcast=True needs a function, and {fn.__name__} is a class")
        return only_where(lambda: is_rank_zero(local), fn, section)
    if any(test(fn) for test in (inspect.iscoroutinefunction, inspect.isgeneratorfunction)):
        raise TypeError(
            f"rank_zero_only cannot make {section.name} run on one rank: it only returns "
            "something that is still to be run, and the other ranks would get None"
        )

    @functools.wraps(fn)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(fn, *args, **kwargs)
        if broadcast:
            return _run_for_all(call, section, local)
        if not is_rank_zero(local):
            return None
        with one_rank_section(section):
            return call()

    return on_rank_zero


@contextmanager
def rank_zero_first(local: bool = False) -> Iterator[None]:
    """Let rank zero run the block while the others wait, and then the others.

    For a download, or for building a cache. The others wait at the store and not in a
    collective, so that no timeout applies as long as rank zero lives. Under a launcher it may
    come before ``init_distributed``, which it calls then.

    Args:
        local: Rank zero of each machine goes first, for what lies on the machines' own disks.

    Raises:
        RankZeroError: On the other ranks, if the block raises on rank zero.
        AbsentRanksError: Rank zero has left the job without coming here.

    Example:
        >>> with rank_zero_first():
        ...     data = list(range(3))  # download=True
    """
    _join_the_others()
    if not is_distributed():
        yield
        return
    refuse_in_section("rank_zero_first", in_turn=True)
    turn = _Turn("rank_zero_first", local)
    if turn.is_mine:
        with turn.taking(Section("rank_zero_first", call_site(), excludes=False)):
            yield
    else:
        turn.wait()
        with one_rank_section(Section("rank_zero_first", call_site(), excludes=False)):
            yield


def rank_zero_print(*values: object, **kwargs: Any) -> None:
    """Print on rank zero alone, and at once; takes what ``print`` takes.

    Example:
        >>> rank_zero_print("epoch", 3)
        epoch 3
    """
    if is_rank_zero():
        print(*values, **{"flush": True, **kwargs})


def _section_of(fn: Any) -> Section:
    name = getattr(fn, "__qualname__", repr(fn))
    code = getattr(inspect.unwrap(fn), "__code__", None)
    site = f"{code.co_filename}:{code.co_firstlineno}" if code else f"called at {call_site()}"
    return Section(f"the rank_zero_only {name}", site, excludes=True)


def _run_for_all(call: Callable[[], R], section: Section, local: bool) -> R:
    """Run on rank zero, and return its value on every rank."""
    _join_the_others()
    if circle_of(None, section.name).size == 1:
        with one_rank_section(section):
            return call()
    refuse_in_section(f"{section.name} with broadcast=True")
    node_rank = current_world().node_rank
    # Not every launcher tells how many machines there are: the ranks know it together.
    nodes = sorted(set(all_gather(node_rank))) if local else []
    turn = _Turn(section.name, local)
    value: Any = None
    if turn.is_mine:
        with turn.taking(section):
            value = call()
    if not local:
        turn.wait()
        return broadcast_value(value)  # type: ignore[no-any-return]
    for each in nodes:
        turn.wait(each)
    values = all_gather((node_rank, turn.is_mine, value))
    return next(theirs for node, zero, theirs in values if zero and node == node_rank)  # type: ignore[no-any-return]


def _join_the_others() -> None:
    """Make the process group, if a launcher started this process and nobody has made it yet."""
    if not is_distributed():
        world = current_world()
        if world.world_size > 1 and world.launcher != "none":
            init_distributed()


class _Turn:
    """One time that rank zero goes first: the n-th of its kind, on each rank.

    Its end, or what it raised, is a word in the store.
    """

    def __init__(self, operation: str, local: bool) -> None:
        introduce()
        self._operation = operation
        self._local = local
        self._number = next(_numbers[operation])
        self._node_rank = current_world().node_rank if local else 0
        self.is_mine = is_rank_zero(local)
        if settings.DEBUG.get() and not local:
            debug.compare_with_zero(circle_of(None, operation), operation)

    @contextmanager
    def taking(self, section: Section) -> Iterator[None]:
        """Run the block as rank zero, and tell the others how it ended."""
        word: dict[str, Any] = {}
        try:
            with one_rank_section(section):
                yield
        except BaseException as error:
            word = {"rank": get_rank(), "text": _told(error)}
            raise
        finally:
            shared_store().set(self._key(self._node_rank), json.dumps(word))

    def wait(self, node_rank: int | None = None) -> None:
        """Wait for the end of rank zero's turn, by default that on this rank's own machine.

        Raises:
            RankZeroError: It raised.
        """
        node_rank = self._node_rank if node_rank is None else node_rank
        key = self._key(node_rank)
        text = wait_for_word(shared_store(), key, self._operation, lambda: self._awaited(node_rank))
        assert text is not None  # there was no time limit
        word = json.loads(text)
        if word:
            error: Any = RankZeroError(
                f"rank {word['rank']} raised in {self._operation}, for which rank {get_rank()} "
                f"waited ({call_site()}): {word['text']}"
            )
            error.effect_of = word["rank"]
            raise error

    def _key(self, node_rank: int) -> str:
        return f"turn/{self._operation}/{self._number}/{node_rank if self._local else 'zero'}"

    def _awaited(self, node_rank: int) -> list[int]:
        zero = find_rank(node_rank, 0) if self._local else 0
        return [] if zero is None else [zero]


def _told(error: BaseException) -> str:
    """Return an exception in one line, with the line that it comes from."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
