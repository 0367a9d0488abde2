"""Does every step of the retrofit run on one device and on two ranks, and do what its page says?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RETROFIT = Path(__file__).parents[2] / "examples" / "retrofit"
STEPS = sorted(path.stem for path in RETROFIT.glob("step*.py"))
SHAPES = ("classifier", "gan", "language_model")
pytestmark = pytest.mark.timeout(400)  # each runs several scripts, and imports scikit-learn anew

LINE = re.compile(r"^(\[rank 1\] )?epoch (\d+): loss (\d\.\d+), (\d+) of (\d+) right$", re.M)


def environment(nproc: int) -> dict[str, str]:
    return {**os.environ, "DDP_UTILS_NPROC": str(nproc), "DDP_UTILS_QUIET": "1"}


def run(name: str, *arguments: str, nproc: int, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(RETROFIT / f"{name}.py"), *arguments],
        cwd=cwd,
        env=environment(nproc),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def epochs(output: str) -> list[tuple[str, ...]]:
    lines = LINE.findall(output)
    assert len(lines) == len(output.splitlines()), output
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_each_step_trains_on_one_device(step: str, tmp_path: Path) -> None:
    lines = epochs(run(step, nproc=1, cwd=tmp_path))
    assert [line[1] for line in lines] == ["1", "2", "3"]
    assert {line[4] for line in lines} == {"121"}
    assert int(lines[-1][3]) >= 115


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS[1:])
def test_each_step_trains_and_resumes_on_two_ranks(step: str, tmp_path: Path) -> None:
    number = int(step[4])
    first = epochs(run(step, "--epochs", "2", nproc=2, cwd=tmp_path))
    if number > 1:  # before, both ranks write their own models over each other
        then = epochs(run(step, "--resume", nproc=2, cwd=tmp_path))
        assert {line[1] for line in then} == {"3"}
    by_rank = {rank: [line for line in first if line[0] == rank] for rank in ("", "[rank 1] ")}
    assert [line[1] for line in by_rank[""]] == ["1", "2"]
    assert len(by_rank["[rank 1] "]) == (2 if number < 5 else 0)
    evaluated = {rank: int(lines[0][4]) for rank, lines in by_rank.items() if lines}
    if number < 3:
        assert evaluated == {"": 121, "[rank 1] ": 121}
    elif number == 3:
        assert evaluated == {"": 61, "[rank 1] ": 60}
    else:
        assert set(evaluated.values()) == {121}
        assert len({line[1:] for line in first}) == 2, "both ranks tell the same numbers"


@pytest.mark.slow
def test_files_go_back_and_forth_between_the_steps(tmp_path: Path) -> None:
    run("step5_print_and_save", "--epochs", "1", nproc=2, cwd=tmp_path)
    run("step0_one_device", "--epochs", "2", "--resume", nproc=1, cwd=tmp_path)
    run("step2_wrap", "--resume", nproc=2, cwd=tmp_path)
    state = torch.load(tmp_path / "cells.pt")
    assert state["epoch"] == 3
    assert not any(key.startswith("module.") for key in state["model"])


def test_the_last_step_trains_on_two_ranks_and_resumes_on_one(tmp_path: Path) -> None:
    first = epochs(run(STEPS[-1], "--epochs", "2", nproc=2, cwd=tmp_path))
    then = epochs(run(STEPS[-1], "--resume", nproc=1, cwd=tmp_path))
    assert [line[1] for line in first + then] == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_last_step_stops_with_a_checkpoint_and_goes_on(nproc: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", str(RETROFIT / f"{STEPS[-1]}.py"), "--epochs", "100000"],
        cwd=tmp_path,
        env=environment(nproc),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # an epoch has been trained: the signals are armed
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    stopped_in = torch.load(tmp_path / "cells.pt")["epoch"]
    more = epochs(
        run(STEPS[-1], "--resume", "--epochs", str(stopped_in), nproc=nproc, cwd=tmp_path)
    )
    assert [int(line[1]) for line in more] == [stopped_in]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_runs_before_and_after(shape: str, tmp_path: Path) -> None:
    run(f"{shape}_before", "--epochs", "1", nproc=1, cwd=tmp_path)
    alone = run(f"{shape}_after", "--epochs", "1", nproc=1, cwd=tmp_path)
    together = run(f"{shape}_after", "--epochs", "1", nproc=2, cwd=tmp_path)
    assert "[rank 1]" not in together
    words = [re.sub(r"[\d.]+", "#", text) for text in (alone, together)]
    assert words[0] == words[1], "the same lines, other numbers"


@pytest.mark.slow
def test_the_classifier_with_workers_learns_and_saves_bare_weights(tmp_path: Path) -> None:
    options = ("--epochs", "4", "--save-model", "net.pt", "--workers", "1")
    output = run("classifier_after", *options, nproc=2, cwd=tmp_path)
    correct = re.findall(r"accuracy (\d+) of 357", output)
    assert len(correct) == 4
    assert int(correct[-1]) > 200
    assert sorted(torch.load(tmp_path / "net.pt"))[0] == "conv1.bias"


@pytest.mark.slow
def test_the_language_model_evaluates_the_same_windows_on_one_and_two_ranks(tmp_path: Path) -> None:
    outputs = [run("language_model_after", nproc=nproc, cwd=tmp_path) for nproc in (1, 2)]
    found = [[float(x) for x in re.findall(r"perplexity ([\d.]+)", text)] for text in outputs]
    assert found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], rel=0.02)
