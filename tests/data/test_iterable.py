"""Streams over ranks and workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from played_ranks import global_random_state, on_ranks
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_utils import make_loader, shard_iterable
from ddp_utils.data.iterable import IterableShard


class Numbers(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.n


class ShardsItself(Sized):
    """As torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.n))
        return iter(range(info.id, self.n, info.num_workers))


class Shuffles(Numbers):
    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.n))
        random.shuffle(numbers)
        for number in numbers:
            yield number + 1000 * int(torch.randint(3, ()))


def set_range(worker_id: int) -> None:
    """Shard in ``worker_init_fn``, as torch's documentation shows it too."""
    info = get_worker_info()
    assert info is not None
    per_worker = -(-info.dataset.n // info.num_workers)
    info.dataset.first = info.id * per_worker
    info.dataset.last = min(info.dataset.n, (info.id + 1) * per_worker)


class Range(Numbers):
    first, last = 0, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last or self.n))


modes = st.sampled_from([{}, {"pad": True}, {"drop_last": True}])
streams = st.sampled_from([Numbers, ShardsItself, Shuffles])


@given(streams, st.integers(0, 40), st.integers(1, 7), modes)
@settings(deadline=None)
def test_every_sample_once_or_equally_many(
    kind: type[Numbers], n: int, world: int, options: dict[str, bool]
) -> None:
    shares = on_ranks(world, lambda: list(shard_iterable(kind(n), seed=1, **options)))
    together = sorted(sample % 1000 for share in shares for sample in share)
    if not options:
        assert together == list(range(n))
    else:
        rounds = n // world if "drop_last" in options else -(-n // world)
        assert {len(share) for share in shares} == {rounds}
        assert set(together) <= set(range(n))
        if "pad" in options:
            assert set(together) == set(range(n))
        else:
            assert len(set(together)) == len(together)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [Numbers, ShardsItself, Shuffles])
def test_ranks_times_workers(kind: type[Numbers], workers: int) -> None:
    def batches(**options: Any) -> list[list[int]]:
        loader = make_loader(kind(29), 2, num_workers=workers, seed=1, **options)
        return [batch.tolist() for batch in loader]

    exact = on_ranks(2, batches)
    assert sorted(s % 1000 for rank in exact for batch in rank for s in batch) == list(range(29))
    padded = on_ranks(2, lambda: batches(pad=True))
    assert len(padded[0]) == len(padded[1])
    assert {s % 1000 for rank in padded for batch in rank for s in batch} == set(range(29))


def test_worker_init_fn_may_shard() -> None:
    def numbers() -> list[int]:
        loader = make_loader(Range(29), None, num_workers=2, worker_init_fn=set_range)
        return [int(number) for number in loader]

    assert sorted(n for share in on_ranks(2, numbers) for n in share) == list(range(29))
    with pytest.raises(RuntimeError, match="worker_init_fn shards Range"):
        # In this process: torch needs 10 s to end workers whose worker_init_fn raised.
        IterableShard(Range(29), pad=True, drop_last=False, seed=0).call_worker_init(set_range, 0)


def test_asking_too_late_is_an_error_and_not_a_loss() -> None:
    class Late(Numbers):
        def __iter__(self) -> Iterator[int]:
            yield 0
            info = get_worker_info()
            if info is not None:
                yield from range(1 + info.id, self.n, info.num_workers)

    with pytest.raises(RuntimeError, match=r"Late asked .* only after its first sample"):
        on_ranks(2, lambda: list(shard_iterable(Late(9))))


class OwnGenerator(Numbers):
    """Shuffles with a generator of its own, which comes out differently on every rank."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = random.Random(random.SystemRandom().random())

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.sample(range(self.n), self.n))


def test_a_streams_own_generator_is_the_same_on_all_ranks() -> None:
    shares = on_ranks(3, lambda: list(shard_iterable(OwnGenerator(20), seed=1)))
    assert sorted(s for share in shares for s in share) == list(range(20))


def test_an_infinite_stream_is_shared_out() -> None:
    class Forever(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return count()

    for pad in (False, True):
        shares = on_ranks(2, lambda pad=pad: list(islice(shard_iterable(Forever(), pad=pad), 5)))
        assert shares == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_the_rest_of_the_program_sees_nothing_of_it() -> None:
    before = global_random_state()
    for _ in shard_iterable(Shuffles(9)):
        assert global_random_state() == before


class Epochs(IterableDataset[int]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_epoch_reaches_workers(persistent: bool) -> None:
    loader = make_loader(Epochs(), 2, num_workers=2, persistent_workers=persistent)
    for epoch in range(3):
        assert [batch.tolist() for batch in loader] == [[epoch] * 2] * 2
    plain = DataLoader(
        shard_iterable(Epochs()), batch_size=4, num_workers=1, persistent_workers=persistent
    )
    for epoch in (0, 5):
        plain.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        assert [batch.tolist() for batch in plain] == [[epoch] * 4]


def test_epochs_of_a_stream_differ() -> None:
    stream = shard_iterable(Shuffles(50))
    assert list(stream) != list(stream)
    loader = make_loader(Shuffles(50), 10)
    orders = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert orders[0] != orders[1]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), modes)
@settings(deadline=None)
def test_lengths_are_told_where_the_stream_has_one(
    n: int, world: int, size: int, options: dict[str, bool]
) -> None:
    def counts() -> tuple[int, int]:
        loader = make_loader(Sized(n), size, pad=options.get("pad"))
        return len(loader), len(list(loader))

    for told, walked in on_ranks(world, counts):
        assert told == walked
    with pytest.raises(TypeError):
        len(make_loader(Numbers(3)))


def test_streams_only() -> None:
    with pytest.raises(TypeError, match="IterableDataset, not list"):
        shard_iterable([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="by itself"):
        shard_iterable(shard_iterable(Numbers(3)))
    with pytest.raises(ValueError, match="choose one"):
        shard_iterable(Numbers(3), pad=True, drop_last=True)
    assert shard_iterable(Numbers(3)).n == 3  # type: ignore[attr-defined]
