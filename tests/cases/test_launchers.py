"""Public reports about launchers, ranks, devices and rendezvous: one test for each.

What needs a launcher for real is in ``tests/launchers``.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddp_utils import (
    LauncherError,
    RendezvousError,
    World,
    add_local_rank_argument,
    detect_world,
    get_local_rank,
    get_rank,
    init_distributed,
    is_rank_zero,
    process_group,
    shutdown_distributed,
)
from ddp_utils.world import devices, interfaces, slurm
from ddp_utils.world.addresses import given

Environ = dict[str, str]
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}


def refused(environ: Environ) -> str:
    with pytest.raises(LauncherError) as caught:
        detect_world(environ)
    return str(caught.value)


# Arguments and ranks


def test_a01() -> None:
    """A01: XPixelGroup/BasicSR#626, huggingface/pytorch-image-models#1724: ``unrecognized
    arguments: --local-rank=0``, from a launcher whose spelling changed."""
    parser = argparse.ArgumentParser()
    add_local_rank_argument(parser)
    for flag in ("--local-rank=1", "--local_rank=1"):
        assert parser.parse_args([flag]).local_rank == 1


def test_a03() -> None:
    """A03: Lightning-AI/pytorch-lightning#11406: SLURM_PROCID=0 of the one task shadowed the
    ranks of the processes that were spawned inside it."""
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    world = detect_world({**task, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", **TORCHRUN})
    assert (world.rank, world.launcher) == (1, "torchrun")
    ours = detect_world({**STEP, **TORCHRUN, "DDP_UTILS_STARTED_RANK": "1"})
    assert (ours.rank, ours.launcher) == (1, "spawn")


def test_a04() -> None:
    """A04: pytorch/examples#885, Lightning-AI/pytorch-lightning#3791: ``invalid device ordinal``
    with CUDA_VISIBLE_DEVICES=4,5,6,7, whose numbers were taken for indices."""
    chosen = [devices.choose_device(i, 4, device_type="cuda", visible=4).index for i in range(4)]
    assert chosen == [0, 1, 2, 3]


def test_a05() -> None:
    """A05: open-mmlab/mmdetection3d#1020: CUDA_VISIBLE_DEVICES set in the script, too late."""
    late = devices.shown_too_late(8, {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert late is not None
    assert "too late" in late
    assert "devices=" in late
    assert devices.shown_too_late(2, {"CUDA_VISIBLE_DEVICES": "4,5"}) is None
    assert devices.shown_too_late(8, {}) is None


# Slurm


@pytest.mark.parametrize(
    ("hosts", "first", "count"),
    [
        ("linux[1,2]", "linux1", 2),
        ("alpha,beta,gamma", "alpha", 3),
        (
            "gpu-compute-on-demand-dy-g4dnxlarge-[1-4]",
            "gpu-compute-on-demand-dy-g4dnxlarge-1",
            4,
        ),
        ("jean-zay-ia810", "jean-zay-ia810", 1),
        ("c1009a-s17,c1010a-s11", "c1009a-s17", 2),
        ("host[001,003-004,006]", "host001", 4),
    ],
)
def test_s01_s02_s03_s06(hosts: str, first: str, count: int) -> None:
    """S01, S02, S03, S06: Lightning-AI/pytorch-lightning#14896, #5160, #1943, pytorch/ignite#2203,
    soravux/scoop#30: node lists cut at the wrong comma or dash, padding lost."""
    assert slurm.first_host(hosts) == first
    assert len(slurm.expand_hosts(hosts)) == count
    assert detect_world({**STEP, "SLURM_STEP_NODELIST": hosts}).master_addr == first


def test_s05() -> None:
    """S05: sehoffmann/dmlcloud#39: ``invalid literal for int(): '1(x2)'``."""
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7"}
    last = {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    world = detect_world({**STEP, **uneven, **last})
    assert (world.local_world_size, world.num_nodes) == (1, 4)


def test_s07() -> None:
    """S07: Benzoin96485/Enerzyme#107: ranks waited for that the smaller step never had."""
    job = {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NODELIST": "m[1-2]"}
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    rank = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    world = detect_world({**STEP, **job, **step, **rank})
    assert (world.world_size, world.local_world_size, world.master_addr) == (2, 1, "n1")


def test_s08() -> None:
    """S08: EleutherAI/gpt-neox#1069, tunib-ai/oslo#150: KeyError SLURM_NTASKS, which is absent
    where only ``--ntasks-per-node`` was given."""
    kept = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    environ = {name: STEP[name] for name in (*kept, "SLURM_STEP_NODELIST")}
    world = detect_world({**environ, "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"})
    assert (world.world_size, world.local_world_size, world.num_nodes) == (8, 4, 2)


def test_s10() -> None:
    """S10: jax-ml/jax#30073, Lightning-AI/pytorch-lightning#18614: a shell from salloc, ssh or
    ``srun --pty`` was taken for a rank, and waited for others."""
    ssh = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    pty = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    pty |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    for environ in (ssh, pty):
        assert detect_world(environ).launcher == "none"
    # and a real step inside salloc, whose job is called interactive too, is one
    assert detect_world({**STEP, "SLURM_JOB_NAME": "interactive"}).launcher == "slurm"
    assert detect_world({**STEP, "DDP_UTILS_LAUNCHER": "none"}).launcher == "none"


def test_s11_s12() -> None:
    """S11, S12: ACEsuit/mace#435, Lightning-AI/pytorch-lightning#13605: ``invalid device ordinal``
    where each task sees one device, or a subset. (Two tasks with one device: test_rendezvous.)"""
    one = [
        devices.choose_device(i, 4, device_type="cuda", visible=1, bound=True).index
        for i in range(4)
    ]
    pairs = [
        devices.choose_device(i, 4, device_type="cuda", visible=2, bound=True).index
        for i in range(4)
    ]
    assert (one, pairs) == ([0, 0, 0, 0], [0, 1, 0, 1])


def test_s13() -> None:
    """S13: Lightning-AI/pytorch-lightning#7027: all tasks had LOCAL_RANK 0."""
    assert detect_world(STEP).local_rank == 1


def test_s14() -> None:
    """S14: pytorch/ignite#2202, #2048: RANK and the like beside SLURM variables. Agreement is
    accepted, contradiction told, and torchrun inside srun wins."""
    hook = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1"}
    assert detect_world({**STEP, **hook, "MASTER_PORT": "29500"}).rank == 3
    assert detect_world({**STEP, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}).rank == 1
    text = refused({**STEP, **TORCHRUN})
    assert "RANK=1" in text
    assert "SLURM_PROCID=3" in text


def test_s15() -> None:
    """S15: Lightning-AI/pytorch-lightning#2479, #2578: steps on one node that collide, and a
    user's MASTER_PORT that was overwritten."""
    ports = {detect_world({**STEP, "SLURM_STEP_ID": str(i)}).master_port for i in range(20)}
    assert len(ports) == 20
    other = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert detect_world({**STEP, **other}).master_port == detect_world(STEP).master_port
    assert detect_world({**STEP, "MASTER_PORT": "29501"}).master_port == 29501
    assert detect_world({**STEP, "MASTER_ADDR": "ib0"}).master_addr == "ib0"


def test_s16(tmp_path: Path) -> None:
    """S16: Lightning-AI/pytorch-lightning#17228: with a hostfile the first host of the list is
    not the one that runs rank 0."""
    hosts = tmp_path / "hosts"
    hosts.write_text("n2\nn2\nn1\nn1\n")
    placed = {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(hosts)}
    assert detect_world({**STEP, **placed}).master_addr == "n2"


def test_s17() -> None:
    """S17: NVIDIA-NeMo/Skills#336: a heterogeneous job, whose components each count from 0."""
    text = refused({**STEP, "SLURM_HET_SIZE": "2"})
    assert "heterogeneous" in text
    assert "Set RANK, WORLD_SIZE" in text


def test_s18() -> None:
    """S18: Lightning-AI/pytorch-lightning#102, #20391: one task was started for several GPUs."""
    told = devices.idle_devices("slurm", 1, 4)
    assert told is not None
    assert "4 devices visible" in told
    assert "--ntasks-per-node=4" in told
    assert devices.idle_devices("slurm", 4, 1) is None  # --gpus-per-task=1


# MPI


def test_m02() -> None:
    """M02: LambdaLabsML/distributed-training-guide#59: the global rank used as the device."""
    world = detect_world(MPIRUN)
    assert (world.rank, world.local_rank, world.node_rank) == (5, 1, 1)
    assert "missing OMPI_COMM_WORLD_LOCAL_RANK" in refused(
        {name: MPIRUN[name] for name in MPIRUN if "LOCAL_RANK" not in name}
    )


def test_m03(monkeypatch: pytest.MonkeyPatch) -> None:
    """M03: NVIDIA-NeMo/Speech#8429: both processes of mpirun said that they were rank 0."""
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert (get_rank(), is_rank_zero(), get_local_rank()) == (5, False, 1)


def test_m04() -> None:
    """M04: oumi-ai/oumi#2010: PMI_RANK taken for a node's rank; srun sets PMI variables too."""
    pmi2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "7.0"}
    assert detect_world({**STEP, **pmi2}).launcher == "slurm"
    assert "missing PMI_SIZE" in refused({"PMI_RANK": "3", "MPI_LOCALRANKID": "1"})
    assert detect_world({"PMIX_RANK": "0"}).launcher == "none"  # of srun --mpi=pmix, one task


def test_m05() -> None:
    """M05: pytorch/pytorch#97507: backend="mpi" is not what mpirun needs, and torch's wheels do
    not have it."""
    with pytest.raises(ValueError, match=r"has no 'mpi'.*It has: .*gloo"):
        init_distributed("mpi")


# Rendezvous


@pytest.mark.parametrize(
    "environ",
    [{"WORLD_SIZE": "2"}, {"RANK": "0"}, {**TORCHRUN, "RANK": "5"}, {**TORCHRUN, "RANK": "2"}],
)
def test_r04(environ: Environ) -> None:
    """R04: mit-han-lab/distrifuser#11, pytorch/pytorch#11782: half a launcher's environment,
    or one RANK too many, and a hang. (RANK=0 on every machine: test_rendezvous.)"""
    text = refused(environ)
    assert all(f"{name}={environ[name]}" in text for name in environ if name.endswith(("K", "E")))


def test_r05(monkeypatch: pytest.MonkeyPatch) -> None:
    """R05: aws-samples/aws-do-eks#69: ``connectFullMesh failed ... remote=[127.0.0.1]``, as a
    machine's own name stands for loopback on it. What counts is the address by which the other
    machines reach rank zero. (For real: tests/launchers.)"""
    known = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: known)
    monkeypatch.setattr(interfaces, "source_address", lambda host, port: host)
    world = World(world_size=2, num_nodes=2, master_addr="127.0.1.1", master_port=29400)
    assert process_group._interface(world, "10.0.0.1") == "eth0"
    assert process_group._interface(world, None) == "lo"


@pytest.mark.parametrize("value", ["^lo", "127.0.0.1", "nosuch"])
def test_r06(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R06: aws-samples/aws-do-eks#51: ``Unable to find address for: ^lo``."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    with pytest.raises(RendezvousError) as caught:
        process_group._check_interface()
    assert str(caught.value).startswith(f"GLOO_SOCKET_IFNAME={value}: ")


def test_r07(script: Any) -> None:
    """R07: pytorch/pytorch#121807, #74316: ``IPv6 network addresses ... cannot be retrieved``:
    on one machine the ranks meet at 127.0.0.1, and stderr is clean."""
    done = script("""
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            ddp_utils.barrier()
            print(ddp_utils.current_world().master_addr)

        if __name__ == "__main__":
            main()
        """).run(DDP_UTILS_OUTPUT="all")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["127.0.0.1"] * 2


def test_r08() -> None:
    """R08: agentscope-ai/Trinity-RFT#24: ``tcp://fe80::1:29500`` cannot be parsed. An address is
    passed as it is, without any URL. (A store at ::1: test_rendezvous.)"""
    assert given({"MASTER_ADDR": "fe80::1", "MASTER_PORT": "29500"}).host == "fe80::1"


def test_r09() -> None:
    """R09: pytorch/pytorch#137402: under torchrun rank 0 need not be on MASTER_ADDR, which is
    the agent's business and is never rewritten."""
    environ = {**STEP, **TORCHRUN, "RANK": "0", "MASTER_ADDR": "other", "TORCHELASTIC_RUN_ID": "x"}
    environ["LOCAL_RANK"] = "0"
    world = detect_world(environ)
    assert (world.rank, world.master_addr) == (0, "other")


def test_r12() -> None:
    """R12: pytorch/pytorch#43536: ``trying to initialize the default process group twice!``."""
    for _ in range(2):
        assert init_distributed() == init_distributed()
        shutdown_distributed()
        shutdown_distributed()
    assert not dist.is_initialized()


def test_r12_a_group_of_somebody_else_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert init_distributed().world_size == 1
        shutdown_distributed()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_r13(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: pytorch/pytorch#80638, #77523: a misspelt MASTER_ADDR was waited for for 30 minutes."""
    for name, value in {**TORCHRUN, "MASTER_ADDR": "no-such-host-x.invalid"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError) as caught:
        init_distributed()
    for text in ("rank 1 on ", socket.gethostname(), "'no-such-host-x.invalid'", "29400"):
        assert text in str(caught.value)


def test_l24() -> None:
    """L24: pytorch/pytorch#50277: ``no module named 'src'`` where ``-m`` was forgotten: the table
    of commands is in the documentation, and runs in tests/launchers."""
    text = (Path(__file__).parents[2] / "docs/launchers.md").read_text()
    for command in ("torchrun --nproc-per-node 8 -m package.train", "python -m package.train"):
        assert command in text
