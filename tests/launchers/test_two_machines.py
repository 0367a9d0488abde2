"""Two machines: which way they talk, and what becomes of one when the other has trouble."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import TORCHRUN, environment
from two_machines import ADDRESSES, TwoMachines

pytestmark = pytest.mark.slow
WORKER = (sys.executable, str(Path(__file__).with_name("worker.py")))
Processes = list["subprocess.Popen[str]"]


@contextmanager
def by_hand(
    machines: TwoMachines, *command: str, each: tuple[dict[str, str], ...] = ({}, {}), **all_of: str
) -> Iterator[Processes]:
    """Start a command on each machine, as by hand."""
    started: Processes = []
    for machine in range(2):
        variables = {"NNODES": "2", "NODE_RANK": str(machine), "DDP_UTILS_NPROC": "2"}
        variables |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29400"}
        started.append(
            subprocess.Popen(
                machines.on(machine, *command),
                env=environment(**variables | all_of | each[machine]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ends(processes: Processes) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each, in the machines' order."""
    told = [process.communicate(timeout=100) for process in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, told, strict=True)]


def reports(outputs: list[tuple[int, str, str]]) -> list[dict[str, Any]]:
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    lines = [line for _, out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def test_each_machine_takes_the_interface_towards_rank_zero(machines: TwoMachines) -> None:
    with by_hand(machines, *WORKER) as started:
        found = reports(ends(started))
    assert [each["interface"] for each in found] == list(machines.links)
    assert [each["rank"] for each in found] == [0, 1]
    own = ({"GLOO_SOCKET_IFNAME": machines.links[0]}, {"GLOO_SOCKET_IFNAME": machines.links[1]})
    with by_hand(machines, *WORKER, each=own) as started:
        assert [each["interface"] for each in reports(ends(started))] == list(machines.links)


def test_a_machine_whose_name_stands_for_loopback_on_itself(machines: TwoMachines) -> None:
    """R05, for real: Debian's way in /etc/hosts, which gloo by itself takes for the address."""
    lines = ("127.0.1.1 head\n", f"{ADDRESSES[0]} head\n")
    with machines.hosts(*lines), by_hand(machines, *WORKER, MASTER_ADDR="head") as started:
        found = reports(ends(started))
    assert [each["interface"] for each in found] == list(machines.links)


def test_torchrun_with_a_name_that_stands_for_loopback(machines: TwoMachines) -> None:
    lines = ("127.0.1.1 head\n", f"{ADDRESSES[0]} head\n")
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "head"]
    command += ["--master-port", "29400", "--node-rank"]
    started: Processes = []
    with machines.hosts(*lines):
        for machine in range(2):
            line = machines.on(machine, *command, str(machine), WORKER[1])
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(subprocess.Popen(line, env=environment(), text=True, **pipes))
        found = reports(ends(started))
    assert [each["interface"] for each in found] == list(machines.links)


def test_a_wrong_interface_on_one_machine_is_an_error_on_both(machines: TwoMachines) -> None:
    """R06: the other machine would wait for it."""
    each = ({}, {"GLOO_SOCKET_IFNAME": "^lo"})
    with by_hand(machines, *WORKER, each=each) as started:
        outputs = ends(started)
    assert all(code != 0 for code, _, _ in outputs)
    for _, _, err in outputs:
        assert "GLOO_SOCKET_IFNAME=^lo: '^lo' is the way NCCL excludes interfaces" in err
    assert "RendezvousError: rank 1 on " in outputs[0][2]


def test_an_address_that_one_machine_cannot_resolve(machines: TwoMachines) -> None:
    each = ({"DDP_UTILS_TIMEOUT": "5"}, {"MASTER_ADDR": "no-such-host.invalid"})
    with by_hand(machines, *WORKER, each=each) as started:
        outputs = ends(started)
    assert "rank 1 of 2 did not come to 10.77.0.1:29400 within 5 s" in outputs[0][2]
    assert "'no-such-host.invalid' (port 29400), does not resolve" in outputs[1][2]


TRAIN = """
import os, signal, sys
import ddp_utils as ddp
import torch
import torch.distributed as dist

@ddp.distributed_main
def main():
    ddp.barrier()
    if ddp.is_rank_zero():
        print("all are here", flush=True)
    if len(sys.argv) > 1 and ddp.get_rank() == int(sys.argv[1]):
        raise ArithmeticError("this rank's own trouble")
    while True:
        dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A script that trains for ever, or until the rank that is named fails."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.parametrize("rank", ["0", "3"])
def test_the_failure_of_a_rank_ends_both_machines_with_its_cause(
    machines: TwoMachines, train: Path, rank: str
) -> None:
    with by_hand(machines, sys.executable, str(train), rank) as started:
        outputs = ends(started)
    assert all(code != 0 for code, _, _ in outputs)
    for _, _, err in outputs:
        assert "ArithmeticError: this rank's own trouble" in err
        assert f"rank {rank}" in err


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_killed_is_named_by_the_other(
    machines: TwoMachines, train: Path, lost: int
) -> None:
    with by_hand(machines, sys.executable, str(train)) as started:
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "all are here\n"
        os.kill(started[lost].pid, signal.SIGKILL)
        code, _, err = ends(started)[1 - lost]
    assert code != 0
    assert f"machine {lost} is gone" in err


def test_a_machine_that_loses_its_link_is_named_within_the_time_of_tcp(
    machines: TwoMachines, train: Path
) -> None:
    """Nothing is closed and nothing answers any more: the kernel's keep-alive tells."""
    with by_hand(machines, sys.executable, str(train)) as started:
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "all are here\n"
        machines.unplug()
        outputs = ends(started)
    assert all(code != 0 for code, _, _ in outputs)
    assert "machine 1 is gone" in outputs[0][2]
    assert "machine 0 is gone" in outputs[1][2]
