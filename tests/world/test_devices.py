"""Which device a rank uses, as a table: no accelerator is needed to know."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ddp_utils import LauncherError
from ddp_utils.world import devices

# local rank, local world size, visible devices, bound, oversubscribe -> index
TABLE = [
    (0, 1, 1, False, False, 0),
    (0, 4, 4, False, False, 0),
    (3, 4, 4, False, False, 3),
    (1, 2, 2, False, False, 1),  # CUDA_VISIBLE_DEVICES=4,5: the index counts what is visible
    (1, 2, 8, False, False, 1),  # fewer ranks than devices
    (3, 4, 1, True, False, 0),  # --gpus-per-task=1: each task sees one, and that is its own
    (2, 4, 2, True, False, 0),  # --gpu-bind=closest: two each, shared by two
    (3, 4, 2, True, False, 1),
    (1, 2, 2, True, False, 1),
    (3, 4, 2, False, True, 1),  # DDP_UTILS_OVERSUBSCRIBE=1
    (5, 8, 1, False, True, 0),
]


@pytest.mark.parametrize(("rank", "size", "visible", "bound", "oversubscribe", "index"), TABLE)
def test_table(
    rank: int, size: int, visible: int, bound: bool, oversubscribe: bool, index: int
) -> None:
    chosen = devices.choose_device(
        rank, size, device_type="cuda", visible=visible, bound=bound, oversubscribe=oversubscribe
    )
    assert chosen == torch.device("cuda", index)


@pytest.mark.parametrize("local_rank", range(4))
def test_more_ranks_than_devices_is_an_error_of_every_rank_with_the_switch(local_rank: int) -> None:
    """All raise it: were local rank 0 content, it would wait for the others."""
    with pytest.raises(LauncherError) as caught:
        devices.choose_device(local_rank, 4, device_type="cuda", visible=2)
    for text in ("4 ranks", "2 visible cuda devices", "DDP_UTILS_OVERSUBSCRIBE=1"):
        assert text in str(caught.value)


def test_without_devices_everybody_is_on_the_cpu() -> None:
    assert devices.choose_device(3, 4, device_type="cpu", visible=0) == torch.device("cpu")
    assert devices.choose_device(3, 4, device_type="cuda", visible=0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("launcher", "local_rank", "environ", "own"),
    [
        ("slurm", 3, {}, True),
        ("mpi", 1, {"CUDA_VISIBLE_DEVICES": "0,1"}, True),
        ("torchrun", 0, {}, False),
        ("torchrun", 1, {"CUDA_VISIBLE_DEVICES": "4,5"}, False),
        ("torchrun", 1, {"CUDA_VISIBLE_DEVICES": "0"}, False),
        ("torchrun", 1, {"CUDA_VISIBLE_DEVICES": "1"}, True),  # a script narrowed it by itself
        ("spawn", 2, {"HIP_VISIBLE_DEVICES": "2"}, True),
    ],
)
def test_who_may_have_devices_of_its_own(
    launcher: str, local_rank: int, environ: dict[str, str], own: bool
) -> None:
    assert devices.has_devices_of_its_own(launcher, local_rank, environ) is own


def test_backends() -> None:
    assert devices.backend_for("cpu") == "gloo"
    assert devices.backend_for("cuda") == "cpu:gloo,cuda:nccl"
    with pytest.raises(ValueError, match="no communication backend"):
        devices.backend_for("meta")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one CUDA device")
@pytest.mark.parametrize(("oversubscribe", "well"), [("0", False), ("1", True)])
def test_two_tasks_on_one_device(oversubscribe: str, well: bool) -> None:
    """Each believes that the device is its own, as under mpirun; the roll call tells them."""
    script = (
        "import ddp_utils, torch, torch.distributed as dist\n"
        "ddp_utils.init_distributed('gloo')\n"
        "t = torch.ones(1, device=ddp_utils.get_device())\n"
        "dist.all_reduce(t)\n"
        "assert t.item() == 2\n"
    )
    tasks = []
    for rank in range(2):
        mine = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        mine |= {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "MASTER_PORT": 29512}
        environ = os.environ | {name: str(value) for name, value in mine.items()}
        environ |= {"DDP_UTILS_OVERSUBSCRIBE": oversubscribe}
        command = [sys.executable, "-c", script]
        tasks.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    said = [task.communicate(timeout=90)[1] for task in tasks]
    assert [task.returncode == 0 for task in tasks] == [well] * 2, said
    assert well or all("same device as rank" in text for text in said)
