"""torchrun restarts: a rank is killed amid an epoch, and nothing is lost or seen twice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TORCHRUN, Run

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).with_name("resuming.py"))
START = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")


def weights(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "end.pt")["model"])


def test_a_killed_rank_s_job_resumes_and_ends_with_the_weights_of_one_that_stopped_there(
    run: Run, tmp_path: Path
) -> None:
    killed, stopped, through = (tmp_path / name for name in ("killed", "stopped", "through"))
    for folder in (killed, stopped, through):
        folder.mkdir()
    done = run(*START, "--max-restarts", "2", SCRIPT, str(killed), "kill")
    assert done.stdout.splitlines() == ["from step 0", "from step 12"]

    assert run(*START, SCRIPT, str(stopped), "stop").stdout.splitlines() == ["from step 0"]
    assert not (stopped / "end.pt").exists()
    assert run(*START, SCRIPT, str(stopped)).stdout.splitlines() == ["from step 12"]

    run(sys.executable, SCRIPT, str(through), DDP_UTILS_NPROC="2")  # and of one never disturbed
    for other in (stopped, through):
        for name, value in weights(other).items():
            assert torch.equal(value, weights(killed)[name]), name
