"""What other ranks hold in place of rank zero's object."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tqdm import tqdm

from ddp_utils import OneRankSectionError, rank_zero_only
from ddp_utils.agree.stand_in import StandIn
from ddp_utils.callsite import refuse_in_section
from ddp_utils.world import world as world_module
from ddp_utils.world.world import World


class Writer:
    made = 0

    def __init__(self, folder: str, every: int = 1) -> None:
        type(self).made += 1
        self.folder = folder
        self.every = every

    @classmethod
    def default(cls) -> Writer:
        return cls("runs")

    def add(self, name: str) -> str:
        return f"{self.folder}/{name}"


RankZeroWriter = rank_zero_only(Writer)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    token = world_module.SIMULATED.set(World(rank=3, world_size=4, local_rank=1))
    yield
    world_module.SIMULATED.reset(token)


def test_rank_zero_has_the_real_thing() -> None:
    Writer.made = 0
    writer = RankZeroWriter("runs", every=2)
    assert (writer.add("loss"), writer.every) == ("runs/loss", 2)
    assert isinstance(writer, Writer)
    assert isinstance(RankZeroWriter.default(), RankZeroWriter)
    assert RankZeroWriter.__name__ == "Writer"
    assert RankZeroWriter.made == 2


def test_others_make_nothing(elsewhere: None) -> None:
    Writer.made = 0
    assert type(RankZeroWriter("runs")) is StandIn
    assert type(RankZeroWriter.default()) is StandIn
    assert repr(RankZeroWriter("runs")) == "<stand-in for Writer on rank 3>"
    assert Writer.made == 0


def test_a_subclass_is_for_rank_zero_too(elsewhere: None) -> None:
    class Special(RankZeroWriter):  # type: ignore[misc,valid-type]
        pass

    assert type(Special("runs")) is StandIn


def test_abstract_classes_and_those_with_new_work() -> None:
    class Base(ABC):
        @abstractmethod
        def go(self) -> None: ...

    class Fixed(Base, tuple):  # type: ignore[type-arg]
        def __new__(cls, *numbers: int) -> Any:
            return super().__new__(cls, numbers)

        def go(self) -> None: ...

    assert tuple(rank_zero_only(Fixed)(1, 2)) == (1, 2)
    with pytest.raises(TypeError, match="abstract"):
        rank_zero_only(Base)()  # type: ignore[type-abstract]


def test_whatever_is_done_to_it_is_taken_in_silence(elsewhere: None) -> None:
    writer: Any = RankZeroWriter("runs")
    writer.add("loss", 1.0, step=3)
    writer.config.lr = 0.1
    writer["a"] = 1
    del writer["a"]
    writer["a"].b(1).c["d"]()
    with writer as inside, writer.section("x"):
        inside.flush()
    writer.step = 7
    assert writer.step == 7
    assert list(writer) == []
    assert f"{writer.url}" == "<stand-in for Writer.url on rank 3>"
    assert {writer: 1}[writer] == 1
    assert copy.copy(writer).name is not None
    assert type(pickle.loads(pickle.dumps(writer))) is StandIn
    assert not hasattr(writer, "__len__")
    assert not hasattr(writer, "__array__")


REFUSED: list[Callable[[Any], Any]] = [
    bool,
    int,
    float,
    len,
    lambda x: x == 1,
    lambda x: x != 1,
    lambda x: 1 in x,
    lambda x: x + 1,
    lambda x: 2 * x,
    lambda x: x < 3,
    lambda x: range(x),
    lambda x: not x,
    lambda x: [0, 1][x],
]


@pytest.mark.parametrize("use", REFUSED)
def test_it_refuses_to_be_an_answer(use: Callable[[Any], Any], elsewhere: None) -> None:
    with pytest.raises(TypeError):
        use(RankZeroWriter("runs").step)


def test_the_refusal_says_what_to_do(elsewhere: None) -> None:
    writer: Any = RankZeroWriter("runs")
    with pytest.raises(TypeError, match=r"stand-in for Writer.enabled on rank 3.*is_rank_zero\(\)"):
        print("on" if writer.enabled else "off")


def test_a_progress_bar_does_not_swallow_the_loop(elsewhere: None) -> None:
    bar = rank_zero_only(tqdm)
    assert list(bar(range(3))) == [0, 1, 2]
    assert list(bar(iterable=[4, 5])) == [4, 5]
    assert [i for i, _ in enumerate(bar("ab"))] == []
    progress: Any = RankZeroWriter("runs")
    assert list(progress.track(range(2))) == [0, 1]


def test_as_a_decorator_it_gives_back_what_it_decorates(elsewhere: None) -> None:
    writer: Any = RankZeroWriter("runs")

    @writer.watch
    def step() -> int:
        return 5

    assert step() == 5
    assert writer.wrap(step) is step


def test_a_collective_while_it_is_made_is_refused() -> None:
    class Bad:
        def __init__(self) -> None:
            refuse_in_section("all_gather")

    with pytest.raises(OneRankSectionError, match=r"inside the rank_zero_only .*Bad"):
        rank_zero_only(Bad)()
