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
from ddp_utils.testing import run_distributed
from ddp_utils.world import world as world_module
from ddp_utils.world.world import World


def error_of(kind: type[BaseException], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def evaluate_on_rank_zero() -> tuple[str, str, float]:
    """Work on rank zero for three times the timeout of the group, in both kinds of section."""
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
    return made, evaluate(), all_reduce_mean(1.0, group=group)


def test_y01_rank_zero_may_work_long_while_the_others_wait() -> None:
    """Y01, Synthefy/synthefy-nori#86; huggingface/accelerate#3861."""
    assert run_distributed(evaluate_on_rank_zero) == [("cache", "evaluated", 1.0)] * 2


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


def test_y03_only_one_rank_downloads_and_the_others_find_it_whole(tmp_path: Path) -> None:
    """Y03, pytorch/tutorials#3065; pytorch/pytorch#68320; Lightning-AI/pytorch-lightning#17732."""
    assert run_distributed(download, tmp_path, world_size=3) == [True, False, False]


def download_on_each_machine(folder: Path, local: bool) -> bool:
    """Be two machines with a rank each, whose disks are shared or not."""
    rank = get_rank()
    world_module.SIMULATED.set(World(rank, 2, 0, 1, rank, 2, "torchrun"))
    return download(folder / str(rank) if local else folder)


@pytest.mark.parametrize("local", [False, True])
def test_y04_each_machine_downloads_or_only_one(tmp_path: Path, local: bool) -> None:
    """Y04, LambdaLabsML/distributed-training-guide#35; open-mmlab/mmpretrain#273."""
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    downloaded = run_distributed(download_on_each_machine, tmp_path, local)
    assert downloaded == [True, local]


def wait_without_a_device() -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the barrier guesses a device")

    dist.barrier = refuse
    barrier()


def test_y05_a_barrier_needs_no_device() -> None:
    """Y05, pytorch/pytorch#54991; deepspeedai/DeepSpeed#7266; kohya-ss/sd-scripts#1925."""
    run_distributed(wait_without_a_device)


def stop_early() -> int:
    for step in range(10):
        wants_to_stop = is_rank_zero() and step == 2
        if any_rank(wants_to_stop):
            return step
    return -1


def test_y06_all_ranks_stop_when_one_wants_to() -> None:
    """Y06, Lightning-AI/pytorch-lightning#379; huggingface/accelerate#1940."""
    assert run_distributed(stop_early, world_size=3) == [2, 2, 2]


def raise_on_rank_zero(broadcasts: bool) -> str:
    def fail() -> None:
        raise ValueError("corrupt checkpoint")

    def first() -> None:
        with rank_zero_first():
            fail()

    section = rank_zero_only(fail, broadcast=True) if broadcasts else first
    return error_of(ValueError if is_rank_zero() else RankZeroError, section)


@pytest.mark.parametrize("broadcasts", [False, True])
def test_y07_rank_zeros_error_reaches_those_who_wait(broadcasts: bool) -> None:
    """Y07, firedrakeproject/firedrake#4972; LibreYOLO/libreyolo#594."""
    own, *others = run_distributed(raise_on_rank_zero, broadcasts, world_size=3)
    assert own == "corrupt checkpoint"
    for text in others:
        assert text.startswith("rank 0 raised in ")
        assert "ValueError: corrupt checkpoint" in text


def use_a_collective_alone() -> Any:
    @rank_zero_only
    def report() -> float:
        return all_reduce_mean(1.0)  # type: ignore[no-any-return]

    if is_rank_zero():
        return error_of(OneRankSectionError, report)
    return report()


def test_y08_a_collective_in_a_rank_zero_section_is_an_error_and_no_hang() -> None:
    """Y08, mosaicml/composer#239."""
    text, none = run_distributed(use_a_collective_alone)
    assert text.count(__file__) == 2  # the line of the call, and that of the section
    assert none is None


def look_for_a_file(folder: Path) -> tuple[bool, bool]:
    """Be a rank whose machine does not see the file yet."""
    path = folder / "model.pt"
    sees = path.exists() and is_rank_zero()
    exists = rank_zero_only(path.exists, broadcast=True)()
    return sees, exists


def test_y09_rank_zero_decides_whether_a_file_is_there(tmp_path: Path) -> None:
    """Y09, KempnerInstitute/KempnerForge#49."""
    (tmp_path / "model.pt").touch()
    assert run_distributed(look_for_a_file, tmp_path) == [(True, True), (False, True)]


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


def track(folder: Path) -> None:
    with rank_zero_only(Writer)(folder) as writer:
        for step in range(2):
            writer.add_scalar("loss", all_reduce_mean(float(get_rank())), step)


def test_g01_one_run_is_tracked_and_not_one_for_each_rank(tmp_path: Path) -> None:
    """G01, Lightning-AI/pytorch-lightning#11380; metatensor/metatrain#733; wandb/wandb#6733."""
    run_distributed(track, tmp_path, world_size=3)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "run 0",
        "run 0/loss 0",
        "run 0/loss 1",
    ]


def show_progress() -> tuple[str, int]:
    """Train with a progress bar, a prompt and messages, as one does in a single process."""
    screen = io.StringIO()
    steps = 0
    for _ in rank_zero_only(tqdm)(range(5), file=screen):
        steps += 1
    for _ in tqdm(range(5), file=screen, disable=not is_rank_zero()):
        steps += 1
    asked = rank_zero_only(lambda: "yes", broadcast=True)()  # in place of input()
    rank_zero_print("answer:", asked, file=screen)
    get_logger("g02").info("never on the others")
    return screen.getvalue(), steps


def test_g02_one_progress_bar_one_prompt_and_the_same_steps() -> None:
    """G02, mlcommons/algorithmic-efficiency#133; Lightning-AI/pytorch-lightning#4364."""
    first, *others = run_distributed(show_progress, world_size=3)
    assert first[0].count("100%") == 2
    assert first[0].count("answer: yes") == 1
    assert [steps for _, steps in (first, *others)] == [10, 10, 10]
    assert [text for text, _ in others] == ["", ""]
