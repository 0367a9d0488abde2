"""Where the ranks of a job meet, agreed without a word."""

from __future__ import annotations

import environments as env
import pytest

from ddp_utils import LauncherError
from ddp_utils.world import addresses
from ddp_utils.world.detection import detect


def unreadable(path: str) -> str:
    raise OSError(path)


def test_tasks_placed_by_a_file_meet_at_the_file_s_first_node() -> None:
    """Recorded: ``srun -m arbitrary`` with task 0 on n2, while the step's list begins with n1."""
    environ = env.srun(0) | {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "hosts"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "2,2"}
    found = detect(environ, {"hosts": "n2\nn2\nn1\nn1\n"}.__getitem__)
    assert found.master_addr == "n2"
    with pytest.raises(LauncherError, match="Set MASTER_ADDR to the node that runs task 0"):
        detect(environ, unreadable)
    with pytest.raises(LauncherError, match="SLURM_HOSTFILE=''"):
        detect(env.without(environ, "SLURM_HOSTFILE"), unreadable)
    assert detect(environ | {"MASTER_ADDR": "n9"}, unreadable).master_addr == "n9"


def test_a_step_without_a_node_list_asks_for_an_address() -> None:
    lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    with pytest.raises(LauncherError, match="SLURM_STEP_NODELIST is missing"):
        detect(env.without(env.srun(), *lists))


def test_a_step_without_a_job_asks_for_a_port() -> None:
    environ = env.without(env.srun(), "SLURM_JOB_ID", "SLURM_JOBID")
    with pytest.raises(LauncherError, match="Set MASTER_PORT"):
        detect(environ)
    assert detect(environ | {"MASTER_PORT": "29400"}).master_port == 29400


@pytest.mark.parametrize("host", ["n1", "10.0.0.1", "::1", "[::1]", "a.b.example", "fe80::1%eth0"])
def test_hosts_are_taken_as_they_are_but_for_brackets(host: str) -> None:
    assert addresses.given({"MASTER_ADDR": host}).host == host.strip("[]")


@pytest.mark.parametrize("host", ["n1:29500", "tcp://n1", "10.0.0.1:29500", "[::1]:29500"])
def test_what_is_no_host_alone_is_an_error(host: str) -> None:
    with pytest.raises(LauncherError, match="the port goes into MASTER_PORT"):
        addresses.given({"MASTER_ADDR": host})


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "1.5", "²"])
def test_what_is_no_port_is_an_error(port: str) -> None:
    with pytest.raises(LauncherError, match="1 to 65535"):
        addresses.given({"MASTER_PORT": port})
