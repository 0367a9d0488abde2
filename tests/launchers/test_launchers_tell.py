"""What each launcher really sets is what a rank finds; and how jobs end under them."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TORCHRUN, Run
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slow
WORKER = (sys.executable, str(Path(__file__).with_name("worker.py")))


def reports(output: str) -> list[dict[str, Any]]:
    """Return what the ranks said of themselves, by rank."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda each: int(each["rank"]))


def places(output: str) -> list[tuple[int, ...]]:
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
    found = reports(output)
    assert all(each["rank"] == each["at_import"] for each in found)
    return [tuple(each[name] for name in names) for each in found]


ONE_MACHINE = [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
TWO_NODES = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]


def test_torchrun(run: Run) -> None:
    done = run(*TORCHRUN, "--standalone", "--nproc-per-node", "2", WORKER[1])
    assert places(done.stdout) == ONE_MACHINE
    assert {each["interface"] for each in reports(done.stdout)} == {"lo"}


def test_torchrun_runs_a_module_of_a_package(run: Run, tmp_path: Path) -> None:
    """L24: with ``-m`` a package's own imports work, without it they fail: Python's way."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    say = "def say(rank):\n    print(f'rank {rank} is here\\n', end='')  # in one write\n"
    (package / "part.py").write_text(say)
    (package / "train.py").write_text(
        "import ddp_utils\nfrom package.part import say\n\n\n"
        "@ddp_utils.distributed_main\ndef main():\n    say(ddp_utils.get_rank())\n\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    start = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
    said = run(*start, "-m", "package.train").stdout.splitlines()
    assert sorted(said) == ["rank 0 is here", "rank 1 is here"]
    alone = run(sys.executable, "-m", "package.train", DDP_UTILS_NPROC="2").stdout.splitlines()
    assert sorted(alone) == ["[rank 1] rank 1 is here", "rank 0 is here"]
    wrong = run(*start, "package/train.py", ok=False)
    assert wrong.returncode != 0
    assert "No module named 'package'" in wrong.stderr


def test_mpirun(run: Run, mpirun: tuple[str, ...]) -> None:
    done = run(*mpirun, "-n", "2", *WORKER)
    assert places(done.stdout) == ONE_MACHINE
    assert [each["threads"] for each in reports(done.stdout)] == [1, 1]


def test_hydra(run: Run, hydra: tuple[str, ...]) -> None:
    assert places(run(*hydra, "-n", "2", *WORKER).stdout) == ONE_MACHINE


def test_two_jobs_of_hydra_at_once_are_told_of_each_other(run: Run, hydra: tuple[str, ...]) -> None:
    """MPICH says nothing that tells jobs apart: a second one on the port gets the advice."""
    with socket.create_server(("127.0.0.1", 29500)):
        done = run(*hydra, "-n", "2", *WORKER, ok=False, DDP_UTILS_TIMEOUT="5")
    assert done.returncode != 0
    assert "cannot listen at 127.0.0.1:29500: Address already in use" in done.stderr
    assert places(run(*hydra, "-n", "2", *WORKER, MASTER_PORT="29517").stdout) == ONE_MACHINE


def test_srun(run: Run, cluster: SlurmCluster) -> None:
    """The names n1 and n2 do not resolve here: srun's own address stands in for them."""
    command = ("srun", "-N2", "-n4", "--ntasks-per-node=2", *WORKER)
    done = run(*command, environ=cluster.environ)
    assert places(done.stdout) == TWO_NODES
    assert {each["launcher"] for each in reports(done.stdout)} == {"slurm"}
    done = run("salloc", "-N2", "-n4", *command, environ=cluster.environ)
    assert places(done.stdout) == TWO_NODES


def test_srun_with_cpus_per_task_sets_threads(run: Run, cluster: SlurmCluster) -> None:
    done = run("srun", "-N2", "-n2", "-c2", *WORKER, environ=cluster.environ)
    assert [each["threads"] for each in reports(done.stdout)] == [2, 2]
    decided = {"OMP_NUM_THREADS": "1"}
    done = run("srun", "-N2", "-n2", "-c2", *WORKER, environ=cluster.environ, **decided)
    assert [each["threads"] for each in reports(done.stdout)] == [1, 1]


def test_srun_of_one_task_is_no_launcher(run: Run, cluster: SlurmCluster) -> None:
    done = run("srun", "-n1", *WORKER, environ=cluster.environ)
    assert [each["launcher"] for each in reports(done.stdout)] == ["none"]


def test_a_hostfile_moves_rank_zero(run: Run, cluster: SlurmCluster, tmp_path: Path) -> None:
    """S16: task 0 is on n2, the list of nodes begins with n1."""
    (tmp_path / "hosts").write_text("n2\nn2\nn1\n")
    done = run(
        *("srun", "-N2", "-n3", "--distribution=arbitrary", *WORKER),
        environ=cluster.environ,
        SLURM_HOSTFILE=str(tmp_path / "hosts"),
    )
    assert places(done.stdout) == [(0, 3, 0, 2, 1, 2), (1, 3, 1, 2, 1, 2), (2, 3, 0, 1, 0, 2)]
    assert {each["master_addr"] for each in reports(done.stdout)} == {"n2"}


def test_mpirun_in_a_slurm_job(run: Run, cluster: SlurmCluster, mpirun: tuple[str, ...]) -> None:
    """Its daemons are a step of Slurm's, which is not the job."""
    start = ("salloc", "-N2", "-n4", *mpirun, "-n", "4")
    done = run(*start, "-x", "MASTER_ADDR=127.0.0.1", *WORKER, environ=cluster.environ)
    assert places(done.stdout) == TWO_NODES
    refused = run(*start, *WORKER, environ=cluster.environ, ok=False)
    assert refused.returncode != 0
    assert "Set MASTER_ADDR to the name or address of the machine of rank 0" in refused.stderr


def test_stale_variables_under_srun_are_told_with_both_sides(
    run: Run, cluster: SlurmCluster
) -> None:
    stale = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = run("srun", "-N2", "-n2", *WORKER, environ=cluster.environ, ok=False, **stale)
    assert done.returncode != 0
    assert done.stderr.count("two launchers contradict each other") == 2
    forced = run(
        *("srun", "-N2", "-n2", *WORKER),
        environ=cluster.environ,
        DDP_UTILS_LAUNCHER="slurm",
        **stale,
    )
    assert len(places(forced.stdout)) == 2


def test_explain_under_srun(run: Run, cluster: SlurmCluster) -> None:
    explain = (sys.executable, "-m", "ddp_utils", "explain", "--json")
    done = run("srun", "-N2", "-n2", "-l", *explain, environ=cluster.environ)
    text = "".join(line[3:] for line in done.stdout.splitlines() if line.startswith("1: "))
    assert json.loads(text)["world"]["rank"] == 1


# How jobs end


@pytest.fixture(params=["srun", "mpirun"])
def two_ranks(request: pytest.FixtureRequest) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """The start of a command for two ranks, rank zero hosting the store, and its environment."""
    if request.param == "mpirun":
        return (*request.getfixturevalue("mpirun"), "-n", "2"), None
    return ("srun", "-N2", "-n2"), request.getfixturevalue("cluster").environ


Start = tuple[tuple[str, ...], dict[str, str] | None]


def test_rank_zero_may_leave_first(run: Run, two_ranks: Start) -> None:
    """The store that it hosts serves the others until they have left as well."""
    command, environ = two_ranks
    done = run(*command, *WORKER, "leave_early", environ=environ)
    (other,) = reports(done.stdout)
    assert other["rank"] == 1
    assert other["turns"] > 100


def test_rank_zero_does_not_wait_for_a_rank_that_was_killed(run: Run, two_ranks: Start) -> None:
    command, environ = two_ranks
    done = run(*command, *WORKER, "killed_peer", environ=environ, ok=False)
    assert done.returncode != 0
    assert [each["rank"] for each in reports(done.stdout)] == [0]


def test_rank_zero_does_not_wait_if_it_fails(run: Run, two_ranks: Start) -> None:
    command, environ = two_ranks
    done = run(*command, *WORKER, "failing_zero", environ=environ, ok=False)
    assert done.returncode != 0
    assert "ArithmeticError: rank zero's own trouble" in done.stderr
