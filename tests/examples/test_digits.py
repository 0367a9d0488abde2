"""The main job: the digits script, before and after, on real data."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


def run(script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DIGITS / script), *args],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"DDP_UTILS_QUIET": "1"} | variables,
        check=True,
    )


def test_the_two_differ_by_at_most_15_lines() -> None:
    before, after = ((DIGITS / name).read_text().splitlines() for name in ("before.py", "after.py"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(changed) <= 15


@pytest.mark.parametrize(
    "ranks",
    [pytest.param("1", marks=pytest.mark.slow), "2", pytest.param("3", marks=pytest.mark.slow)],
)
def test_trains_evaluates_and_saves(ranks: str, tmp_path: Path) -> None:
    file = tmp_path / "digits.pt"
    done = run("after.py", "--save", str(file), DDP_UTILS_NPROC=ranks)
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {i}" for i in range(1, 9)]
    accuracy = re.fullmatch(r".*(test accuracy (0\.\d{4}) \(\d+ of 357\))", lines[-1])
    assert accuracy is not None
    assert float(accuracy[2]) >= 0.97

    bars = {match[1] for match in re.finditer(r"(epoch \d): 100%", done.stderr)}
    assert len(bars) == 8
    assert "[rank" not in done.stdout + done.stderr

    assert run("before.py", "--evaluate", str(file)).stdout.strip() == accuracy[1]
    assert (
        run("after.py", "--evaluate", str(file), DDP_UTILS_NPROC=ranks).stdout.strip()
        == accuracy[1]
    )

    sys.path.insert(0, str(DIGITS))
    try:
        import before
    finally:
        sys.path.remove(str(DIGITS))
    assert before.make_net().load_state_dict(torch.load(file)).missing_keys == []


@pytest.mark.slow
def test_torchrun_trains_the_same(tmp_path: Path) -> None:
    alone = run("after.py", "--save", str(tmp_path / "a.pt"), DDP_UTILS_NPROC="2")
    torchrun = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *(str(DIGITS / "after.py"), "--save", str(tmp_path / "b.pt")),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert torchrun.stdout == alone.stdout


def test_the_readme_shows_the_real_diff() -> None:
    readme = (DIGITS.parents[1] / "README.md").read_text()
    shown = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    before, after = ((DIGITS / name).read_text().splitlines() for name in ("before.py", "after.py"))
    changed = [line[0] + line[2:] for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert sorted(line for line in shown if line and line[0] in "+-") == sorted(changed)
