"""Who a process is, from the environments of real launches."""

from __future__ import annotations

import environments as env
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_utils import LauncherError, World, detect_world
from ddp_utils.world.detection import detect


def facts(world: World) -> tuple[int, ...]:
    return (
        world.rank,
        world.world_size,
        world.local_rank,
        world.local_world_size,
        world.node_rank,
        world.num_nodes,
    )


ALONE = (0, 1, 0, 1, 0, 1)
SECOND_OF_TWO_MACHINES = (1, 2, 0, 1, 1, 2)
LAUNCHES = {
    "nothing": ({}, "none", ALONE),
    "torchrun": (env.torchrun(3), "torchrun", (3, 4, 1, 2, 1, 2)),
    "torchrun, one node": (env.torchrun(1, nodes=1), "torchrun", (1, 2, 1, 2, 0, 1)),
    "torchrun, one rank": (env.torchrun(0, nodes=1, each=1), "torchrun", ALONE),
    "legacy launch, which sets the same": (env.torchrun(2), "torchrun", (2, 4, 0, 2, 1, 2)),
    "srun": (env.srun(3), "slurm", (3, 4, 1, 2, 1, 2)),
    "srun, first": (env.srun(0), "slurm", (0, 4, 0, 2, 0, 2)),
    "srun in salloc": (env.srun_in_salloc(2), "slurm", (2, 4, 0, 2, 1, 2)),
    "salloc": (env.salloc(), "none", ALONE),
    "batch script": (env.batch_script(), "none", ALONE),
    "pty": (env.pty_shell(), "none", ALONE),
    "torchrun in srun": (env.srun(3) | env.torchrun(1), "torchrun", (1, 4, 1, 2, 0, 2)),
    "torchrun in a task whose variables are only half there": (
        env.without(env.srun(3), "SLURM_STEP_ID", "SLURM_STEPID") | env.torchrun(1),
        "torchrun",
        (1, 4, 1, 2, 0, 2),
    ),
    "a heterogeneous job whose ranks are told by hand": (
        env.srun(1)
        | {"SLURM_HET_SIZE": "2", "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1"}
        | {"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        "torchrun",
        (5, 7, 1, 3, 1, 3),
    ),
    "torchrun in a heterogeneous job": (
        env.srun(3) | {"SLURM_HET_SIZE": "2"} | env.torchrun(1),
        "torchrun",
        (1, 4, 1, 2, 0, 2),
    ),
    "torchrun in a batch script": (
        env.batch_script() | env.torchrun(3),
        "torchrun",
        (3, 4, 1, 2, 1, 2),
    ),
    "mpirun": (env.mpirun(1), "mpi", (1, 2, 1, 2, 0, 1)),
    "mpirun in a batch script": (env.batch_script() | env.mpirun(1), "mpi", (1, 2, 1, 2, 0, 1)),
    "mpirun in salloc": (env.mpirun_in_salloc(3), "mpi", (3, 4, 1, 2, 1, 2)),
    "hydra": (env.hydra(1), "mpi", (1, 2, 1, 2, 0, 1)),
    "Intel MPI": (env.intel_mpi(3), "mpi", (3, 4, 1, 2, 1, 2)),
    "PALS": (env.pals(5), "mpi", (5, 6, 1, 2, 2, 3)),
    "PALS with PMIx, told the size": (
        env.pals_with_pmix(5) | {"PMI_SIZE": "6"},
        "mpi",
        (5, 6, 1, 2, 2, 3),
    ),
    "srun on a Cray": (env.srun_on_cray(3), "slurm", (3, 4, 1, 2, 1, 2)),
    "torchrun in srun on a Cray": (
        env.srun_on_cray(3) | env.torchrun(1),
        "torchrun",
        (1, 4, 1, 2, 0, 2),
    ),
    "Kubeflow, before PET_ variables": (
        env.kubeflow_of_old(1),
        "torchrun",
        SECOND_OF_TWO_MACHINES,
    ),
    "Kubeflow": (env.kubeflow(1), "none", SECOND_OF_TWO_MACHINES),
    "Kubeflow with nprocPerNode": (env.kubeflow(1, nproc="4"), "none", SECOND_OF_TWO_MACHINES),
    "Kubeflow, one pod": (
        env.kubeflow(0, nproc="4") | {"PET_NNODES": "1", "WORLD_SIZE": "4"},
        "none",
        ALONE,
    ),
    "torchrun in a Kubeflow pod": (
        env.kubeflow(1, nproc="2") | env.torchrun(3),
        "torchrun",
        (3, 4, 1, 2, 1, 2),
    ),
    "torchrun in an elastic Kubeflow pod": (
        env.kubeflow_elastic() | env.torchrun(3),
        "torchrun",
        (3, 4, 1, 2, 1, 2),
    ),
    "Kubeflow's Trainer": (env.kubeflow_trainer(1), "none", SECOND_OF_TWO_MACHINES),
    "SageMaker": (env.sagemaker(), "none", SECOND_OF_TWO_MACHINES),
    "SageMaker by its SDK": (env.sagemaker_by_its_sdk(), "none", SECOND_OF_TWO_MACHINES),
    "SageMaker's torchrun": (env.sagemaker_torchrun(3), "torchrun", (3, 4, 1, 2, 1, 2)),
    "SageMaker's mpirun": (env.sagemaker_mpirun(3), "mpi", (3, 4, 1, 2, 1, 2)),
    "ModelArts": (env.modelarts(), "none", SECOND_OF_TWO_MACHINES),
    "Volcano": (env.volcano(), "none", ALONE),
    "Ray Train": (env.ray_train(3), "torchrun", (3, 4, 1, 2, 1, 2)),
    "Ray Train, most of it on the last node": (
        env.ray_train_uneven(5),
        "torchrun",
        (5, 6, 3, 4, 2, 3),
    ),
    "ssh": (env.ssh_shell(), "none", ALONE),
    "by hand, each rank": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        "torchrun",
        (1, 2, 1, 2, 0, 1),
    ),
    "srun with --mpi=pmi2": (
        env.srun(3) | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "7.0"},
        "slurm",
        (3, 4, 1, 2, 1, 2),
    ),
    "pty with --mpi=pmi2": (env.pty_shell() | {"PMI_RANK": "0", "PMI_SIZE": "1"}, "none", ALONE),
    "interactive step of salloc": (
        env.pty_shell() | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"},
        "none",
        ALONE,
    ),
    "srun, then RANK and the like from it (enroot's hook)": (
        env.srun(3)
        | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
        | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        "slurm",
        (3, 4, 1, 2, 1, 2),
    ),
    "another launcher in each task of srun": (
        env.srun(1) | env.without(env.torchrun(5, each=4), "TORCHELASTIC_RUN_ID"),
        "torchrun",
        (5, 8, 1, 4, 1, 2),
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(name: str) -> None:
    environ, launcher, expected = LAUNCHES[name]
    world = detect_world(environ)
    assert (world.launcher, facts(world)) == (launcher, expected)


_ONE_TASK = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}
ERRORS = {
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "missing RANK", "MASTER_ADDR"]),
    "RANK alone": ({"RANK": "1"}, ["RANK=1", "missing WORLD_SIZE"]),
    "LOCAL_RANK alone": ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "missing RANK, WORLD_SIZE"]),
    "no address": ({"RANK": "1", "WORLD_SIZE": "2"}, ["missing MASTER_ADDR, MASTER_PORT"]),
    "no port": (env.without(env.torchrun(), "MASTER_PORT"), ["missing MASTER_PORT"]),
    "rank outside": (env.torchrun() | {"RANK": "5"}, ["rank 5 of 4", "RANK=5", "WORLD_SIZE=4"]),
    "negative rank": (env.torchrun() | {"RANK": "-1"}, ["rank -1 of 4"]),
    "local rank outside": (env.torchrun() | {"LOCAL_RANK": "2"}, ["local rank 2 of 2"]),
    "no hosts": ({"SM_HOSTS": "[]", "SM_CURRENT_HOST": "a"}, ["SM_HOSTS='[]'"]),
    "task 1 of 1": (
        {**_ONE_TASK, "SLURM_PROCID": "1"},
        ["rank 1 of 1", "SLURM_PROCID=1"],
    ),
    "task 1 of 1 in one of two components": (
        {**_ONE_TASK, "SLURM_PROCID": "1", "SLURM_HET_SIZE": "2"},
        ["heterogeneous", "SLURM_HET_SIZE=2"],
    ),
    "no number": (env.torchrun() | {"RANK": "one"}, ["RANK='one' is not a whole number"]),
    "no port number": (env.torchrun() | {"MASTER_PORT": "70000"}, ["MASTER_PORT='70000'"]),
    "address with a port": (env.torchrun() | {"MASTER_ADDR": "n1:29500"}, ["MASTER_PORT"]),
    "address with a scheme": (env.torchrun() | {"MASTER_ADDR": "tcp://n1"}, ["not a host"]),
    "stale RANK under srun": (
        env.srun(3) | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        ["contradict", "RANK=0", "SLURM_PROCID=3", "DDP_UTILS_LAUNCHER=slurm"],
    ),
    "stale WORLD_SIZE under srun": (
        env.srun(3) | {"WORLD_SIZE": "8"},
        ["contradict", "WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"],
    ),
    "stale LOCAL_RANK under mpirun": (
        env.mpirun(1) | {"LOCAL_RANK": "0"},
        ["contradict", "LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_RANK=1"],
    ),
    "MPI inside an unrelated step": (
        env.srun(3) | env.mpirun(1),
        ["contradict", "OMPI_COMM_WORLD_RANK=1", "SLURM_PROCID=3"],
    ),
    "a task without its step": (
        env.without(env.srun(3), "SLURM_STEP_ID", "SLURM_STEPID"),
        ["srun only in half", "missing SLURM_STEP_ID"],
    ),
    "a task without local rank": (
        env.without(env.srun(3), "SLURM_LOCALID"),
        ["SLURM_PROCID=3", "missing SLURM_LOCALID"],
    ),
    "heterogeneous job": (
        env.srun(3) | {"SLURM_HET_SIZE": "2"},
        ["heterogeneous", "SLURM_HET_SIZE=2", "RANK, WORLD_SIZE"],
    ),
    "half of Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "0"},
        ["OMPI_COMM_WORLD_RANK=0", "missing OMPI_COMM_WORLD_SIZE"],
    ),
    "PMI without a local rank": (
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        ["PMI_RANK=0", "missing MPI_LOCALRANKID"],
    ),
    "PALS with PMIx": (
        env.pals_with_pmix(5),
        ["PALS_RANKID=5", "PALS_LOCAL_RANKID=1", "missing PMI_SIZE"],
    ),
    "Flux on a Cray": (env.flux_on_cray(1), ["PALS_RANKID=1", "missing PMI_SIZE, MPI_LOCALRANKID"]),
    "SageMaker's mpirun on some of its hosts": (
        env.sagemaker_mpirun(3) | {"SM_HOSTS": '["algo-1","algo-2","algo-3"]'},
        ["several machines", "Set MASTER_ADDR"],
    ),
    "an elastic Kubeflow job": (
        env.kubeflow_elastic(),
        ["PET_NNODES='1:3' cannot be read", "start with torchrun"],
    ),
    "an elastic Kubeflow job with a master": (
        env.kubeflow_elastic() | env.without(env.kubeflow(1), "PET_NNODES"),
        ["PET_NNODES='1:3' cannot be read", "start with torchrun"],
    ),
    "PMI without a size": ({"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, ["missing PMI_SIZE"]),
    "mpirun on two machines": (
        env.mpirun(3, size=4),
        ["several machines", "Set MASTER_ADDR"],
    ),
    "NNODES without the others": (
        {"NNODES": "2", "NODE_RANK": "0"},
        ["NNODES=2", "missing MASTER_ADDR, MASTER_PORT"],
    ),
    "NODE_RANK alone": ({"NODE_RANK": "1"}, ["NODE_RANK=1", "missing NNODES"]),
    "machine outside": (
        {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29400"},
        ["machine 2 of 2"],
    ),
    "an elastic range": (
        {"NNODES": "1:4", "NODE_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29400"},
        ["NNODES='1:4'", "torchrun"],
    ),
    "forced, and there in half by the second of its names": (
        env.pals_with_pmix(5) | {"DDP_UTILS_LAUNCHER": "mpi"},
        ["PALS_RANKID=5", "missing PMI_SIZE"],
    ),
    "forced, but not there": ({"DDP_UTILS_LAUNCHER": "slurm"}, ["missing SLURM_PROCID"]),
    "a started rank without its variables": ({"DDP_UTILS_STARTED_RANK": "1"}, ["missing RANK"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_list_what_was_found_and_what_is_missing(name: str) -> None:
    environ, texts = ERRORS[name]
    with pytest.raises(LauncherError) as caught:
        detect_world(environ)
    for text in texts:
        assert text in str(caught.value)


def test_where_the_ranks_meet() -> None:
    def meeting(environ: env.Environ) -> tuple[str | None, int | None]:
        world = detect_world(environ)
        return world.master_addr, world.master_port

    srun = env.srun()
    one_node = srun | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "0"}
    one_node |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1"}
    assert meeting(srun) == ("n1", 10131)
    assert meeting(srun | {"MASTER_ADDR": "ib1"}) == ("ib1", 10131)
    assert meeting(srun | {"MASTER_PORT": "29500"}) == ("n1", 29500)
    assert meeting(one_node) == ("127.0.0.1", 10131)
    assert meeting(env.mpirun())[0] == "127.0.0.1"
    assert meeting(env.hydra()) == ("127.0.0.1", 29500)
    assert meeting(env.mpirun(3, size=4) | {"MASTER_ADDR": "a"})[0] == "a"
    assert meeting(env.sagemaker()) == ("algo-1", 7777)
    assert meeting(env.modelarts()) == ("job-worker-0.job", 6060)
    assert meeting(env.kubeflow()) == ("job-master-0", 23456)
    assert meeting(env.kubeflow_of_old()) == ("job-master-0", 23456)
    assert meeting(env.kubeflow_trainer()) == ("job-node-0-0.job", 29400)
    assert meeting(env.sagemaker_by_its_sdk()) == ("algo-1", 7777)
    assert {meeting(env.sagemaker_mpirun(rank)) for rank in range(4)} == {("algo-1", 7777)}
    assert meeting(env.torchrun() | {"MASTER_ADDR": "[fe80::1]"}) == ("fe80::1", 40385)


def test_one_port_for_all_ranks_of_a_job_and_another_for_the_next() -> None:
    def port(environ: env.Environ) -> int | None:
        return detect_world(environ).master_port

    assert len({port(env.srun(rank)) for rank in range(4)}) == 1
    assert port(env.srun()) != port(env.srun() | {"SLURM_STEP_ID": "1"})
    assert port(env.mpirun(0)) == port(env.mpirun(1))
    assert port(env.mpirun()) != port(env.mpirun() | {"OMPI_MCA_ess_base_jobid": "1909784578"})


def test_evidence_tells_what_decided_and_why_the_rest_did_not() -> None:
    found = detect(env.srun(3) | env.torchrun(1) | env.mpirun_in_salloc(1))
    assert found.launcher == "torchrun"
    assert found.decided["RANK"] == "1"
    why = {each.name: each.why for each in found.ignored}
    assert "inside it" in why["SLURM_JOB_ID"]
    assert "SLURM_PROCID" in why
    assert "OMPI_COMM_WORLD_RANK" in why
    assert not why.keys() & found.decided.keys()

    why = {each.name: each.why for each in detect(env.batch_script()).ignored}
    assert why["SLURM_PROCID"] == "a batch script, not a task of srun"
    why = {each.name: each.why for each in detect(env.mpirun_in_salloc()).ignored}
    assert "daemons" in why["SLURM_PROCID"]
    assert detect(env.sagemaker_mpirun(3)).decided["SM_HOSTS"] == '["algo-1","algo-2"]'
    why = {each.name: each.why for each in detect(env.kubeflow()).ignored}
    assert why["RANK"] == why["WORLD_SIZE"] == "the pod's, where PET_ variables count machines"
    lines = detect_world(env.kubeflow_of_old()).evidence
    assert "RANK=1" in lines
    assert "assumed: one rank a machine: there is no LOCAL_RANK" in lines


@pytest.mark.parametrize(
    ("forced", "expected"),
    [
        ("none", ALONE),
        ("spawn", ALONE),
        ("torchrun", (1, 4, 1, 2, 0, 2)),
        ("slurm", (3, 4, 1, 2, 1, 2)),
    ],
)
def test_a_forced_launcher_is_believed(forced: str, expected: tuple[int, ...]) -> None:
    environ = env.srun(3) | env.without(env.torchrun(1), "TORCHELASTIC_RUN_ID")
    world = detect_world(environ | {"DDP_UTILS_LAUNCHER": forced})
    assert facts(world) == expected
    assert world.evidence[0] == f"DDP_UTILS_LAUNCHER={forced}"


def test_a_rank_that_this_package_started_knows_itself_under_any_launcher() -> None:
    environ = env.srun(3) | env.torchrun(1) | {"DDP_UTILS_STARTED_RANK": "1"}
    world = detect_world(environ | {"DDP_UTILS_LAUNCHER": "slurm"})
    assert (world.launcher, world.rank) == ("spawn", 1)


def test_empty_variables_are_no_variables() -> None:
    assert detect_world({"RANK": "", "WORLD_SIZE": "", "SLURM_PROCID": "", "NNODES": ""}) == World()


def test_ranks_of_mpi_are_taken_to_fill_one_machine_after_the_other() -> None:
    for rank in range(6):
        world = detect_world(env.mpirun(rank, size=6) | {"MASTER_ADDR": "n1"})
        assert (world.node_rank, world.num_nodes) == (rank // 2, 3)
        assert any("one machine after the other" in line for line in world.evidence)


SOME = st.sampled_from(
    [
        env.torchrun(3),
        env.srun(3),
        env.mpirun(1),
        env.hydra(1),
        env.batch_script(),
        env.kubeflow(),
        env.pals(),
        env.sagemaker_mpirun(),
        env.ray_train(),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.data(), SOME, SOME)
def test_any_part_of_any_environments_is_a_world_or_a_launcher_error(
    data: st.DataObject, one: env.Environ, other: env.Environ
) -> None:
    both = one | other
    names = data.draw(st.sets(st.sampled_from(sorted(both))))
    garbage = data.draw(st.sampled_from(["", "0", "7", "x", "-1", "2(x2)", "n[1-2"]))
    environ = {name: both[name] for name in names}
    if environ and data.draw(st.booleans()):
        environ[data.draw(st.sampled_from(sorted(environ)))] = garbage
    try:
        world = detect_world(environ)
    except LauncherError:
        return
    assert 0 <= world.rank < world.world_size
    assert 0 <= world.local_rank < world.local_world_size <= world.world_size
    assert 0 <= world.node_rank < world.num_nodes
    if world.world_size > 1:
        assert world.master_addr
        assert world.master_port
