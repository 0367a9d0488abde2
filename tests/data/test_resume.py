"""Stop anywhere, go on anywhere: what was not seen, and only that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from played_ranks import on_ranks
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_utils import (
    load_checkpoint,
    make_loader,
    make_sampler,
    save_checkpoint,
    shard_batch_sampler,
)
from ddp_utils.testing import run_distributed


def stopped(steps: int, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """Walk some batches; return what was seen, and the state."""
    loader = make_loader(**options)
    seen = [int(s) for batch in islice(loader, steps) for s in batch]
    return seen, loader.state_dict()  # type: ignore[attr-defined]


def rest(state: dict[str, Any], **options: Any) -> tuple[int, list[int], int]:
    """Resume; return the told length, what was seen, and the epoch after that."""
    loader = make_loader(**options)
    loader.load_state_dict(state)  # type: ignore[attr-defined]
    told = len(loader)
    batches = list(loader)
    assert told == len(batches)
    epoch = loader.state_dict()["epoch"]  # type: ignore[attr-defined]
    return told, [int(s) for batch in batches for s in batch], epoch


sizes = st.integers(1, 6)
worlds = st.integers(1, 5)


@given(st.integers(1, 60), worlds, worlds, sizes, sizes, st.integers(0, 12), st.booleans())
@settings(deadline=None, max_examples=150)
def test_the_rest_of_an_epoch_at_another_world_and_batch_size(
    n: int, world: int, then: int, size: int, later: int, steps: int, shuffle: bool
) -> None:
    options: dict[str, Any] = {"dataset": range(n), "shuffle": shuffle, "pad": False, "seed": 5}
    whole = -(-n // (world * size))
    steps = min(steps, n // (world * size))
    before = on_ranks(world, stopped, steps, batch_size=size, **options)
    states = [state for _, state in before]
    assert all(state == states[0] for state in states)
    seen = [s for share, _ in before for s in share]
    if steps == whole and steps > 0:
        assert sorted(seen) == list(range(n))
        return
    after = on_ranks(then, rest, states[0], batch_size=later, **options)
    together = seen + [s for _, share, _ in after for s in share]
    assert sorted(together) == list(range(n))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_resumed_epoch_is_the_rest_of_the_uninterrupted_one(world: int) -> None:
    options: dict[str, Any] = {"dataset": range(64), "shuffle": True, "global_batch_size": 8}
    whole = on_ranks(world, stopped, 8, seed=1, **options)
    before = on_ranks(world, stopped, 3, seed=1, **options)
    after = on_ranks(world, rest, before[0][1], **options)
    for rank in range(world):
        assert before[rank][0] + after[rank][1] == whole[rank][0]
        assert after[rank][2] == 1


def test_padding_stays_within_a_round_after_a_resume() -> None:
    options: dict[str, Any] = {"dataset": range(50), "shuffle": True, "seed": 1}
    before = on_ranks(3, stopped, 2, batch_size=4, **options)
    after = on_ranks(4, rest, before[0][1], batch_size=2, **options)
    assert len({told for told, _, _ in after}) == 1
    seen = [s for share, _ in before for s in share] + [s for _, share, _ in after for s in share]
    assert set(seen) == set(range(50))
    assert len(seen) < 50 + 4


@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_fetched_ahead_was_not_handed_out(persistent: bool) -> None:
    options: dict[str, Any] = {"dataset": range(40), "batch_size": 2, "shuffle": True, "seed": 2}
    options |= {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": persistent}
    loader = make_loader(**options)
    assert len(list(loader)) == 20
    batches = iter(loader)
    for step in range(1, 20):
        next(batches)
        assert loader.state_dict()["position"] == 2 * step  # type: ignore[attr-defined]
    seen, state = stopped(5, **options)
    assert state["position"] == 10
    assert sorted(seen + rest(state, **options)[1]) == list(range(40))


def test_the_state_at_the_ends_of_an_epoch() -> None:
    loader: Any = make_loader(range(20), 4, shuffle=True, seed=1)
    here = lambda: (loader.state_dict()["epoch"], loader.state_dict()["position"])  # noqa: E731
    assert here() == (0, 0)
    first = []
    for batch in loader:
        first.append(batch.tolist())
    assert here() == (1, 0)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert here() == (1, 20)
    resumed: Any = make_loader(range(20), 4, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert (len(resumed), list(resumed)) == (0, [])
    assert len(list(resumed)) == 5
    resumed.set_epoch(0)
    assert [batch.tolist() for batch in resumed] == first


def test_setting_the_loaded_epoch_keeps_the_position() -> None:
    _, state = stopped(2, dataset=range(20), batch_size=4, shuffle=True, seed=1)
    loader: Any = make_loader(range(20), 4, shuffle=True)
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert len(list(loader)) == 3
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert len(list(loader)) == 5


def test_resuming_costs_no_time_at_any_position() -> None:
    sampler: Any = make_sampler(10**12, seed=0)
    state = {**sampler.state_dict(), "position": 10**12 - 1}
    sampler.load_state_dict(state)
    assert len(list(sampler)) == 1


@given(st.integers(1, 40), worlds, worlds, st.integers(0, 40), st.integers(0, 1))
@settings(deadline=None, max_examples=60)
def test_wrapped_samplers_are_replayed(
    n: int, world: int, then: int, steps: int, kind: int
) -> None:
    def sampler(state: dict[str, Any] | None = None) -> Any:
        if kind:
            inner = BatchSampler(RandomSampler(range(3 * n)), 3, drop_last=False)
            made = shard_batch_sampler(inner, pad=False, seed=3)
        else:
            made = make_sampler(WeightedRandomSampler([1.0] * 50, n), pad=False, seed=3)
        if state is not None:
            made.load_state_dict(state)
        return made

    def some() -> tuple[list[Any], dict[str, Any]]:
        made = sampler()
        return list(islice(made, steps)), made.state_dict()

    steps = min(steps, n // world)
    whole = list(sampler())
    before = on_ranks(world, some)
    assert all(state == before[0][1] for _, state in before)
    if before[0][1]["epoch"] == 0:
        after = on_ranks(then, lambda: list(sampler(before[0][1])))
        seen = [item for share, _ in before for item in share]
        together = seen + [item for share in after for item in share]
        assert sorted(map(str, together)) == sorted(map(str, whole))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(31))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_streams_go_on_in_the_same_world(workers: int, steps: int) -> None:
    options: dict[str, Any] = {"dataset": Numbers(), "batch_size": 2, "num_workers": workers}
    before = on_ranks(2, stopped, steps, seed=1, **options)
    assert before[0][1] == before[1][1]

    def go_on() -> list[int]:
        loader: Any = make_loader(**options)
        loader.load_state_dict(before[0][1])
        return [int(s) for batch in loader for s in batch]

    seen = [s for share, _ in before for s in share] + sum(on_ranks(2, go_on), [])  # noqa: RUF017
    assert sorted(seen) == list(range(31))


def test_what_cannot_be_resumed_is_refused() -> None:
    _, stream = stopped(1, dataset=Numbers(), batch_size=2)
    _, state = stopped(1, dataset=range(10), shuffle=True)
    for options, loaded, message in (
        ({"dataset": Numbers(), "batch_size": 3}, stream, "batch_size=2, and here it is 3"),
        ({"dataset": Numbers(), "batch_size": 2, "num_workers": 1}, stream, "num_workers=0"),
        ({"dataset": Numbers(), "batch_size": 2}, state, "world_size=unknown"),
        ({"dataset": range(11), "shuffle": True}, state, "length=10.* length=11"),
        ({"dataset": range(10)}, state, "shuffle=True.* shuffle=False"),
        ({"dataset": range(10), "shuffle": True}, stream, "length=unknown"),
    ):
        loader: Any = make_loader(**options)
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(loaded)
    with pytest.raises(ValueError, match="world_size=1, and here it is 2"):
        on_ranks(2, lambda: make_loader(Numbers(), 2).load_state_dict(stream))  # type: ignore[attr-defined]


def first_part(path: str) -> list[int]:
    data = TensorDataset(torch.arange(60))
    loader: Any = make_loader(data, global_batch_size=12, shuffle=True, num_workers=2)
    seen = []
    for step, (batch,) in enumerate(loader, 1):
        seen += batch.tolist()
        if step == 2:
            save_checkpoint(path, loader=loader)
            break
    return seen


def second_part(path: str) -> list[int]:
    data = TensorDataset(torch.arange(60))
    loader: Any = make_loader(data, global_batch_size=6, shuffle=True, num_workers=1)
    load_checkpoint(path, loader=loader)
    return [s for (batch,) in loader for s in batch.tolist()]


def test_through_a_checkpoint_to_a_larger_world(tmp_path: Any) -> None:
    path = str(tmp_path / "last.pt")
    seen = run_distributed(first_part, path, world_size=2)
    seen += run_distributed(second_part, path, world_size=3)
    assert sorted(s for share in seen for s in share) == list(range(60))
