"""Public reports about work on rank zero and logging: rows Y*, G01 and G02 of the list of cases.

Each test's docstring begins with its row and names where it was reported.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tqdm import tqdm

from ddp_utils import (
    OneRankSectionError,
    RankFailedError,
    RankZeroError,
    all_reduce_mean,
    any_rank,
    barrier,
    get_logger,
    get_rank,
    is_rank_zero,
    rank_zero_first,
    rank_zero_only,
    rank_zero_print,
)
from ddp_utils.process_group import shared_store
from ddp_utils.testing import run_distributed, simulated_world


def error_of(kind: type[BaseException], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@pytest.mark.distributed(world_size=2)
def test_y01_rank_zero_may_work_long_while_the_others_wait() -> None:
    """Y01, Synthefy/synthefy-nori#86; huggingface/accelerate#3861."""
    # Three times the timeout of the group, in both kinds of section.
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))

    @rank_zero_only(broadcast=True)
    def evaluate() -> str:
        time.sleep(1.5)
        return "evaluated"

    with rank_zero_first():
        if is_rank_zero():
            time.sleep(1.5)
            shared_store().set("made", "cache")
        made = shared_store().get("made").decode()
    assert made == "cache"
    assert evaluate() == "evaluated"
    assert all_reduce_mean(1.0, group=group) == 1.0


def die_while_others_wait() -> None:
    with rank_zero_first():
        if is_rank_zero():
            os._exit(7)


def test_y01_rank_zeros_death_ends_the_wait() -> None:
    """Y01, EleutherAI/lm-evaluation-harness#1404: nobody waits for a rank that is dead."""
    with pytest.raises(RankFailedError, match="exited with code 7") as error:
        run_distributed(die_while_others_wait, world_size=3)
    assert error.value.rank == 0


def download(folder: Path) -> bool:
    """Write a file that must be there once and whole, as a data set does."""
    with rank_zero_first():
        path = folder / "data.bin"
        downloaded = not path.exists()
        if downloaded:
            with path.open("x") as file:
                for _ in range(20):
                    file.write("x" * 1000)
                    file.flush()
                    time.sleep(0.005)
        assert path.stat().st_size == 20_000
    return downloaded


@pytest.mark.distributed(world_size=3)
def test_y03_only_one_rank_downloads_and_the_others_find_it_whole(tmp_path: Path) -> None:
    """Y03, pytorch/tutorials#3065; pytorch/pytorch#68320; Lightning-AI/pytorch-lightning#17732."""
    assert download(tmp_path) is is_rank_zero()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.distributed(world_size=2)
def test_y04_each_machine_downloads_or_only_one(tmp_path: Path, local: bool) -> None:
    """Y04, LambdaLabsML/distributed-training-guide#35; open-mmlab/mmpretrain#273."""
    # Two machines with a rank each, whose disks are shared or not.
    rank = get_rank()
    folder = tmp_path / str(rank) if local else tmp_path
    folder.mkdir(exist_ok=True)
    with simulated_world(rank, 2, num_nodes=2, launcher="torchrun"):
        downloaded = download(folder)
    assert downloaded is (rank == 0 or local)


@pytest.mark.distributed(world_size=2)
def test_y05_a_barrier_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y05, pytorch/pytorch#54991; deepspeedai/DeepSpeed#7266; kohya-ss/sd-scripts#1925."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the barrier guesses a device")

    monkeypatch.setattr(dist, "barrier", refuse)
    barrier()


@pytest.mark.distributed(world_size=3)
def test_y06_all_ranks_stop_when_one_wants_to() -> None:
    """Y06, Lightning-AI/pytorch-lightning#379; huggingface/accelerate#1940."""
    stopped_at = -1
    for step in range(10):
        wants_to_stop = is_rank_zero() and step == 2
        if any_rank(wants_to_stop):
            stopped_at = step
            break
    assert stopped_at == 2


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.distributed(world_size=3)
def test_y07_rank_zeros_error_reaches_those_who_wait(broadcasts: bool) -> None:
    """Y07, firedrakeproject/firedrake#4972; LibreYOLO/libreyolo#594."""

    def fail() -> None:
        raise ValueError("corrupt checkpoint")

    def first() -> None:
        with rank_zero_first():
            fail()

    section = rank_zero_only(fail, broadcast=True) if broadcasts else first
    if is_rank_zero():
        assert error_of(ValueError, section) == "corrupt checkpoint"
    else:
        text = error_of(RankZeroError, section)
        assert text.startswith("rank 0 raised in ")
        assert "ValueError: corrupt checkpoint" in text


@pytest.mark.distributed(world_size=2)
def test_y08_a_collective_in_a_rank_zero_section_is_an_error_and_no_hang() -> None:
    """Y08, mosaicml/composer#239."""

    @rank_zero_only
    def report() -> float:
        return all_reduce_mean(1.0)  # type: ignore[no-any-return]

    if is_rank_zero():
        text = error_of(OneRankSectionError, report)
        assert text.count(__file__) == 2  # the line of the call, and that of the section
    else:
        assert report() is None


@pytest.mark.distributed(world_size=2)
def test_y09_rank_zero_decides_whether_a_file_is_there(tmp_path: Path) -> None:
    """Y09, KempnerInstitute/KempnerForge#49."""
    path = tmp_path / f"model-{get_rank()}.pt"  # rank one's machine does not see the file yet
    if is_rank_zero():
        path.touch()
    assert path.exists() is is_rank_zero()
    assert rank_zero_only(path.exists, broadcast=True)() is True


class Writer:
    """Like the writers of experiment trackers: a folder for each that is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"run {get_rank()}"
        self.folder.mkdir()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        (self.folder / f"{name} {step}").write_text(str(value))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None: ...


@pytest.mark.distributed(world_size=3)
def test_g01_one_run_is_tracked_and_not_one_for_each_rank(tmp_path: Path) -> None:
    """G01, Lightning-AI/pytorch-lightning#11380; metatensor/metatrain#733; wandb/wandb#6733."""
    with rank_zero_only(Writer)(tmp_path) as writer:
        for step in range(2):
            writer.add_scalar("loss", all_reduce_mean(float(get_rank())), step)
    barrier()  # until rank zero has written it all
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "run 0",
        "run 0/loss 0",
        "run 0/loss 1",
    ]


@pytest.mark.distributed(world_size=3)
def test_g02_one_progress_bar_one_prompt_and_the_same_steps() -> None:
    """G02, mlcommons/algorithmic-efficiency#133; Lightning-AI/pytorch-lightning#4364."""
    # A progress bar, a prompt and messages, as one has them in a single process.
    screen = io.StringIO()
    steps = 0
    for _ in rank_zero_only(tqdm)(range(5), file=screen):
        steps += 1
    for _ in tqdm(range(5), file=screen, disable=not is_rank_zero()):
        steps += 1
    asked = rank_zero_only(lambda: "yes", broadcast=True)()  # in place of input()
    rank_zero_print("answer:", asked, file=screen)
    get_logger("g02").info("never on the others")
    assert steps == 10
    if is_rank_zero():
        assert screen.getvalue().count("100%") == 2
        assert screen.getvalue().count("answer: yes") == 1
    else:
        assert screen.getvalue() == ""
