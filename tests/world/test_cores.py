"""How many cores a rank gets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddp_utils.world.cores import share_of_cores, usable_cores

# ranks here, usable, the launcher's, asked for each task -> cores
TABLE = [
    (1, 16, 16, None, 16),
    (4, 16, 16, None, 4),
    (32, 16, 16, None, 1),
    (4, 4, 16, None, 4),  # bound to cores of its own by srun or mpirun
    (8, 4, 64, None, 4),
    (2, 1, 2, None, 1),  # mpirun binds two ranks to a core each
    (4, 64, 64, 8, 8),  # srun --cpus-per-task=8
    (4, 2, 64, 8, 2),  # never more than may be used
    (4, 16, 0, None, 4),  # the launcher's are unknown
]


@pytest.mark.parametrize(("ranks", "usable", "available", "asked", "cores"), TABLE)
def test_table(ranks: int, usable: int, available: int, asked: int | None, cores: int) -> None:
    found = share_of_cores(ranks, usable=usable, available=available, per_task=asked)
    assert found == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux's affinity")
def test_an_affinity_mask_counts() -> None:
    """G04: eight ranks on eight of 128 cores must not use 128 threads each."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from ddp_utils.world.cores import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert usable_cores() == len(os.sched_getaffinity(0))
