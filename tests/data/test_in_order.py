"""Predictions of all ranks, each once, in the dataset's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ranks import from_all_ranks
from torch.utils.data import DataLoader, RandomSampler

from ddp_utils import (
    RanksDisagreeError,
    all_reduce_mean,
    all_reduce_sum,
    gather_in_order,
    make_loader,
    make_sampler,
    shard_batch_sampler,
)


class Pair(NamedTuple):
    logits: Any
    names: Any


@dataclass
class Output:
    pair: Pair
    scores: Any


def predictions(samples: list[int]) -> Output:
    rows = torch.tensor(samples, dtype=torch.float64)
    logits = torch.stack([rows, rows**2], dim=1)
    return Output(Pair(logits, [f"sample {s}" for s in samples]), {"root": np.sqrt(rows.numpy())})


def metrics(samples: list[int]) -> torch.Tensor:
    return torch.tensor([s / 7 for s in samples], dtype=torch.float64).cumsum(0)


def evaluate() -> None:
    for n in (1, 2, 3, 10, 33):
        for options in ({}, {"shuffle": True, "pad": False}, {"shuffle": True}):
            loader = make_loader(range(n), 4, **options)  # type: ignore[arg-type]
            samples = [int(s) for batch in loader for s in batch]
            mine = predictions(samples) if samples else None
            everything = gather_in_order(mine, loader)
            expected = predictions(list(range(n)))
            assert isinstance(everything, Output)
            assert torch.equal(everything.pair.logits, expected.pair.logits)
            assert everything.pair.names == expected.pair.names
            assert (everything.scores["root"] == expected.scores["root"]).all()
            rows = gather_in_order(torch.tensor(samples), loader)
            assert rows is not None
            assert torch.equal(metrics(rows.tolist()), metrics(list(range(n))))  # bit by bit


@pytest.mark.filterwarnings("ignore:.* samples for . ranks")
@pytest.mark.distributed(world_size=[1, 2, 4])
def test_evaluation_is_that_of_one_process() -> None:
    evaluate()
    for n in (1, 3, 50):
        losses = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        loader = make_loader(range(n), 4)
        mine = [int(s) for batch in loader for s in batch]
        total, count = sum(float(losses[s]) for s in mine), len(mine)
        assert all_reduce_sum({"correct": sum(s % 3 == 0 for s in mine), "n": count}) == {
            "correct": sum(s % 3 == 0 for s in range(n)),
            "n": n,
        }
        mean = all_reduce_mean(total / count if count else 0.0, weight=count)
        assert mean == pytest.approx(losses.mean().item(), abs=1e-12)


def test_it_works_without_ranks() -> None:
    evaluate()


@pytest.mark.distributed(world_size=2)
def test_one_rank_alone_may_get_the_result() -> None:
    sampler = make_sampler(7, shuffle=False)
    rows = gather_in_order(torch.tensor(list(sampler)), sampler, dst=1)
    if sampler.rank == 0:
        assert rows is None
    else:
        assert rows is not None
        assert rows.tolist() == list(range(7))


@pytest.mark.distributed(world_size=2)
def test_other_passes_come_in_order_too() -> None:
    # Left out by drop_last; resumed; drawn by a sampler of one's own; walked by a plain loader.
    loader: Any = make_loader(range(9), 2, drop_last=True)
    mine = torch.tensor([int(s) for batch in loader for s in batch])
    assert gather_in_order(mine, loader).tolist() == list(
        range(9 - 9 % (2 * loader.sampler.num_replicas))
    )

    loader = make_loader(range(12), 2)
    loader.load_state_dict({**loader.state_dict(), "position": 5})
    mine = torch.tensor([int(s) for batch in loader for s in batch])
    assert gather_in_order(mine, loader).tolist() == list(range(5, 12))

    sampler = make_sampler(RandomSampler(range(11)), seed=1)
    drawn = gather_in_order(list(sampler), sampler)
    assert drawn is not None
    assert sorted(drawn) == list(range(11))
    sampler = make_sampler(RandomSampler(range(11)), seed=1)
    assert gather_in_order({"s": list(sampler)}, sampler) == {"s": drawn}

    plain = DataLoader(range(11), 2, sampler=make_sampler(11, shuffle=False), num_workers=1)  # type: ignore[arg-type]
    mine = torch.tensor([int(s) for batch in plain for s in batch])
    assert gather_in_order(mine, plain).tolist() == list(range(11))


@pytest.mark.distributed(world_size=2)
def test_one_ranks_mistake_is_every_ranks_error() -> None:
    loader: Any = make_loader(range(7), 2)
    sampler = loader.sampler
    messages = []

    def failing(tree: Any, source: Any) -> None:
        with pytest.raises((RuntimeError, TypeError)) as caught:
            gather_in_order(tree, source)
        messages.append(str(caught.value))

    failing(torch.zeros(4), loader)
    list(loader)
    failing(torch.zeros(4), loader)
    failing({"loss": 0.5}, sampler)
    failing({f"key {sampler.rank}": torch.zeros(len(sampler))}, sampler)
    width = 2 + sampler.rank
    failing((torch.zeros(len(sampler), width), list(sampler)), sampler)
    zeros = np.zeros(len(sampler), np.float32)
    failing([torch.from_numpy(zeros), zeros][sampler.rank], sampler)
    failing([], DataLoader(range(3)))  # type: ignore[arg-type]
    failing([], make_loader(range(4), batch_sampler=shard_batch_sampler([[1], [2]])))
    assert from_all_ranks(messages) == [messages] * 2
    for message, words in zip(
        messages,
        [
            "rank 0 has not walked range(0, 7) to its end",
            "rank 1 has 4 rows at the root, for 3 samples",
            "rank 0 has a float at ['loss'], without rows",
            "at ['key 0'], rank 0: tensor of torch.float32 with rows of shape (), rank 1: nothing",
            "at [0], rank 0: tensor of torch.float32 with rows of shape (2,), rank 1: tensor of "
            "torch.float32 with rows of shape (3,)",
            "rank 1: array of float32 with rows of shape ()",
            "needs a sampler made by make_sampler",
            "needs a sampler made by make_sampler",
        ],
        strict=True,
    ):
        assert words in message


@pytest.mark.distributed(world_size=2)
def test_a_look_at_a_whole_share_is_never_taken_for_the_pass_before_it() -> None:
    # One rank looks at the only batch of its share, before and after the pass of an epoch.
    loader = make_loader(range(8), 4, shuffle=True, seed=0)
    rank = loader.sampler.rank  # type: ignore[attr-defined]
    if rank == 0:
        next(iter(loader))
    mine = [int(s) for batch in loader for s in batch]
    assert gather_in_order(mine, loader) == list(range(8))
    if rank == 0:
        next(iter(loader))
    with pytest.raises(RanksDisagreeError) as caught:
        gather_in_order(mine, loader)
    mine = [int(s) for batch in loader for s in batch]
    assert gather_in_order(mine, loader) == list(range(8))
    text = str(caught.value)
    assert from_all_ranks(text) == [text] * 2
    words = "rank 0 has walked epoch 0 of range(0, 8) and then taken the only batch of epoch 1"
    assert words in text


def test_a_pass_of_one_batch_may_be_one_call_of_next() -> None:
    loader = make_loader(range(3), 4, shuffle=True, seed=0)
    for _ in range(2):
        assert gather_in_order([int(s) for s in next(iter(loader))], loader) == [0, 1, 2]


@pytest.mark.distributed(world_size=2)
def test_a_wrapped_sampler_need_not_be_seen_to_end() -> None:
    # A whole share is walked by its length alone, so that the sequence is not seen to end.
    for n in (2, 6, 14, 20_000):
        loader: Any = make_loader(range(n), 2, sampler=RandomSampler(range(n)), seed=0)
        batches = iter(loader)
        mine = [int(s) for _ in range(len(loader)) for s in next(batches)]
        drawn = gather_in_order(mine, loader)
        assert drawn is not None
        assert sorted(drawn) == list(range(n))


class Unreadable(dict[str, Any]):
    """A mapping that one rank cannot take apart."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("not today")


@pytest.mark.distributed(world_size=2)
def test_whatever_one_rank_raises_before_the_exchange_is_everybodys_error() -> None:
    sampler = make_sampler(4, shuffle=False)
    rows = {"x": torch.tensor(list(sampler))}
    with pytest.raises(RanksDisagreeError, match="rank 1 not today"):
        gather_in_order(Unreadable(rows) if sampler.rank else rows, sampler)
