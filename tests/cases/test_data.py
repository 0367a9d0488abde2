"""Public reports about samplers, loaders and seeds: none of these people would be hit again."""

from __future__ import annotations

import random
import resource
import sys
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_utils import (
    all_gather,
    all_reduce_sum,
    check_equal_steps,
    get_rank,
    load_checkpoint,
    make_loader,
    make_sampler,
    save_checkpoint,
    seed_everything,
    shard_batch_sampler,
    shard_iterable,
)
from ddp_utils.testing import run_distributed


def samples(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


@pytest.mark.distributed(world_size=[1, 2])
def test_shuffle_and_the_sampler_are_one_argument() -> None:
    """P01: kan-bayashi/ParallelWaveGAN#177, a sampler added and shuffle=True left."""
    with pytest.raises(ValueError, match="leave shuffle out"):
        make_loader(range(10), sampler=make_sampler(10), shuffle=True)
    shares = all_gather(samples(make_loader(range(10), 2, shuffle=True)))
    assert sorted(s for share in shares for s in share) == list(range(10))


@pytest.mark.distributed(world_size=2)
def test_epochs_differ_without_set_epoch() -> None:
    """P02: pytorch/pytorch#31771, #31232; Snowdar/asv-subtools#8; LambdaLabsML guide#40."""
    sampler = make_sampler(40)
    epochs = [list(sampler) for _ in range(2)]
    resumed = make_sampler(40)
    resumed.set_epoch(1)
    assert list(resumed) == epochs[1]
    loader = DataLoader(range(40), batch_size=4, sampler=make_sampler(40))  # type: ignore[arg-type]
    assert [samples(loader), samples(loader)] == epochs
    assert epochs[0] != epochs[1]
    ours, theirs = all_gather(epochs)
    for epoch in (0, 1):
        assert sorted(ours[epoch] + theirs[epoch]) == list(range(40))


@pytest.mark.distributed(world_size=2)
def test_exact_evaluation_does_not_hang() -> None:
    """P04: SeungjunNah/DeepDeblur-PyTorch#44, an unpadded sampler with a call per batch."""
    # The pattern: exact shares, no collective in the loop, one reduction at its end.
    correct = sum(sample % 2 for sample in samples(make_loader(range(5), 2)))
    assert all_reduce_sum({"correct": correct})["correct"] == 2.0


@pytest.mark.filterwarnings("ignore:.* samples for 4 ranks")
@pytest.mark.distributed(world_size=4)
def test_fewer_samples_than_ranks() -> None:
    """P05: pytorch/pytorch#45324, #49172; Lightning-AI/pytorch-lightning#5047; mmcv#113."""
    for n in (1, 3):
        assert len(list(make_sampler(n))) == 1
    with pytest.raises(ValueError, match="list has no samples"):
        make_sampler([])


@pytest.mark.distributed(world_size=2)
def test_training_on_nothing_is_an_error() -> None:
    """P06: NVIDIA-NeMo/Megatron-Bridge#5527, drop_last leaves no batch and training succeeds."""
    with pytest.raises(ValueError, match=r"list.*1 samples for 2 ranks"):
        make_loader([1], drop_last=True)
    with pytest.raises(ValueError, match="makes no batches"):
        make_loader(range(9), 8, drop_last=True)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.distributed(world_size=2)
def test_streams_are_shared_out() -> None:
    """P07: huggingface/datasets#5360, #3423; lance-format/lance#2713; pytorch-lightning#15734."""
    with pytest.raises(TypeError, match="shard_iterable"):
        make_sampler(Stream())
    assert len(list(shard_iterable(Stream()))) == 5
    ours, theirs = all_gather(samples(make_loader(Stream(), 2, num_workers=2)))
    assert sorted(ours + theirs) == list(range(10))


def p08() -> list[int]:
    weights = [0.0] * 5 + [1.0] * 4 + [4.0]
    return list(make_sampler(WeightedRandomSampler(weights, 4000), seed=0))


def test_weighted_sampling_is_shared_out() -> None:
    """P08: pytorch/pytorch#77154; pytorch-lightning#10946; Project-MONAI/MONAI#1742."""
    shares = run_distributed(p08, world_size=2)
    alone = p08()
    assert [s for pair in zip(*shares, strict=True) for s in pair] == alone
    counts = Counter(alone)
    assert set(counts) == {5, 6, 7, 8, 9}
    assert 1850 < counts[9] < 2150


@pytest.mark.distributed(world_size=2)
def test_batch_samplers_are_shared_out() -> None:
    """P09: Lightning-AI/pytorch-lightning#5145, #3455; openspeech-team/openspeech#149."""
    loader = make_loader(range(10), batch_sampler=BatchSampler(range(10), 2, drop_last=False))
    expected = [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],  # the first batch once more, so that both have three
    ]
    assert [batch.tolist() for batch in loader] == expected[get_rank()]


class Buckets(BatchSampler):
    """Batches of random size, as by length or by tokens; drawn from the global generator."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Any:
        order, batches = torch.randperm(50).tolist(), []
        while order:
            size = random.randint(1, 6)
            batches.append([order.pop() for _ in range(min(size, len(order)))])
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return len(list(iter(self)))


@pytest.mark.distributed(world_size=2)
def test_bucketing_gives_all_ranks_equally_many_batches() -> None:
    """P10: pytorch/audio#3068; microsoft/protein-sequence-models#6; m2lines/Samudra#557."""
    seed_everything(int(make_sampler(2).num_replicas))
    loader = make_loader(range(50), batch_sampler=Buckets(), num_workers=1)
    batches = [batch.tolist() for batch in loader]
    check_equal_steps(len(batches))
    dropped = shard_batch_sampler(Buckets(), drop_last=True)
    check_equal_steps(len(list(dropped)))
    assert len(loader) == len(batches)
    ours, theirs = all_gather(batches)
    assert len(ours) == len(theirs)
    assert {s for batch in ours + theirs for s in batch} == set(range(50))


def p12(seed: int) -> list[int]:
    seed_everything(seed)
    return samples(make_loader(range(30), 5, shuffle=True))


def test_the_seed_changes_the_order() -> None:
    """P12: huggingface/transformers#11406; meta-pytorch/torchtune#2339."""
    assert p12(1) != p12(2)
    assert p12(1) == p12(1)


class Augmenting(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        low, high = 0, 2**30
        draws = (
            torch.randint(low, high, ()),
            np.random.randint(low, high),
            random.randint(low, high),
        )
        return tuple(map(int, draws))  # type: ignore[return-value]


@pytest.mark.distributed(world_size=2)
def test_augmentations_differ_between_ranks_and_workers() -> None:
    """P13: huggingface/transformers#37932; bayesian-flow-networks#3; facebookresearch/detr#297."""
    torch.manual_seed(0), np.random.seed(0), random.seed(0)  # on all ranks alike
    share = [tuple(sample) for sample in make_loader(Augmenting(), None, num_workers=2)]
    ours, theirs = all_gather(share)
    for column in zip(*ours, *theirs, strict=True):
        assert len(set(column)) == 8


class Epochs(Dataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.distributed(world_size=2)
def test_persistent_workers_learn_the_epoch() -> None:
    """P14: huggingface/datasets#6673; starVLA/starVLA#470; pytorch/pytorch#97326; VeOmni#940."""
    loader = make_loader(Epochs(), 2, num_workers=1, persistent_workers=True)
    assert [set(samples(loader)) for _ in range(3)] == [{0}, {1}, {2}]


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.distributed(world_size=2)
def test_the_order_takes_no_memory() -> None:
    """P15: pytorch/pytorch#51841, #50201, a list of all indices on each rank (1.1 GiB here)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampler = make_sampler(20_000_000)
    assert len(list(islice(sampler, 100_000))) == 100_000
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 50_000


def p16_first(path: str) -> list[int]:
    loader = make_loader(range(48), 4, shuffle=True, num_workers=2)
    seen = samples(islice(loader, 3))
    save_checkpoint(path, loader=loader)
    return seen


def p16_second(path: str) -> list[int]:
    loader = make_loader(range(48), 4, shuffle=True, num_workers=2)
    load_checkpoint(path, loader=loader)
    return samples(loader)


@pytest.mark.parametrize("then", [1, 2, 3])
def test_a_resumed_epoch_neither_repeats_nor_skips(then: int, tmp_path: Any) -> None:
    """P16: huggingface/accelerate#4233; meta-pytorch/data#1269; facebookresearch/fairchem#639."""
    path = str(tmp_path / "state.pt")
    shares = run_distributed(p16_first, path, world_size=2)
    shares += run_distributed(p16_second, path, world_size=then)
    assert sorted(s for share in shares for s in share) == list(range(48))


@pytest.mark.distributed(world_size=3)
def test_ranks_train_on_equally_many_batches() -> None:
    """D16: pytorch/pytorch#38174; k2-fsa/snowfall#152; microsoft/PyMarlin#80 (the data's side)."""
    loader = make_loader(TensorDataset(torch.arange(7)), 2, shuffle=True)
    check_equal_steps(len(loader))
    assert len(set(all_gather(len(list(loader))))) == 1


@pytest.mark.distributed(world_size=2)
def test_the_batch_size_is_said_to_be_global_or_per_rank() -> None:
    """D20: catalyst-team/catalyst#1023; pytorch-lightning#6789; pytorch-distributed#3."""
    with pytest.raises(ValueError, match="6 and 8"):
        make_loader(range(32), global_batch_size=7)
    assert len(next(iter(make_loader(range(32), global_batch_size=8)))) == 4
    assert len(next(iter(make_loader(range(32), batch_size=8)))) == 8


@pytest.mark.distributed(world_size=2)
def test_the_loader_is_resumed_with_the_optimizer(tmp_path: Any) -> None:
    """K09: vllm-project/speculators#1048; wenet-e2e/wenet#2619; torch-points3d#630."""

    def parts() -> dict[str, Any]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        loader = make_loader(range(32), 4, shuffle=True)
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}

    before = parts()
    for _ in islice(before["loader"], 3):
        before["optimizer"].step()
        before["schedule"].step()
    save_checkpoint(tmp_path / "state.pt", **before)
    after = parts()
    load_checkpoint(tmp_path / "state.pt", **after)
    assert after["optimizer"].param_groups[0]["lr"] == 0.05
    assert after["loader"].state_dict() == before["loader"].state_dict()
    assert len(list(after["loader"])) == len(before["loader"]) - 3
