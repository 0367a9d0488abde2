"""Any sampler and batch sampler, dealt out from one sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from played_ranks import global_random_state, on_ranks
from ranks import from_all_ranks
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_utils import make_sampler, shard_batch_sampler


class Draws(Sampler[int]):
    """A user's sampler that draws by whatever it is told to."""

    def __init__(self, draw: Any, n: int = 20) -> None:
        self.draw = draw
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return (int(self.draw()) for _ in range(self.n))

    def __len__(self) -> int:
        return self.n


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> int:
        if isinstance(self.generator, torch.Generator):
            return int(torch.randint(1000, (), generator=self.generator))
        if isinstance(self.generator, random.Random):
            return self.generator.randrange(1000)
        if isinstance(self.generator, np.random.Generator):
            return int(self.generator.integers(1000))
        return int(self.generator.randint(1000))


def kinds() -> dict[str, Any]:
    """Return samplers whose generators come out differently on each call, as on each rank."""
    fresh = int.from_bytes(random.SystemRandom().randbytes(4), "little")
    torch_generator = torch.Generator().manual_seed(fresh)
    return {
        "torch": Draws(lambda: torch.randint(1000, ())),
        "numpy": Draws(lambda: np.random.randint(1000)),
        "python": Draws(lambda: random.randrange(1000)),
        "own torch": Draws(Holder(torch_generator)),
        "own numpy": Draws(Holder(np.random.default_rng(fresh))),
        "own philox": Draws(Holder(np.random.Generator(np.random.Philox(fresh)))),
        "own old numpy": Draws(Holder(np.random.RandomState(fresh))),
        "own python": Draws(Holder(random.Random(fresh))),
        "random": RandomSampler(range(20)),
        "replacement": RandomSampler(range(20), True, 33, generator=torch_generator),
        "weighted": WeightedRandomSampler([0.0] + [1.0] * 19, 31),
        "subset": SubsetRandomSampler(range(5, 18)),
    }


@pytest.mark.parametrize("kind", list(kinds()))
def test_all_ranks_draw_one_sequence_whatever_the_generator(kind: str) -> None:
    def passes() -> list[list[int]]:
        for other in range(random.SystemRandom().randrange(9)):
            torch.rand(1), np.random.rand(), random.random(), other
        sampler = make_sampler(kinds()[kind], seed=4)
        return [list(sampler), list(sampler)]

    alone = passes()
    shares = on_ranks(3, passes)
    for which in (0, 1):
        dealt = [share[which] for share in shares]
        sequence = [dealt[p % 3][p // 3] for p in range(len(alone[which]))]
        assert sequence == alone[which]
        assert {len(one) for one in dealt} == {-(-len(sequence) // 3)}
    assert alone[0] != alone[1]


def test_the_rest_of_the_program_sees_nothing_of_it() -> None:
    own = torch.Generator().manual_seed(1)
    state = own.get_state()
    sampler = make_sampler(WeightedRandomSampler([1.0] * 50, 50, generator=own))
    before = global_random_state()
    for _ in zip(range(30), sampler, strict=False):
        assert global_random_state() == before
    assert torch.equal(own.get_state(), state)


def test_the_users_generator_decides_where_nothing_else_does() -> None:
    def order(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return list(make_sampler(RandomSampler(range(50), generator=generator)))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_an_infinite_sampler_is_dealt_out() -> None:
    class Forever(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return count()

    def some() -> list[int]:
        return list(islice(make_sampler(Forever()), 500))

    shares = on_ranks(3, some)
    assert shares == [list(range(rank, 1500, 3)) for rank in range(3)]


def test_a_sampler_with_a_set_epoch_is_told_the_epoch() -> None:
    class Told(Sampler[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 3)

    sampler = make_sampler(Told())
    assert [list(sampler), list(sampler)] == [[0, 0, 0], [1, 1, 1]]
    sampler.set_epoch(7)
    assert list(sampler) == [7, 7, 7]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_batches_are_dealt_out_in_equal_number(n: int, world: int, size: int, mode: int) -> None:
    options: dict[str, Any] = [{}, {"pad": False}, {"drop_last": True}][mode]
    batches = list(BatchSampler(range(n), size, drop_last=False))
    if options == {"drop_last": True} and len(batches) < world:
        return

    def walked() -> tuple[int, list[list[int]]]:
        sampler = shard_batch_sampler(BatchSampler(range(n), size, drop_last=False), **options)
        return len(sampler), list(sampler)

    results = on_ranks(world, walked)
    shares = [share for _, share in results]
    assert [length for length, _ in results] == [len(share) for share in shares]
    if options != {"pad": False}:
        assert len({len(share) for share in shares}) == 1
    dealt = [
        shares[p % world][p // world]
        for p in range(min(len(batches), sum(len(share) for share in shares)))
    ]
    assert dealt == batches[: len(dealt)]
    if options != {"drop_last": True}:
        assert dealt == batches


def test_a_batch_sampler_keeps_its_attributes() -> None:
    sampler = shard_batch_sampler(BatchSampler(range(10), 4, drop_last=True))
    assert sampler.batch_size == 4  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        sampler.no_such_thing  # type: ignore[attr-defined]  # noqa: B018


def test_what_deals_out_nothing_is_refused() -> None:
    class Empty(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ValueError, match="Empty drew nothing"):
        list(make_sampler(Empty()))
    with pytest.raises(ValueError, match="2 draws for 4 ranks"):
        on_ranks(4, lambda: list(make_sampler(SubsetRandomSampler([1, 2]), drop_last=True)))
    with pytest.raises(TypeError, match="walked only once"):
        shard_batch_sampler(iter([[1]]))


class Afresh(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(100).tolist())


@pytest.mark.distributed(world_size=2)
def test_a_sampler_that_cannot_agree_is_found_out() -> None:
    own = ""
    try:
        list(make_sampler(Afresh()))
    except RuntimeError as error:
        own = str(error)
    message = next(filter(None, from_all_ranks(own)))
    assert "Afresh draws differently on different ranks" in message


@pytest.mark.distributed(world_size=3)
def test_ranks_with_generators_seeded_apart_still_share_one_sequence() -> None:
    rank = make_sampler(3).rank
    generator = torch.Generator().manual_seed(rank)
    sampler = make_sampler(RandomSampler(range(21), generator=generator))
    results = from_all_ranks([*sampler, sampler.seed])
    assert len({result.pop() for result in results}) == 1
    assert sorted(sample for result in results for sample in result) == list(range(21))
