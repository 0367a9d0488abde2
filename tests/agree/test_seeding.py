"""One seed for all ranks, and one apart for each rank and worker."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from ddp_utils import make_sampler, seed_everything
from ddp_utils.agree import seeding
from ddp_utils.agree.seeding import common_seed, mix_seeds
from ddp_utils.testing import run_distributed
from ddp_utils.world.world import SIMULATED, World


@pytest.fixture(autouse=True)
def no_seed_given() -> Iterator[None]:
    before, seeding._given = seeding._given, None
    yield
    seeding._given = before


def drawn() -> tuple[float, ...]:
    return (torch.rand(()).item(), float(np.random.rand()), random.random())


def seeded(seed: int | None) -> Any:
    common = seed_everything(seed)
    return common, drawn(), list(make_sampler(50)), make_sampler(50).seed


def test_ranks_draw_apart_from_one_common_seed() -> None:
    first, again, other = (run_distributed(seeded, seed, world_size=2) for seed in (1, 1, 2))
    assert [common for common, *_ in first] == [1, 1]
    for column in range(3):
        assert first[0][1][column] != first[1][1][column]
        assert other[0][1][column] != first[0][1][column]
    assert first == again
    assert first[0][2:] != other[0][2:]
    assert sorted(first[0][2] + first[1][2]) == list(range(50))
    assert first[0][3] == first[1][3] == 1


def test_without_a_number_the_ranks_agree_on_one() -> None:
    zero, one = run_distributed(seeded, None, world_size=2)
    assert zero[0] == one[0] == zero[3]
    assert zero[1] != one[1]
    assert run_distributed(seeded, None, world_size=2)[0][0] != zero[0]


@pytest.mark.distributed(world_size=2)
def test_a_number_with_the_rank_in_it_is_found_out() -> None:
    own = ""
    try:
        seed_everything(40 + make_sampler(2).rank)
    except RuntimeError as error:
        own = str(error)
    everybodys: list[Any] = [None] * 2
    dist.all_gather_object(everybodys, own)
    message = next(filter(None, everybodys))
    assert "seed_everything got different numbers" in message
    assert "has 40" in message
    assert "has 41" in message


@pytest.mark.distributed(world_size=2)
def test_one_rank_may_seed_at_a_line_of_its_own() -> None:
    if make_sampler(2).rank == 0:
        seed_everything(99)
    assert seed_everything(3) == 3


class Seeding(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, ...]:
        seed_everything(7)
        return drawn()


def test_workers_that_seed_themselves_draw_apart_too() -> None:
    draws = [tuple(sample) for sample in DataLoader(Seeding(), batch_size=None, num_workers=2)]
    assert draws[0] == draws[2] != draws[1] == draws[3]


def test_where_nobody_can_agree_is_an_error() -> None:
    assert isinstance(common_seed(), int)
    assert common_seed() == common_seed()
    token = SIMULATED.set(World(rank=1, world_size=2))
    assert isinstance(common_seed(), int)
    SIMULATED.reset(token)


def test_ranks_without_a_group_cannot_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 is in no process group yet.*init_distrib"):
        list(make_sampler(10))
    assert len(list(make_sampler(10, seed=3))) == 5
    assert list(make_sampler(10, shuffle=False)) == [1, 3, 5, 7, 9]


@given(st.lists(st.integers(-(2**130), 2**130), min_size=1, max_size=4), st.integers(0, 3))
def test_mixing_depends_on_every_number(numbers: list[int], at: int) -> None:
    mixed = mix_seeds(*numbers)
    assert 0 <= mixed < 2**64
    changed = [*numbers]
    changed[at % len(numbers)] += 1
    assert mix_seeds(*changed) != mixed
    assert mix_seeds(*numbers, 0) != mixed


def test_neighbouring_seeds_come_out_far_apart() -> None:
    mixed = [mix_seeds(seed, rank) for seed in range(50) for rank in range(50)]
    assert len(set(mixed)) == 2500
    flips = [bin(a ^ b).count("1") for a, b in pairwise(mixed)]
    assert 31 < sum(flips) / len(flips) < 33
