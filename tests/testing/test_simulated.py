"""``simulated_world`` lets code that asks who it is believe anything, and nothing afterwards."""

from __future__ import annotations

import os
from typing import Any

import pytest

import ddp_utils
from ddp_utils import current_world, get_rank, make_sampler, rank_zero_only
from ddp_utils.testing import simulated_world


def test_every_question_gets_the_simulated_answer() -> None:
    before = dict(os.environ), current_world()
    with simulated_world(rank=5, world_size=8, num_nodes=2) as world:
        answers = {
            name: getattr(ddp_utils, f"get_{name}")()
            for name in ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
        }
        assert current_world() is world
        assert not ddp_utils.is_rank_zero()
        assert not ddp_utils.is_rank_zero(local=True)
    assert answers == {
        "rank": 5,
        "world_size": 8,
        "local_rank": 1,
        "local_world_size": 4,
        "node_rank": 1,
    }
    assert (dict(os.environ), current_world()) == before


def test_it_nests_and_ends_with_an_exception() -> None:
    with simulated_world(rank=1, world_size=2):
        with pytest.raises(KeyError), simulated_world(rank=2, world_size=3):
            raise KeyError
        assert get_rank() == 1
    assert get_rank() == 0


@simulated_world(rank=3, world_size=4)
def rank_inside() -> int:
    return get_rank()


def test_it_decorates() -> None:
    assert (rank_inside(), rank_inside(), get_rank()) == (3, 3, 0)


def test_code_that_depends_on_the_rank_can_be_tested() -> None:
    @rank_zero_only
    def write() -> str:
        return "written"

    with simulated_world(rank=1, world_size=2):
        assert write() is None
    with simulated_world(rank=0, world_size=2):
        assert write() == "written"


def test_shares_of_all_ranks_can_be_put_together() -> None:
    seen: list[Any] = []
    for rank in range(4):
        with simulated_world(rank=rank, world_size=4):
            seen += make_sampler(10, shuffle=False)
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"rank": 0, "world_size": 3, "num_nodes": 2}, "num_nodes=2"),
        ({"rank": 0, "world_size": 3, "num_nodes": 0}, "num_nodes=0"),
    ],
)
def test_an_impossible_world_is_an_error(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said), simulated_world(**options):  # type: ignore[arg-type]
        pass
