"""What do other ranks hold in place of an object that only rank zero has?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from ddp_utils.callsite import Section, one_rank_section
from ddp_utils.world.world import get_rank

__all__ = ["StandIn", "only_where"]

T = TypeVar("T")


class StandIn:
    """Takes whatever is done to it in silence, and says so where an answer would be needed.

    Attributes, calls and items are stand-ins again; what is assigned to an attribute stays.
    As long as the answer is only passed on, a script runs the same on all ranks. Where it would
    decide something (``if writer.enabled``), this rank would go another way than rank zero:
    that is a ``TypeError``.
    """

    def __init__(self, name: str, walks: Any = ()) -> None:
        self._name = name
        self._walks = walks

    def __repr__(self) -> str:
        return f"<stand-in for {self._name} on rank {get_rank()}>"

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__") or name in ("_name", "_walks"):  # protocols, copying, pickling
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], StandIn):
            return args[0]  # as a decorator it must not swallow what it decorates
        return StandIn(f"{self._name}()", _to_walk(args, kwargs))

    def __iter__(self) -> Iterator[Any]:
        """Walk what it was called with, as a progress bar does: loops run on all ranks alike."""
        return iter(self._walks)

    def __getitem__(self, key: Any) -> StandIn:
        return StandIn(f"{self._name}[{key!r}]")

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __delitem__(self, key: Any) -> None: ...

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __bool__(self) -> bool:
        self._refuse()

    def __contains__(self, item: Any) -> bool:
        self._refuse()

    def __eq__(self, other: object) -> bool:
        return True if self is other else self._refuse()

    __hash__ = object.__hash__

    def _refuse(self) -> NoReturn:
        raise TypeError(
            f"{self!r} was asked for a truth value, which only rank zero has. Ask is_rank_zero() "
            "first, or let rank zero's answer reach all ranks by broadcast()."
        )


def _to_walk(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call with such arguments would walk, if it made a progress bar."""
    first = args[0] if args else kwargs.get("iterable", ())
    if isinstance(first, (str, bytes, Mapping)) or not hasattr(first, "__iter__"):
        return ()
    return first


def only_where(mine: Callable[[], bool], cls: type[T], section: Section) -> type[T]:
    """Return a class like ``cls`` that makes stand-ins where ``mine()`` is false."""

    def new(kind: type[Any], *args: Any, **kwargs: Any) -> Any:
        if not mine():
            return StandIn(cls.__name__, _to_walk(args, kwargs))
        if cls.__new__ is object.__new__:
            return object.__new__(kind)
        return cls.__new__(kind, *args, **kwargs)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with one_rank_section(section):
            cls.__init__(self, *args, **kwargs)

    names = ("__module__", "__qualname__", "__doc__")
    namespace = {name: getattr(cls, name) for name in names} | {"__new__": new}
    if cls.__init__ is not object.__init__:
        namespace["__init__"] = init
    metaclass: Any = type(cls)
    made: type[T] = metaclass(cls.__name__, (cls,), namespace)
    return made
