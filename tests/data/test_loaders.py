"""What make_loader makes of the arguments of DataLoader, on every rank."""

from __future__ import annotations

import logging
import multiprocessing
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from played_ranks import global_random_state, on_ranks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from ddp_utils import (
    get_world_size,
    make_loader,
    make_sampler,
    seed_everything,
    shard_batch_sampler,
)
from ddp_utils.data import loaders
from ddp_utils.data.passes import take_uneven_draw


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_it_is_a_dataloader_with_the_users_own_parts() -> None:
    data, generator = TensorDataset(torch.arange(10)), torch.Generator()
    loader = make_loader(data, 4, generator=generator, collate_fn=len, num_workers=1, timeout=50)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is data
    assert (loader.batch_size, loader.drop_last, loader.timeout) == (4, False, 50)
    assert loader.generator is generator
    assert list(loader) == [4, 4, 2]
    assert len(loader) == 3
    assert isinstance(loader.sampler, DistributedSampler)
    assert [int(sample) for sample in make_loader(range(3), None)] == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 8])
def test_one_global_batch_is_the_same_at_every_world_size(workers: int, size: int | None) -> None:
    def epoch() -> list[list[int]]:
        if size is None:
            loader = make_loader(range(40), 8 // get_world_size(), True, seed=7)
        else:
            loader = make_loader(
                range(40), shuffle=True, global_batch_size=size, seed=7, num_workers=workers
            )
        return batches(loader)

    alone = [sorted(batch) for batch in epoch()]
    for world in (2, 4):
        shares = on_ranks(world, epoch)
        assert [
            sorted(s for part in parts for s in part) for parts in zip(*shares, strict=True)
        ] == alone


def test_drop_last_gives_equal_whole_batches() -> None:
    for world in (1, 2, 4):
        shares = on_ranks(
            world, lambda: batches(make_loader(range(29), global_batch_size=8, drop_last=True))
        )
        assert [[len(batch) for batch in share] for share in shares] == [[8 // world] * 3] * world


def test_the_arithmetic_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loaders._log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        on_ranks(4, lambda: [make_loader(range(1000), global_batch_size=64) for _ in range(2)])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "range(0, 1000): global batch 64 = 4 ranks x 16, 1000 samples, 16 batches on each rank"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        on_ranks(2, lambda: make_loader(range(5)))
    assert [record.getMessage() for record in caplog.records] == [
        "range(0, 5): global batch 2 = 2 ranks x 1, 5 samples, 3 batches on rank 0",
    ]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"global_batch_size": 3}, ValueError, "2 ranks.*: 2 and 4"),
        ({"global_batch_size": 4, "batch_size": 2}, ValueError, "give one of them"),
        ({"global_batch_size": 4, "batch_sampler": [[1]]}, ValueError, "makes the batches itself"),
        ({"batch_size": 4, "batch_sampler": [[1]]}, ValueError, "makes the batches itself"),
        ({"sampler": [1], "batch_sampler": [[1]]}, ValueError, "makes the batches itself"),
        ({"sampler": make_sampler(10), "pad": False}, ValueError, "give them there"),
        ({"sampler": [1, 2], "shuffle": True}, ValueError, "shuffle=True beside a sampler"),
        ({"batch_sampler": [[1]], "shuffle": True}, ValueError, "shuffle=True beside a sampler"),
        ({"batch_size": 8, "drop_last": True}, ValueError, r"range\(0, 10\) makes no batches"),
        ({"dataset": []}, ValueError, "list has no samples"),
        ({"dataset": Stream(), "shuffle": True}, ValueError, "Stream is a stream.*shuffle"),
        ({"sampler": DistributedSampler(range(3), 1, 0)}, TypeError, "shared out .* already"),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(3), 1, 0), 2, False)},
            TypeError,
            "shared out .* already",
        ),
    ],
)
def test_contradictions_are_refused(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments = {"dataset": range(10), **arguments}
    with pytest.raises(kind, match=message):
        on_ranks(2, lambda: make_loader(**arguments))


def test_samplers_and_batch_samplers_are_dealt_out() -> None:
    def by_sampler(**options: Any) -> list[list[int]]:
        return batches(make_loader(range(12), **options))

    for options in (
        {"sampler": [3, 1, 2, 5, 7], "batch_size": 2, "pad": False},
        {"batch_sampler": [[3, 1], [2, 5], [7]], "pad": False},
    ):
        shares = on_ranks(2, lambda options=options: by_sampler(**options))
        assert sorted(s for share in shares for batch in share for s in batch) == [1, 2, 3, 5, 7]
    ours = on_ranks(2, lambda: by_sampler(sampler=make_sampler(12, seed=1), batch_size=3))
    assert sorted(s for share in ours for batch in share for s in batch) == list(range(12))
    inner = on_ranks(
        2, lambda: by_sampler(batch_sampler=BatchSampler(make_sampler(12, seed=1), 3, False))
    )
    assert inner == ours
    twice = on_ranks(
        2, lambda: by_sampler(batch_sampler=shard_batch_sampler([[1], [2]], pad=False))
    )
    assert twice == [[[1]], [[2]]]


class Drawing(Dataset[list[float]]):
    """What the three global generators give in a worker, and what they were seeded from."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, ...]:
        info = get_worker_info()
        assert info is not None
        return (torch.rand(()).item(), float(np.random.rand()), random.random(), info.seed)


def test_workers_of_all_ranks_draw_apart_and_again_the_same() -> None:
    def drawn(seed: int, generator: bool = False) -> list[tuple[float, ...]]:
        torch.manual_seed(0)  # as scripts do, on every rank alike
        options = {"generator": torch.Generator().manual_seed(0)} if generator else {}
        loader = make_loader(Drawing(), None, num_workers=2, seed=seed, **options)
        return [tuple(sample) for _ in range(2) for sample in loader]

    for generator in (False, True):
        of_ranks = on_ranks(2, drawn, 1, generator)
        for column in (0, 1, 2):
            draws = [sample[column] for share in of_ranks for sample in share]
            assert len(set(draws)) == len(draws)
        assert on_ranks(2, drawn, 1, generator) == of_ranks
    assert on_ranks(2, drawn, 2) != on_ranks(2, drawn, 1)


def test_the_global_random_state_is_left_alone() -> None:
    before = global_random_state()
    for workers in (0, 1):
        list(make_loader(range(8), 2, shuffle=True, num_workers=workers))
    assert global_random_state() == before


def test_seed_everything_gives_order_and_workers() -> None:
    def everything() -> Any:
        seed_everything(5)
        loader = make_loader(Drawing(), None, shuffle=True, num_workers=1)
        return list(loader.sampler), [tuple(sample) for sample in loader]

    assert everything() == everything()


class Epochs(Dataset[int]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


class ManyEpochs(Epochs):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.epoch + 100] * len(indices)


def note_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Epochs)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Epochs, ManyEpochs])
def test_the_epoch_reaches_the_dataset(
    kind: type[Epochs], persistent: bool, options: dict[str, int]
) -> None:
    if persistent and not options:
        return
    data, more = kind(), 100 if kind is ManyEpochs else 0
    loader = make_loader(
        data, 4, persistent_workers=persistent, worker_init_fn=note_dataset, **options
    )
    assert [batches(loader) for _ in range(2)] == [[[more] * 4], [[more + 1] * 4]]
    loader.set_epoch(9)  # type: ignore[attr-defined]
    assert batches(loader) == [[more + 9] * 4]
    assert loader.dataset is data


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_started_in_other_ways(context: str) -> None:
    loader = make_loader(
        Epochs(), 4, num_workers=1, persistent_workers=True, multiprocessing_context=context
    )
    assert [batches(loader) for _ in range(2)] == [[[0] * 4], [[1] * 4]]


def test_a_left_pass_ends_with_its_workers_and_is_no_longer_uneven() -> None:
    def leave(pad: bool | None) -> list[str | None]:
        seen = []
        loader = make_loader(range(9), 2, pad=pad, num_workers=1)
        for _ in loader:
            seen.append(take_uneven_draw())
            break
        seen.append(take_uneven_draw())
        assert multiprocessing.active_children() == []
        return seen

    assert on_ranks(2, leave, None) == [["range(0, 9)", None]] * 2
    assert on_ranks(2, leave, True) == [[None, None]] * 2
    assert on_ranks(1, leave, None) == [[None, None]]


def test_unevenness_ends_with_the_pass() -> None:
    def walk() -> list[str | None]:
        loader = make_loader(range(5), 2)
        return [*(take_uneven_draw() for _ in loader), take_uneven_draw()]

    assert on_ranks(2, walk) == [["range(0, 5)", "range(0, 5)", None], ["range(0, 5)", None]]
    assert on_ranks(5, walk) == [[None, None]] * 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_by_one_rank_changes_nothing(workers: int) -> None:
    def passes() -> list[list[list[int]]]:
        loader = make_loader(range(12), 2, shuffle=True, seed=3, num_workers=workers)
        if loader.sampler.rank == 0:  # type: ignore[attr-defined]
            next(iter(loader))
        first = batches(loader)
        if loader.sampler.rank == 1:  # type: ignore[attr-defined]
            next(iter(loader))
        return [first, batches(loader)]

    for shares in zip(*on_ranks(2, passes), strict=True):
        assert sorted(s for share in shares for batch in share for s in batch) == list(range(12))


def test_a_look_at_the_only_batch_changes_nothing() -> None:
    for workers in (0, 1):
        loader = make_loader(range(4), 4, shuffle=True, num_workers=workers, seed=0)
        first = next(iter(loader)).tolist()
        assert batches(loader) == [first]
        assert batches(loader) != [first]


def test_counting_batches_ends_the_epoch_too() -> None:
    loader = make_loader(range(40), 4, shuffle=True, num_workers=1)
    orders = []
    for _ in range(2):
        iterator = iter(loader)
        orders.append([next(iterator).tolist() for _ in range(len(loader))])
    assert orders[0] != orders[1]


def test_a_left_pass_warns_once_at_the_users_line() -> None:
    loader = make_loader(range(40), 4, shuffle=True)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.warns(UserWarning, match="was left before its end") as caught:
        first = batches(loader)
    assert [warning.filename for warning in caught] == [__file__]
    assert sorted(s for batch in first for s in batch) == list(range(40))


@pytest.mark.distributed(world_size=2)
def test_real_ranks_share_out_real_loaders() -> None:
    data = TensorDataset(torch.arange(22))
    shuffled = make_loader(data, 3, shuffle=True, num_workers=2, persistent_workers=True)
    epochs = [[s for (batch,) in shuffled for s in batch.tolist()] for _ in range(2)]
    weighted = make_loader(data, batch_size=4, sampler=RandomSampler(data), num_workers=1)
    drawn = [s for (batch,) in weighted for s in batch.tolist()]
    everybodys: list[Any] = [None] * 2
    dist.all_gather_object(everybodys, [*epochs, drawn])
    for shares in zip(*everybodys, strict=True):
        assert sorted(s for share in shares for s in share) == list(range(22))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_in_the_middle_of_a_pass_changes_nothing(workers: int) -> None:
    loader: Any = make_loader(range(12), 2, shuffle=True, seed=0, num_workers=workers)
    first = batches(make_loader(range(12), 2, shuffle=True, seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, batch in enumerate(loader, 1):
            assert batch.tolist() == first[step - 1]
            assert next(iter(loader)).tolist() == (first[0] if step < 6 else batch_of_epoch_one())
            if step < 6:
                assert loader.state_dict()["position"] == 2 * step
    assert loader.state_dict()["epoch"] == 1
    assert batches(loader) != first


def batch_of_epoch_one() -> list[int]:
    loader: Any = make_loader(range(12), 2, shuffle=True, seed=0)
    loader.set_epoch(1)
    return next(iter(loader)).tolist()  # type: ignore[no-any-return]


def test_a_look_that_is_kept_does_not_stop_the_epochs() -> None:
    loader: Any = make_loader(range(12), 2, shuffle=True, seed=0)
    kept = iter(loader)
    next(kept)
    orders = []
    for epoch in range(3):
        assert loader.state_dict()["epoch"] == epoch
        orders.append(batches(loader))
    assert len({str(order) for order in orders}) == 3
    next(kept)
    assert loader.state_dict()["epoch"] == 3


def test_looking_through_the_sampler_does_not_move_the_loader() -> None:
    loader: Any = make_loader(range(12), 2, shuffle=True, seed=0)
    for step, _ in enumerate(loader, 1):
        if step < 6:
            next(iter(loader.sampler))
        assert loader.state_dict()["position"] == 2 * step
    assert loader.state_dict()["epoch"] == 1


def test_a_look_after_a_left_pass_does_not_move_its_state() -> None:
    loader: Any = make_loader(range(12), 2, shuffle=True, seed=0)
    for step, _ in enumerate(loader, 1):
        if step == 3:
            break
    next(iter(loader))
    assert loader.state_dict()["position"] == 6
