"""How long does a suite of 30 small distributed tests take, and how long by hand?

By hand is what is in most repositories: each test calls ``torch.multiprocessing.spawn`` with a
function that makes a process group from a file. Both suites are whole pytest runs, with the same
30 tests of two ranks, each with one all-reduce.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import Target, compare

TESTS = 30

MARKED = """
import pytest, torch
import torch.distributed as dist

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("number", range({tests}))
def test_sum(number):
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    assert total.item() == 2 * number
"""

CALLED = """
import pytest, torch
import torch.distributed as dist
from ddp_utils.testing import run_distributed

def work(number):
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    assert total.item() == 2 * number

@pytest.mark.parametrize("number", range({tests}))
def test_sum(number):
    run_distributed(work, number)
"""

SPAWNED = """
import pytest, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, number, path):
    dist.init_process_group("gloo", init_method=f"file://{{path}}", rank=rank, world_size=2)
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    assert total.item() == 2 * number
    dist.destroy_process_group()

@pytest.mark.parametrize("number", range({tests}))
def test_sum(number, tmp_path):
    mp.spawn(work, (number, tmp_path / "rendezvous"), nprocs=2)
"""


def main() -> None:
    """A whole run of pytest for each suite."""
    ours = "ddp_utils, @pytest.mark.distributed"
    by_hand = "torch.multiprocessing.spawn in each test"
    compare(
        f"a suite of {TESTS} tests of 2 ranks",
        {
            by_hand: lambda: run(SPAWNED),
            ours: lambda: run(MARKED),
            "ddp_utils, run_distributed": lambda: run(CALLED),
        },
        floor=by_hand,
        targets=[Target(ours, 0.1)],
        rounds=3,
    )


def run(suite: str) -> float:
    """Return how many seconds a suite takes, with no plugin but the one that it may use."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_suite.py").write_text(suite.format(tests=TESTS))
        plugins = ["-p", "no:cacheprovider", "-p", "ddp_utils.testing.plugin"]
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugins, folder],
            check=True,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        return time.perf_counter() - started
