"""Which machines a job spans, by hand or in managed clusters."""

from __future__ import annotations

import environments as env
import pytest

from ddp_utils import LauncherError
from ddp_utils.world.machines import Machines, detect_machines, ranks_on_a_machine

BY_HAND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}


def place(machines: Machines) -> tuple[int, int, str | None, int | None]:
    return (machines.num_nodes, machines.node_rank, machines.master_addr, machines.master_port)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (1, 0, None, None)),
        (BY_HAND, (2, 1, "10.0.0.1", 29400)),
        ({"NNODES": "1"}, (1, 0, None, None)),
        ({"NNODES": "1", "NODE_RANK": "0"}, (1, 0, None, None)),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, (1, 0, None, None)),
        (env.sagemaker(), (2, 1, "algo-1", 7777)),
        (env.sagemaker() | {"MASTER_PORT": "29400"}, (2, 1, "algo-1", 29400)),
        (env.sagemaker_by_its_sdk(), (2, 1, "algo-1", 7777)),
        (env.sagemaker_by_its_sdk() | {"SM_HOSTS": '["algo-2","algo-1"]'}, (2, 1, "algo-1", 7777)),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, (1, 0, None, None)),
        (env.modelarts(), (2, 1, "job-worker-0.job", 6060)),
        (env.modelarts(0) | {"MA_NUM_HOSTS": "1"}, (1, 0, None, None)),
        (env.volcano(), (1, 0, None, None)),
        (env.kubeflow(1), (2, 1, "job-master-0", 23456)),
        (env.kubeflow_trainer(1), (2, 1, "job-node-0-0.job", 29400)),
        (env.salloc(), (1, 0, None, None)),
        (BY_HAND | {"DDP_UTILS_LAUNCHER": "none"}, (1, 0, None, None)),
        (BY_HAND | {"DDP_UTILS_LAUNCHER": "spawn"}, (2, 1, "10.0.0.1", 29400)),
    ],
)
def test_table(environ: env.Environ, expected: object) -> None:
    assert place(detect_machines(environ)) == expected


def test_arguments_come_before_the_environment_one_by_one() -> None:
    assert place(detect_machines(BY_HAND, node_rank=0)) == (2, 0, "10.0.0.1", 29400)
    assert place(detect_machines(BY_HAND, nnodes=3, master_port=1)) == (3, 1, "10.0.0.1", 1)
    given = detect_machines({}, nnodes=2, node_rank=0, master_addr="a", master_port=29400)
    assert place(given) == (2, 0, "a", 29400)
    assert place(detect_machines(BY_HAND, nnodes=1, node_rank=0)) == (1, 0, None, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 8),
        ({"DDP_UTILS_NPROC": "3"}, 3),
        (env.kubeflow(1, nproc="2"), 2),
        (env.kubeflow(1, nproc="2") | {"DDP_UTILS_NPROC": "3"}, 3),
        (env.kubeflow(1, nproc="2") | {"DDP_UTILS_LAUNCHER": "none"}, 8),
        (env.kubeflow(1, nproc="auto"), 8),
        (env.kubeflow_trainer(1), 4),
        ({"PET_NPROC_PER_NODE": "2"}, 8),
    ],
)
def test_ranks_on_a_machine(environ: env.Environ, expected: int) -> None:
    assert ranks_on_a_machine(environ, accelerators=8) == expected


def test_without_accelerators_a_machine_gets_one_rank() -> None:
    assert ranks_on_a_machine({}, accelerators=0) == 1


@pytest.mark.parametrize("name", BY_HAND)
def test_each_missing_piece_is_named(name: str) -> None:
    with pytest.raises(LauncherError) as caught:
        detect_machines(env.without(BY_HAND, name) or {"NODE_RANK": "1"})
    assert f"missing {name}" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "arguments", "text"),
    [
        ({}, {"nnodes": 2}, "missing NODE_RANK, MASTER_ADDR, MASTER_PORT"),
        ({}, {"node_rank": 1}, "missing NNODES"),
        (BY_HAND | {"NODE_RANK": "2"}, {}, "machine 2 of 2"),
        (BY_HAND | {"NODE_RANK": "-1"}, {}, "machine -1 of 2"),
        (BY_HAND | {"NNODES": "0", "NODE_RANK": "0"}, {}, "machine 0 of 0"),
        ({"NNODES": "1", "NODE_RANK": "1"}, {}, "missing MASTER_ADDR"),
        (BY_HAND | {"MASTER_PORT": "http"}, {}, "MASTER_PORT='http' is not a port"),
        (env.sagemaker() | {"SM_CURRENT_HOST": "algo-9"}, {}, "missing SM_CURRENT_HOST"),
        (env.sagemaker() | {"SM_HOSTS": "algo-1"}, {}, "SM_HOSTS='algo-1' cannot be read"),
        (BY_HAND | {"NNODES": "1:4"}, {}, "start with torchrun"),
        (env.kubeflow_elastic(), {}, "start with torchrun"),
        (env.without(env.modelarts(), "VC_TASK_INDEX"), {}, "missing VC_TASK_INDEX"),
    ],
)
def test_errors(environ: env.Environ, arguments: dict[str, int], text: str) -> None:
    with pytest.raises(LauncherError) as caught:
        detect_machines(environ, **arguments)  # type: ignore[arg-type]
    assert text in str(caught.value)
