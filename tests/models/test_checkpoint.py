"""Does rank zero write for all, do all hear of its trouble, and does a training go on from it?"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import pickle
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it, which takes seconds; forked ranks have it from here
from torch import nn
from torch.utils.data import TensorDataset

from ddp_utils import (
    AbsentRanksError,
    DistributedError,
    OneRankSectionError,
    RandomStates,
    RankFailedError,
    RanksDisagreeError,
    RankZeroError,
    all_gather,
    get_rank,
    load_checkpoint,
    make_loader,
    rank_zero_only,
    save_checkpoint,
    seed_everything,
    wrap_ddp,
)
from ddp_utils.ground.trees import leaves_with_paths
from ddp_utils.models import atomic_file, checkpoint, reading, shared_call
from ddp_utils.process_group import shared_store
from ddp_utils.testing import run_distributed


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return class and text of what a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


# ---- what rank zero's trouble looks like on every rank


def trouble(folder: str) -> list[tuple[str, str]]:
    path = f"{folder}/last.pt"
    save_checkpoint(path, epoch=1)
    found = [
        error_of(save_checkpoint, f"{folder}/no/such/last.pt", epoch=2),
        error_of(save_checkpoint, folder, epoch=2),
        error_of(save_checkpoint, path, epoch=lambda: 0),
    ]
    if get_rank() == 0:
        os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # nothing is read-only to root
    found.append(error_of(save_checkpoint, path, epoch=2))
    assert load_checkpoint(path) == {"epoch": 1}
    return found


@pytest.fixture
def open_folder() -> Iterator[str]:
    """A folder that also another user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield folder
        os.chmod(folder, 0o755)
        assert os.listdir(folder) == ["last.pt"]


def test_an_error_of_rank_zero_reaches_all_ranks(open_folder: str) -> None:
    zero, one = run_distributed(trouble, open_folder)
    kinds = ["FileNotFoundError", "IsADirectoryError", "TypeError", "PermissionError"]
    assert [kind for kind, _ in zero] == kinds
    relayed = ["FileNotFoundError", "IsADirectoryError", "RankZeroError", "PermissionError"]
    assert [kind for kind, _ in one] == relayed
    for (_, told), (_, heard) in zip(zero, one, strict=True):
        assert "rank 0 failed in save_checkpoint" in heard
        assert told in heard


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a quota does. (Python ignores the signal for it.)"""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let what is written go to the device that is always full, under a name in the folder."""
    real = atomic_file.os.fdopen

    def onto_full(descriptor: int, mode: str) -> Any:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, descriptor)
        os.close(full)
        return real(descriptor, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_file.os, "fdopen", onto_full)
        patch.setattr(atomic_file, "_lock", lambda descriptor: True)
        yield


@pytest.mark.parametrize("numbers", [2, 3_000_000])  # found out at the end, and on the way
@pytest.mark.parametrize(
    ("way", "number"),
    [(full_disk, errno.ENOSPC), (partial(limited_files, 500), errno.EFBIG)],
    ids=["full", "quota"],
)
@pytest.mark.distributed(world_size=2)
def test_a_full_disk_is_an_error_on_all_ranks_and_the_old_file_stays(
    way: Any, number: int, numbers: int, tmp_path: Path
) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, weight=torch.ones(10))
    trouble = way() if get_rank() == 0 else nullcontext()
    with trouble, pytest.raises(OSError, match=os.strerror(number)) as caught:
        save_checkpoint(path, weight=torch.zeros(numbers))
    assert caught.value.errno == number
    if get_rank() == 1:
        assert "rank 0 failed in save_checkpoint" in str(caught.value)
    meet("tried")
    assert os.listdir(tmp_path) == ["last.pt"]
    assert torch.equal(load_checkpoint(path)["weight"], torch.ones(10))
    save_checkpoint(path, weight=torch.zeros(2))  # and there is room again
    assert torch.equal(load_checkpoint(path)["weight"], torch.zeros(2))


def fails_on_rank_zero(path: str) -> None:
    save_checkpoint(path, epoch=lambda: 0)


def test_the_job_ends_with_rank_zeros_own_error(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(fails_on_rank_zero, str(tmp_path / "last.pt"), world_size=3)
    assert caught.value.rank == 0
    assert isinstance(caught.value.cause, TypeError)
    assert "epoch is a function" in str(caught.value)


# ---- who writes, who waits, for how long


def slow_disk(path: str) -> tuple[bool, Any]:
    """Rank zero's disk is slower than the timeout of collectives; the other one reads at once."""
    if get_rank() == 0:
        real = checkpoint.replacing

        def slow(target: Any) -> Any:
            shared_store().wait(["rank one is about to save"])
            time.sleep(2.5)
            return real(target)

        checkpoint.replacing = slow  # type: ignore[attr-defined]
    was_there = os.path.exists(path)
    if get_rank() == 1:
        shared_store().set("rank one is about to save", "")
    save_checkpoint(path, epoch=1)
    return was_there, torch.load(path)


@pytest.mark.distributed(world_size=2)
def test_only_rank_zero_writes(tmp_path: Path) -> None:
    opened: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(str(tmp_path)) and args[2] & os.O_CREAT:
            opened.append(str(args[0]))

    sys.addaudithook(hook)
    for epoch in range(3):
        save_checkpoint(tmp_path / "last.pt", epoch=epoch)
        assert load_checkpoint(tmp_path / "last.pt") == {"epoch": epoch}
    assert len(opened) == (3 if get_rank() == 0 else 0)


def test_the_others_wait_for_the_file_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_UTILS_TIMEOUT", "1")
    results = run_distributed(slow_disk, str(tmp_path / "last.pt"))
    assert results == [(False, {"epoch": 1})] * 2


@rank_zero_only
def saves_in_a_section(path: str) -> None:
    save_checkpoint(path, epoch=1)


@rank_zero_only
def saves_alone(path: str) -> None:
    save_checkpoint(path, wait=False, epoch=1)


@pytest.mark.distributed(world_size=2)
def test_rank_zero_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "last.pt")
    section, section_text = error_of(saves_in_a_section, path)
    saves_alone(path)
    save_checkpoint(path, wait=False, epoch=2)  # called by all: the others do nothing
    alone, alone_text = error_of(save_checkpoint, path, wait=False, random=RandomStates())
    if get_rank() == 0:
        save_checkpoint(path, epoch=3)  # alone, and for all: nobody comes, and nothing hangs
        assert load_checkpoint(path, wait=False) == {"epoch": 3}
    mixed, mixed_text = error_of(save_checkpoint, path, epoch=4)
    if get_rank() == 0:
        assert section == OneRankSectionError.__name__
        assert "pass wait=False" in section_text
        assert alone == "ValueError"
        assert "random states of the others" in alone_text
    else:
        assert (section, alone) == ("nothing", "nothing")
        assert mixed == RanksDisagreeError.__name__
        assert "pass wait=False" in mixed_text


@pytest.mark.distributed(world_size=2)
def test_ranks_with_different_paths_are_told(tmp_path: Path) -> None:
    kind, text = error_of(save_checkpoint, tmp_path / f"run-{get_rank()}.pt", epoch=1)
    if get_rank() == 0:
        assert kind == "nothing"
    else:
        assert kind == RanksDisagreeError.__name__
        assert "ddp_utils.broadcast(path)" in text


def leaves_without_saving(path: str) -> None:
    if get_rank() == 0:
        save_checkpoint(path, random=RandomStates())


def leaves_without_loading(path: str) -> None:
    if get_rank() == 1:
        load_checkpoint(path)


@pytest.mark.parametrize("fn", [leaves_without_saving, leaves_without_loading])
def test_a_rank_that_has_left_is_not_waited_for(fn: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(fn, str(tmp_path / "last.pt"))
    assert isinstance(caught.value.cause, AbsentRanksError)


@pytest.mark.distributed(world_size=2)
def test_a_long_wait_names_who_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_call, "PATIENCE", 0.2)
    if get_rank() == 1:
        shared_store().wait(["said"])  # until rank zero has said for whom it waits
    else:
        real = shared_call._logger.warning

        def telling(*args: Any) -> None:
            real(*args)
            shared_store().set("said", "")

        monkeypatch.setattr(shared_call._logger, "warning", telling)
    save_checkpoint(tmp_path / "last.pt", random=RandomStates())
    if get_rank() == 0:
        assert "for rank 1" in caplog.messages[0]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox])
def test_numpy_may_draw_by_another_generator(kind: Any, tmp_path: Path) -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(3))
    try:
        save_checkpoint(tmp_path / "random.pt", random=RandomStates())
        drawn = np.random.rand(3)
        load_checkpoint(tmp_path / "random.pt", random=RandomStates())
        assert np.random.rand(3).tolist() == drawn.tolist()
    finally:
        np.random.set_bit_generator(usual)


def meet(name: str) -> None:
    shared_store().set(f"{name} {get_rank()}", "")
    shared_store().wait([f"{name} 0", f"{name} 1"])


@pytest.mark.distributed(world_size=2)
def test_the_store_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    counts = []  # of keys after one round, and after many, less those of this test
    for turn, rounds in enumerate([1, 10]):
        for _ in range(rounds):
            save_checkpoint(path, random=RandomStates())
            load_checkpoint(path, random=RandomStates())
            load_checkpoint(path, broadcast=True)
        meet(f"saved {turn}")
        if get_rank() == 0:  # while the other one waits
            counts.append(shared_store().num_keys() - 3 * turn)
            shared_store().set(f"counted {turn}", "")
        shared_store().wait([f"counted {turn}"])
    if get_rank() == 0:
        few, many = counts
        assert many == few


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.distributed(world_size=2)
def test_random_states_on_some_ranks_only_are_an_error(holder: int, tmp_path: Path) -> None:
    path = str(tmp_path / "last.pt")
    given = {"random": RandomStates() if get_rank() == holder else None}
    saving, saving_text = error_of(save_checkpoint, path, **given)
    meet("tried")
    save_checkpoint(path, random=RandomStates())
    said = f"rank {1 - holder} did not give it"
    for kind, text in (
        error_of(load_checkpoint, path, **given),
        error_of(load_checkpoint, path, broadcast=True, **given),
        error_of(load_checkpoint, f"{path}.none", missing_ok=True, **given),
    ):
        assert kind.endswith("Error")
        assert f"load_checkpoint(random=RandomStates()): {said}" in text
    if get_rank() == 1:
        assert saving == (RankZeroError if holder == 0 else RanksDisagreeError).__name__
        assert f"save_checkpoint(random=RandomStates()): {said}" in saving_text
    elif holder == 0:  # otherwise rank zero, which waits for nobody, is through already
        assert saving == RanksDisagreeError.__name__


def random_states_end_the_job(path: str) -> None:
    save_checkpoint(path, **({"random": RandomStates()} if get_rank() == 1 else {}))
    if get_rank() == 0:
        shared_store().wait(["never"])


def test_random_states_that_rank_zero_lacks_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 0 did not give it") as caught:
        run_distributed(random_states_end_the_job, str(tmp_path / "last.pt"))
    assert caught.value.rank == 1


@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.distributed(world_size=2)
def test_a_path_that_is_none_on_one_rank_keeps_nobody_waiting(without: int, tmp_path: Path) -> None:
    path: Any = None if get_rank() == without else tmp_path / "last.pt"
    saving, saving_text = error_of(save_checkpoint, path, epoch=1)
    loading, loading_text = error_of(load_checkpoint, path)
    if get_rank() == 1:
        assert saving == loading == RanksDisagreeError.__name__
        assert "'None'" in saving_text
        assert "'None'" in loading_text
    else:
        assert saving == ("TypeError" if without == 0 else "nothing")  # its own was right
        assert loading == ("TypeError" if without == 0 else "DistributedError")


# ---- loading on several ranks


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.distributed(world_size=2)
def test_each_rank_loads_what_rank_zero_sees_or_all_fail(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LAG", 0.3)
    own = tmp_path / str(get_rank())  # so that one name is another file on each rank
    own.mkdir()
    monkeypatch.chdir(own)
    if get_rank() == 0 or there:
        torch.save({"rank": get_rank(), "weight": torch.full((100_000,), get_rank())}, "last.pt")
    meet("ready")
    kind, text = error_of(load_checkpoint, "last.pt")
    rest = load_checkpoint("last.pt", broadcast=True)
    assert kind == (DistributedError if get_rank() == 0 else RanksDisagreeError).__name__
    zeros, ones = all_gather(text)
    assert ("another file" if there else "no such file") in ones
    assert ones in zeros
    assert rest["rank"] == 0
    assert rest["weight"].sum().item() == 0


@pytest.mark.distributed(world_size=2)
def test_a_shared_folder_may_show_the_file_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank one still sees an old file when rank zero sees the new one, until it looks again."""
    path = tmp_path / "last.pt"
    if get_rank() == 1:
        real_open, old = open, True

        def stale_open(name: Any, *args: Any) -> Any:
            return real_open(f"{name}.old" if old else name, *args)

        def refresh(folder: str) -> None:
            nonlocal old
            old = False

        torch.save({"epoch": 0}, path)
        os.link(path, f"{path}.old")
        monkeypatch.setattr(reading, "open", stale_open, raising=False)
        monkeypatch.setattr(reading, "_refresh", refresh)
    meet("ready")
    save_checkpoint(path, epoch=1)
    assert load_checkpoint(path) == {"epoch": 1}


@pytest.mark.distributed(world_size=3)
def test_a_broadcast_tree_is_the_same_tree(tmp_path: Path) -> None:
    """What rank zero reads and sends is what each rank would read."""
    content = {
        "model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        "half": torch.rand(3).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "complex": torch.rand(2, 2, dtype=torch.complex64),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "turned": torch.rand(2, 3).t(),
        "large": torch.arange(100_000),
        "nested": [{"a": (torch.ones(1), "text", None)}],
        "random": RandomStates(),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.spread, "PIECE", 1000)
        save_checkpoint(tmp_path / "last.pt", **content)
        sent = load_checkpoint(tmp_path / "last.pt", broadcast=True)
    read = load_checkpoint(tmp_path / "last.pt")
    for (path, one), (_, other) in zip(
        leaves_with_paths(sent), leaves_with_paths(read), strict=True
    ):
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, path
        assert type(one) is type(other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    assert list(sent) == list(read)
    assert sent["model"]._metadata == read["model"]._metadata


@pytest.mark.distributed(world_size=2)
def test_one_ranks_trouble_in_loading_is_everybodys(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, model=nn.Linear(2, 2))
    model = nn.Linear(2 + get_rank(), 2)  # rank one's does not fit
    for options in ({}, {"broadcast": True}):
        kind, text = error_of(load_checkpoint, path, model=model, **options)
        if get_rank() == 0:
            assert kind == DistributedError.__name__
            assert "rank 1 failed in load_checkpoint" in text
            assert "size mismatch" in text
        else:
            assert kind == "RuntimeError"
    if get_rank() == 1:
        path.write_bytes(b"broken")
    meet("ready")
    kind, text = error_of(load_checkpoint, path, broadcast=True)
    if get_rank() == 1:
        assert kind == RankZeroError.__name__
        assert "rank 0 cannot read" in text


@pytest.mark.distributed(world_size=2)
def test_a_rank_that_cannot_take_what_is_sent_keeps_nobody_sending(tmp_path: Path) -> None:
    """Have a large tensor beside something that rank one alone refuses to build."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, weights_only=False, kind=Path, weight=torch.zeros(3_000_000))
    kind, text = error_of(load_checkpoint, path, broadcast=True, weights_only=get_rank() == 1)
    if get_rank() == 0:
        assert kind == DistributedError.__name__
        assert "rank 1 failed in load_checkpoint: UnpicklingError" in text
    else:
        assert kind == pickle.UnpicklingError.__name__


@pytest.mark.distributed(world_size=2)
def test_a_file_that_one_rank_may_not_read_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "last.pt")
    save_checkpoint(path, epoch=1)
    meet("saved")
    if get_rank() == 1:
        real = open

        def refusing(name: Any, *args: Any) -> Any:
            if name == path:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(name, *args)

        monkeypatch.setattr(reading, "open", refusing, raising=False)
    kind, text = error_of(load_checkpoint, path)
    assert kind == "PermissionError"
    if get_rank() == 0:
        assert "rank 1 failed in load_checkpoint" in text


# ---- a training that is stopped and goes on


def train(path: str, steps: int, resume: bool, workers: int = 0) -> tuple[Any, ...]:
    """Train for so many steps in all, on ranks with randomness of their own; save at the end."""
    seed_everything(7)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    if resume:
        seed_everything(1234)
        torch.manual_seed(99 + get_rank())
    model = wrap_ddp(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)
    scaler = torch.amp.GradScaler("cpu")
    loader = make_loader(data, batch_size=4, shuffle=True, num_workers=workers)
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "loader": loader,
        "random": RandomStates(),
    }
    step = load_checkpoint(path, **parts)["step"] if resume else 0
    losses, seen = [], []
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            x = x + 0.1 * torch.randn_like(x) * random.random() * np.random.rand()
            loss = (model(x) - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses.append(loss.item())
            seen.append(y.flatten().tolist())
            step += 1
            if step == steps:
                break
    save_checkpoint(path, step=step, **parts)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, seen, weights, scheduler.get_last_lr()


@pytest.mark.parametrize("stop", [5, 8, 11])
def test_a_resumed_training_is_bit_equal_to_one_that_was_never_interrupted(
    stop: int, tmp_path: Path
) -> None:
    whole = run_distributed(train, str(tmp_path / "whole.pt"), 20, False)
    first = run_distributed(train, str(tmp_path / "last.pt"), stop, False)
    second = run_distributed(train, str(tmp_path / "last.pt"), 20, True)
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert first[rank][1] + second[rank][1] == whole[rank][1]
        torch.testing.assert_close(second[rank][2], whole[rank][2], rtol=0, atol=0)
        assert second[rank][3] == whole[rank][3]
    assert whole[0][0] != whole[1][0]


def test_with_loader_workers_the_samples_are_the_same(tmp_path: Path) -> None:
    whole = run_distributed(train, str(tmp_path / "whole.pt"), 12, False, 2)
    first = run_distributed(train, str(tmp_path / "last.pt"), 5, False, 2)
    second = run_distributed(train, str(tmp_path / "last.pt"), 12, True, 2)
    for rank in range(2):
        assert first[rank][1] + second[rank][1] == whole[rank][1]


def walk_an_epoch(path: str, stop: int | None) -> tuple[list[int], list[str]]:
    """Return the samples of an epoch up to a stop, or from there to its end."""
    said: list[str] = []
    logging.getLogger("ddp_utils").addFilter(lambda r: said.append(r.getMessage()) or True)
    seed_everything(7)
    loader = make_loader(TensorDataset(torch.arange(60)), global_batch_size=6, shuffle=True)
    parts: dict[str, Any] = {"loader": loader, "random": RandomStates()}
    if stop is None:
        load_checkpoint(path, **parts)
    seen: list[int] = []
    for step, (batch,) in enumerate(loader, 1):
        seen += batch.tolist()
        if step == stop:
            save_checkpoint(path, **parts)
            break
    return seen, said


@pytest.mark.parametrize("world_size", [1, 3])
def test_at_another_world_size_each_sample_is_seen_once(world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "last.pt")
    first = run_distributed(walk_an_epoch, path, 4)
    second = run_distributed(walk_an_epoch, path, None, world_size=world_size)
    seen = [sample for samples, _ in [*first, *second] for sample in samples]
    assert sorted(seen) == list(range(60))
    assert any("random states of 2 ranks" in text for text in second[0][1])


# ---- one process (last: its gradients start threads, after which no rank can be forked)


class TestOneProcess:
    def test_a_training_goes_into_a_file_and_out_of_it(self, tmp_path: Path) -> None:
        path = tmp_path / "last.pt"
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(torch.rand(4, 4)).sum().backward()
        optimizer.step()
        args = argparse.Namespace(lr=np.float32(0.5), out=tmp_path)
        save_checkpoint(
            path, model=model, optimizer=optimizer, args=args, path="any name", none=None
        )

        other = Net()
        fresh = torch.optim.Adam(other.parameters())
        rest = load_checkpoint(path, model=other, optimizer=fresh, none=None)
        assert rest == {
            "args": {"lr": 0.5, "out": str(tmp_path)},
            "path": "any name",
            "none": None,
        }
        assert fresh.param_groups[0]["lr"] == 0.01
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)

    def test_plain_torch_reads_it(self, tmp_path: Path) -> None:
        model = nn.DataParallel(nn.Linear(2, 1))
        save_checkpoint(tmp_path / "last.pt", model=model)
        nn.Linear(2, 1).load_state_dict(torch.load(tmp_path / "last.pt")["model"])

    def test_several_models_and_optimizers_at_once(self, tmp_path: Path) -> None:
        models = [nn.Linear(1, 1), nn.Linear(2, 2)]
        named = {"a": nn.Linear(3, 3)}
        save_checkpoint(tmp_path / "last.pt", models=models, named=named)
        others = [nn.Linear(1, 1), nn.Linear(2, 2)]
        other_named = {"a": nn.Linear(3, 3)}
        load_checkpoint(tmp_path / "last.pt", models=others, named=other_named)
        assert torch.equal(others[1].weight, models[1].weight)
        assert torch.equal(other_named["a"].weight, named["a"].weight)

    def test_no_file_is_an_error_or_a_fresh_start(self, tmp_path: Path) -> None:
        for wait in (True, False):
            with pytest.raises(FileNotFoundError):
                load_checkpoint(tmp_path / "last.pt", wait=wait)
            assert load_checkpoint(tmp_path / "last.pt", wait=wait, missing_ok=True) == {}
        with pytest.raises(ValueError, match="leave out wait=False"):
            load_checkpoint(tmp_path / "last.pt", wait=False, broadcast=True)

    def test_a_missing_name_and_a_wrong_target_say_what_to_do(self, tmp_path: Path) -> None:
        path = tmp_path / "last.pt"
        save_checkpoint(path, net=nn.Linear(1, 1), epoch=3)
        with pytest.raises(KeyError, match="holds no model; it holds 'net', 'epoch'"):
            load_checkpoint(path, model=nn.Linear(1, 1))
        with pytest.raises(TypeError, match="Leave it out: what is not asked for is returned"):
            load_checkpoint(path, epoch=0)

    @pytest.mark.parametrize("content", [b"", b"no checkpoint at all", b"PK\x03\x04 cut"])
    def test_a_file_that_is_none_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "last.pt").write_bytes(content)
        with pytest.raises((RuntimeError, pickle.UnpicklingError), match=r"rank 0 .*last\.pt"):
            load_checkpoint(tmp_path / "last.pt")

    def test_a_truncated_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "last.pt"
        save_checkpoint(path, weight=torch.zeros(1000))
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(RuntimeError, match=r"(?s)cannot read .*last\.pt.* cut off"):
            load_checkpoint(path)

    def test_classes_are_refused_with_the_way_to_opt_out(self, tmp_path: Path) -> None:
        path = tmp_path / "old.pt"
        torch.save({"args": argparse.Namespace(lr=1), "epoch": 3}, path)
        with pytest.raises(
            pickle.UnpicklingError, match=r"argparse\.Namespace.*weights_only=False"
        ):
            load_checkpoint(path)
        assert load_checkpoint(path, weights_only=False)["args"].lr == 1

    def test_any_class_is_stored_where_both_sides_opt_out(self, tmp_path: Path) -> None:
        path = tmp_path / "last.pt"
        save_checkpoint(path, weights_only=False, array=np.arange(3))
        assert load_checkpoint(path, weights_only=False)["array"].tolist() == [0, 1, 2]

    def test_files_of_plain_scripts(self, tmp_path: Path) -> None:
        path, model = tmp_path / "theirs.pt", nn.Linear(2, 1)
        files = {
            "model": model.state_dict(),  # torch.save(model.state_dict(), path)
            "model_state_dict": {"model_state_dict": model.state_dict(), "epoch": 3},
            "state_dict": {  # a LightningModule with the network in an attribute
                "state_dict": {f"network.{key}": v for key, v in model.state_dict().items()},
                "optimizer_states": [torch.optim.SGD(model.parameters(), lr=1).state_dict()],
                "global_step": 3,
                "pytorch-lightning_version": "2.4",
            },
            "ddp": {"ddp": nn.DataParallel(model).state_dict()},
            "net": {"net": {f"_orig_mod.{key}": v for key, v in model.state_dict().items()}},
        }
        for name, content in files.items():
            torch.save(content, path)
            other = nn.Linear(2, 1)
            load_checkpoint(path, **{name: other})
            assert torch.equal(other.weight, model.weight), name
        torch.save(files["model"], path, _use_new_zipfile_serialization=False)
        load_checkpoint(path, model=other)

    def test_an_optimizer_of_a_replaced_model_is_noticed(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 1)
        stale = torch.optim.SGD(model.parameters(), lr=0.1)
        save_checkpoint(tmp_path / "last.pt", model=model, optimizer=stale)
        replaced = nn.Linear(2, 1)
        with pytest.warns(UserWarning, match="made before the model was replaced"):
            load_checkpoint(tmp_path / "last.pt", model=replaced, optimizer=stale)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_checkpoint(tmp_path / "last.pt", model=model, optimizer=stale)

    def test_what_was_on_an_accelerator_loads_on_the_cpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "cuda.pt"
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
            torch.save({"weight": torch.arange(3), "model": nn.Linear(2, 1).state_dict()}, path)
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="CUDA"):
                torch.load(path)
        rest = load_checkpoint(path, model=nn.Linear(2, 1))
        assert rest["weight"].device.type == "cpu" or torch.cuda.is_available()

    def test_random_states_go_on(self, tmp_path: Path) -> None:
        def draw() -> list[Any]:
            return [torch.rand(2).tolist(), np.random.rand(), random.gauss(0, 1), np.random.randn()]

        draw()
        save_checkpoint(tmp_path / "last.pt", random=RandomStates())
        drawn = draw()
        load_checkpoint(tmp_path / "last.pt", random=RandomStates())
        assert draw() == drawn
        save_checkpoint(tmp_path / "last.pt", wait=False, random=RandomStates())
        drawn = draw()
        load_checkpoint(tmp_path / "last.pt", random=RandomStates())
        assert draw() == drawn
