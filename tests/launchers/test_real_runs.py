"""The digits example, one file, under every launcher: the same loss as with our own start."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import DIGITS, TORCHRUN, Run, environment, final_loss
from slurm_cluster import SlurmCluster
from two_machines import ADDRESSES, TwoMachines

pytestmark = pytest.mark.slow
TRAIN = (sys.executable, str(DIGITS), "--epochs", "1")
LossOf = Callable[[int], float]


def same(output: str, expected: float) -> None:
    assert final_loss(output) == pytest.approx(expected, abs=1e-6)


def test_torchrun(run: Run, loss_of: LossOf) -> None:
    done = run(*TORCHRUN, "--standalone", "--nproc-per-node", "2", *TRAIN[1:])
    same(done.stdout, loss_of(2))


@pytest.mark.parametrize("flags", [(), ("--use_env",)])
def test_legacy_launch(run: Run, loss_of: LossOf, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Without ``--use_env`` the script gets ``--local-rank=N``, which it has to accept."""
    script = tmp_path / "accepts.py"
    script.write_text(
        "import argparse, runpy, sys\n"
        "import ddp_utils\n"
        "parser = argparse.ArgumentParser()\n"
        "ddp_utils.add_local_rank_argument(parser)\n"
        "args, sys.argv[1:] = parser.parse_known_args()\n"
        "assert args.local_rank == ddp_utils.get_local_rank()\n"
        f"runpy.run_path({str(DIGITS)!r}, run_name='__main__')\n"
    )
    command = (sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2", *flags)
    done = run(*command, str(script), "--epochs", "1")
    same(done.stdout, loss_of(2))


def test_mpirun(run: Run, loss_of: LossOf, mpirun: tuple[str, ...]) -> None:
    same(run(*mpirun, "-n", "2", *TRAIN).stdout, loss_of(2))


def test_hydra(run: Run, loss_of: LossOf, hydra: tuple[str, ...]) -> None:
    same(run(*hydra, "-n", "2", *TRAIN).stdout, loss_of(2))


def test_srun(run: Run, loss_of: LossOf, cluster: SlurmCluster) -> None:
    done = run("srun", "-N2", "-n4", "--ntasks-per-node=2", *TRAIN, environ=cluster.environ)
    same(done.stdout, loss_of(4))
    assert "4 ranks on 2 nodes, launcher slurm" in done.stderr


def batch(run: Run, cluster: SlurmCluster, folder: Path, *lines: str) -> str:
    """Return what a batch script wrote."""
    script = folder / "job.sh"
    script.write_text("\n".join(["#!/bin/sh", "#SBATCH -o job.out", *lines, ""]))
    run("sbatch", "--wait", str(script), environ=cluster.environ, ok=False)
    return (folder / "job.out").read_text()


def test_sbatch_with_srun(run: Run, loss_of: LossOf, cluster: SlurmCluster, tmp_path: Path) -> None:
    command = " ".join(("srun", *TRAIN))
    output = batch(run, cluster, tmp_path, "#SBATCH -N2 -n4 --ntasks-per-node=2", command)
    same(output, loss_of(4))


def test_sbatch_without_srun(
    run: Run, loss_of: LossOf, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The batch script is no rank of srun's: the ranks are started by the script itself."""
    lines = "#SBATCH -N1 -n2", "export DDP_UTILS_NPROC=2", " ".join(TRAIN)
    output = batch(run, cluster, tmp_path, *lines)
    same(output, loss_of(2))
    assert "launcher spawn" in output


def test_torchrun_in_srun(run: Run, loss_of: LossOf, cluster: SlurmCluster, tmp_path: Path) -> None:
    nodes = "--nnodes 2 --nproc-per-node 2 --node-rank $SLURM_NODEID"
    where = "--master-addr 127.0.0.1 --master-port 29431"
    torchrun = " ".join([*TORCHRUN, nodes, where, *TRAIN[1:]])
    lines = "#SBATCH -N2 -n2 --ntasks-per-node=1", f"srun sh -c '{torchrun}'"
    same(batch(run, cluster, tmp_path, *lines), loss_of(4))


PAGE = Path(__file__).parents[2] / "docs/launchers.md"
BATCH_FILES = re.findall(r"```bash\n#!/bin/bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
SMALLER = {
    r" --gpus(-per-\w+)?=\d+": "",
    r"--nodes=3": "--nodes=2",
    r"--ntasks-per-node=4": "--ntasks-per-node=2",
    r"--cpus-per-task=\d+": "--cpus-per-task=1",
    r"--nproc-per-node 4": "--nproc-per-node 2",
    r"\bpython train.py": " ".join(TRAIN),
    r"\btorchrun ": f"{' '.join(TORCHRUN)} ",
    r"\btrain.py": " ".join(TRAIN[1:]),
    r"(export MASTER_ADDR=.*)": r'\1; [ "$MASTER_ADDR" = n1 ] && MASTER_ADDR=127.0.0.1',
}
"""Two nodes without GPUs, and without addresses, stand in for those of the page."""


@pytest.mark.parametrize(("number", "ranks"), [(0, 2), (1, 4), (2, 4), (3, 4)])
def test_the_batch_files_of_the_page(
    number: int, ranks: int, run: Run, loss_of: LossOf, cluster: SlurmCluster, tmp_path: Path
) -> None:
    text = BATCH_FILES[number]
    for pattern, here in SMALLER.items():
        text = re.sub(pattern, here, text)
    assert "gpu" not in text
    lines = "export DDP_UTILS_NPROC=2", *text.splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    rest = [line for line in lines if line not in options]
    same(batch(run, cluster, tmp_path, *options, *rest), loss_of(ranks))


def test_the_page_has_no_other_batch_files() -> None:
    assert len(BATCH_FILES) == PAGE.read_text().count("#SBATCH") == 4


def on_both(machines: TwoMachines, folder: Path, command: Callable[[int], list[str]]) -> list[str]:
    """Run a command on each machine, the second a little later; return what each printed."""
    started = []
    for machine in range(2):
        variables = {"NNODES": "2", "NODE_RANK": str(machine), "DDP_UTILS_NPROC": "2"}
        variables |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29400"}
        started.append(
            subprocess.Popen(
                machines.on(machine, *command(machine)),
                cwd=folder,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    return outputs


def test_torchrun_on_two_machines(loss_of: LossOf, machines: TwoMachines, tmp_path: Path) -> None:
    def command(machine: int) -> list[str]:
        where = ["--master-addr", ADDRESSES[0], "--master-port", "29400"]
        nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(machine)]
        return [*TORCHRUN, *nodes, *where, *TRAIN[1:]]

    outputs = on_both(machines, tmp_path, command)
    same("".join(outputs), loss_of(4))


def test_by_hand_on_two_machines(loss_of: LossOf, machines: TwoMachines, tmp_path: Path) -> None:
    outputs = on_both(machines, tmp_path, lambda machine: list(TRAIN))
    same("".join(outputs), loss_of(4))
