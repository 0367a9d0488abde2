"""What make_sampler gives each rank, pass after pass."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from played_ranks import global_random_state, on_ranks
from ranks import from_all_ranks
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from ddp_utils import make_sampler, seed_everything
from ddp_utils.data import samplers
from ddp_utils.world.world import SIMULATED, World


def walked(length: int, **options: Any) -> list[int]:
    return list(make_sampler(length, seed=0, **options))


@given(st.integers(1, 80), st.integers(1, 9), st.booleans(), st.integers(0, 3))
@settings(deadline=None)
def test_every_sample_is_where_it_belongs(n: int, world: int, shuffle: bool, mode: int) -> None:
    options = [{"pad": True}, {"pad": False}, {"drop_last": True}, {}][mode]
    if options == {"drop_last": True} and n < world:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = on_ranks(world, walked, n, shuffle=shuffle, **options)
    together = sorted(sample for one in shares for sample in one)
    if options.get("pad", shuffle and not options):
        assert {len(one) for one in shares} == {-(-n // world)}
        assert set(together) == set(range(n))
    elif options.get("drop_last"):
        assert {len(one) for one in shares} == {n // world}
        assert len(set(together)) == len(together)
    else:
        assert together == list(range(n))
    dealt = [shares[p % world][p // world] for p in range(min(n, len(together)))]
    assert dealt == walked(n, shuffle=shuffle)[: len(dealt)]
    assert shuffle or dealt == list(range(len(dealt)))


def test_it_is_a_distributed_sampler_at_any_world_size() -> None:
    def facts() -> tuple[Any, ...]:
        sampler = make_sampler(10, seed=3)
        assert isinstance(sampler, DistributedSampler)
        names = ("rank", "num_replicas", "num_samples", "total_size", "epoch", "seed", "drop_last")
        return tuple(getattr(sampler, name) for name in names)

    assert facts() == (0, 1, 10, 10, 0, 3, False)
    assert on_ranks(4, facts)[2] == (2, 4, 3, 12, 0, 3, False)


def test_data_may_be_a_dataset_or_a_length() -> None:
    for data in (TensorDataset(torch.arange(5)), [1, 2, 3, 4, 5], range(5), 5, np.int64(5)):
        assert sorted(make_sampler(data)) == [0, 1, 2, 3, 4]
        assert list(make_sampler(data, shuffle=False)) == [0, 1, 2, 3, 4]
    assert list(make_sampler(SequentialSampler(range(3)))) == [0, 1, 2]


def test_epochs_advance_when_a_pass_is_exhausted() -> None:
    sampler = make_sampler(50, seed=0)
    orders = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert len({tuple(order) for order in orders}) == 3
    sampler.set_epoch(1)
    assert list(sampler) == orders[1]
    assert list(sampler) == orders[2]
    sampler.set_epoch(0)
    sampler.set_epoch(1)
    assert list(sampler) == orders[1]


def test_a_look_changes_nothing_and_a_left_pass_warns_once() -> None:
    sampler = make_sampler(50, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = next(iter(sampler))
        iterator = iter(sampler)
        assert next(iterator) == first
        assert sampler.epoch == 0
        for _ in range(5):
            next(iterator)
    with pytest.warns(UserWarning, match=r"range\(0, 50\) was left .* set_epoch\(1\)") as caught:
        order = list(sampler)
    assert caught[0].filename == __file__
    assert order[0] == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterator = iter(sampler)
        next(iterator), next(iterator)
        assert len(list(sampler)) == 50


def test_setting_the_epoch_needs_no_warning() -> None:
    sampler = make_sampler(50)
    for epoch in (0, 1, 1, 0):
        sampler.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            iterator = iter(sampler)
        next(iterator), next(iterator)


def test_one_seed_and_no_global_random_state() -> None:
    before = global_random_state()
    orders = [list(make_sampler(1000)), list(make_sampler(1000))]
    list(make_sampler(300_000))
    assert global_random_state() == before
    assert orders[0] == orders[1]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert list(make_sampler(1000)) == orders[0]
    assert list(make_sampler(1000, seed=1)) != list(make_sampler(1000, seed=2))


def test_seed_everything_decides_the_order() -> None:
    orders = []
    for seed in (1, 2, 1):
        seed_everything(seed)
        orders.append(list(make_sampler(100)))
    assert orders[0] == orders[2] != orders[1]
    assert list(make_sampler(100, seed=1)) == orders[0]


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "options", "kind", "message"),
    [
        (NoLength(), {}, TypeError, "NoLength has no length"),
        (Stream(), {}, TypeError, r"Stream is a stream.*shard_iterable"),
        (DistributedSampler(range(3), 1, 0), {}, TypeError, "shared out .* twice"),
        (3.5, {}, TypeError, "float has no length"),
        (iter([1]), {}, TypeError, "walked only once"),
        (0, {}, ValueError, r"range\(0, 0\) has no samples"),
        ([], {}, ValueError, "list has no samples"),
        (-1, {}, ValueError, "length of -1"),
        (5, {"pad": True, "drop_last": True}, ValueError, "choose one"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    data: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make_sampler(data, **options)


def test_too_few_samples_are_refused_or_told() -> None:
    with pytest.raises(ValueError, match="3 samples for 8 ranks"):
        on_ranks(8, walked, 3, drop_last=True)
    with pytest.warns(UserWarning, match="3 samples for 8 ranks"):
        padded = on_ranks(8, walked, 3)
    assert [len(one) for one in padded] == [1] * 8
    exact = on_ranks(8, walked, 3, shuffle=False)
    assert exact == [[0], [1], [2], [], [], [], [], []]


def test_a_plain_loader_with_workers_counts_what_was_handed_out() -> None:
    data = TensorDataset(torch.arange(40))
    sampler = make_sampler(data, seed=0)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=2)
    batches = iter(loader)
    seen = [sample for _ in range(7) for sample in next(batches)[0].tolist()]
    assert sampler.state_dict()["position"] == 14
    del batches
    assert sampler.state_dict()["position"] == 14
    resumed = make_sampler(data)
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(seen + list(resumed)) == list(range(40))


def test_a_plain_loader_that_has_drawn_all_does_not_end_the_epoch() -> None:
    sampler = make_sampler(8, seed=0)
    loader = DataLoader(range(8), batch_size=2, sampler=sampler, num_workers=2)
    first = next(iter(loader))
    assert sampler.epoch == 0
    again, *_ = list(loader)
    assert again.tolist() == first.tolist()
    assert next(iter(loader)).tolist() != first.tolist()


@pytest.mark.distributed(world_size=3)
def test_ranks_agree_without_talking() -> None:
    sampler = make_sampler(23)
    if sampler.rank == 1:
        next(iter(sampler))
    results = from_all_ranks(
        {"seed": sampler.seed, "first": list(sampler), "second": list(sampler)}
    )
    assert len({result["seed"] for result in results}) == 1
    for name in ("first", "second"):
        assert sorted(set().union(*(result[name] for result in results))) == list(range(23))
        assert {len(result[name]) for result in results} == {8}
    assert results[0]["first"] != results[0]["second"]


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("what", ["length", "seed"])
def test_ranks_that_differ_are_told(what: str) -> None:
    rank = int(make_sampler(4).rank)
    length, seed = (10 + rank, 0) if what == "length" else (10, rank)
    own = ""
    try:
        list(make_sampler(length, seed=seed))
    except RuntimeError as error:
        own = str(error)
    message = next(filter(None, from_all_ranks(own)))
    assert "ranks differ in the sampler" in message
    assert {"length": "11 samples", "seed": "seed 1"}[what] in message


@pytest.mark.distributed(world_size=2)
def test_a_sampler_made_too_early_is_refused() -> None:
    token = SIMULATED.set(World())
    sampler = make_sampler(10)
    SIMULATED.reset(token)
    with pytest.raises(RuntimeError, match="made before there were 2 ranks"):
        list(sampler)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_short_pass_is_counted_like_a_long_one(shuffle: bool) -> None:
    """Short passes are one list and long ones blocks; who walks them cannot tell."""

    def walk(block: int) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(samplers, "BLOCK", block)
            patch.setattr(samplers, "TABLE_BELOW", 0)
            sampler = make_sampler(11, seed=1, shuffle=shuffle, pad=True)
            seen: list[Any] = []
            for _ in range(2):
                for sample in sampler:
                    seen.append((sample, sampler.state_dict(), len(sampler)))
                seen.append(sampler.state_dict())
            iterator = iter(sampler)
            seen += [next(iterator), next(iterator), sampler.state_dict()]
            sampler.load_state_dict({**sampler.state_dict(), "position": 5})  # type: ignore[attr-defined]
            return [*seen, len(sampler), *sampler, sampler.state_dict()]

    for world in (1, 3):
        assert on_ranks(world, walk, 8192) == on_ranks(world, walk, 2)


def test_the_list_of_an_ordered_pass_is_nobodys_to_change() -> None:
    sampler = make_sampler(5, shuffle=False)
    list(sampler).clear()
    list(sampler).append(7)
    assert list(sampler) == list(range(5))


def test_it_can_be_pickled_and_copied_before_within_and_after_a_pass() -> None:
    sampler = make_sampler(9, seed=0)
    for _ in range(2):
        walk = iter(sampler)
        for _ in range(3):
            next(walk)
        for again in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
            assert again.state_dict() == sampler.state_dict()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert sorted(again) == list(range(9))
        list(walk)
