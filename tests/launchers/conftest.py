"""The launchers that these tests really run, and what they need.

What is not installed skips its tests, with the reason. With ``DDP_UTILS_TEST_LAUNCHERS=required``,
as in ``.ci/run``, it fails them instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import PROGRAMS, SlurmCluster
from two_machines import TwoMachines

DIGITS = Path(__file__).parents[2] / "examples/digits/after.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
Run = Callable[..., subprocess.CompletedProcess[str]]


def need(*programs: str, root: bool = False) -> None:
    """Skip, or where launchers are required fail, unless all programs can be run."""
    missing = [name for name in programs if shutil.which(name) is None]
    if root and os.geteuid() != 0:
        missing.append("root")
    if not missing:
        return
    reason = f"needs {', '.join(missing)}"
    if os.environ.get("DDP_UTILS_TEST_LAUNCHERS") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two Slurm nodes."""
    need(*PROGRAMS, root=True)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    """Two network namespaces with a link between them."""
    need("ip", root=True)
    machines = TwoMachines()
    try:
        machines.start()
        yield machines
    finally:
        machines.stop()


@pytest.fixture
def mpirun() -> tuple[str, ...]:
    """Open MPI's command, with what root on a small machine has to add."""
    need("mpirun.openmpi")
    return ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")


@pytest.fixture
def hydra() -> tuple[str, ...]:
    """MPICH's command."""
    need("mpiexec.hydra")
    return ("mpiexec.hydra",)


def environment(**variables: str) -> dict[str, str]:
    """Return this environment for a command, without what would tell of a launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDP_UTILS")}
    return kept | variables


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command in a folder of its own, and return what became of it."""

    def run_command(
        *command: str, ok: bool = True, environ: dict[str, str] | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=(environ or environment()) | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if ok:
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    return run_command


LOSS = re.compile(r"epoch 1: loss (\d+\.\d+)")


def final_loss(output: str) -> float:
    """Return the loss that the digits example has printed, once and by one rank."""
    (loss,) = LOSS.findall(output)
    return float(loss)


@pytest.fixture(scope="session")
def loss_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], float]:
    """Return the final loss of ``python after.py`` with a number of ranks."""
    known: dict[int, float] = {}

    def loss(nproc: int) -> float:
        if nproc not in known:
            done = subprocess.run(
                [sys.executable, str(DIGITS), "--epochs", "1"],
                cwd=tmp_path_factory.mktemp("alone"),
                env=environment(DDP_UTILS_NPROC=str(nproc)),
                capture_output=True,
                text=True,
                timeout=100,
                check=True,
            )
            known[nproc] = final_loss(done.stdout)
        return known[nproc]

    return loss
