"""How does one rank do something alone, while the others skip it or wait for it?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ddp_utils.callsite import Section, one_rank_section
from ddp_utils.world.world import is_rank_zero

__all__ = ["rank_zero_first", "rank_zero_only", "rank_zero_print"]

F = TypeVar("F", bound=Callable[..., Any])


def rank_zero_only(fn: Any = None, *, local: bool = False, broadcast: bool = False) -> Any:
    if fn is None:
        return functools.partial(rank_zero_only, local=local, broadcast=broadcast)
    code = getattr(fn, "__code__", None)
    site = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)
    section = Section(f"rank_zero_only function {fn.__qualname__}", site, excludes=True)

    @functools.wraps(fn)
    def only(*args: Any, **kwargs: Any) -> Any:
        if not is_rank_zero(local):
            return None
        with one_rank_section(section):
            return fn(*args, **kwargs)

    return only


def rank_zero_first(local: bool = False) -> Any:
    raise NotImplementedError


def rank_zero_print(*values: Any, **kwargs: Any) -> None:
    """Print on rank zero, and at once."""
    if is_rank_zero():
        print(*values, **{"flush": True, **kwargs})
