"""Public reports about checkpoints: rows K05 to K10, D18 and Y09 of the list of cases.

Each test's docstring begins with its row and names where it was reported.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it, which takes seconds; forked ranks have it from here
from torch import nn

from ddp_utils import (
    RankFailedError,
    all_gather,
    broadcast,
    get_rank,
    load_checkpoint,
    save_checkpoint,
    wrap_ddp,
)
from ddp_utils.models import checkpoint, reading
from ddp_utils.process_group import shared_store
from ddp_utils.testing import run_distributed


def meet(name: str) -> None:
    shared_store().set(f"{name} {get_rank()}", "")
    shared_store().wait([f"{name} {rank}" for rank in range(2)])


def writes_and_dies(path: str) -> None:
    real = torch.save

    def half(value: Any, file: Any) -> None:
        real(value, file)
        if not isinstance(file, io.BytesIO) and value["epoch"] == 2:
            file.flush()
            os.ftruncate(file.fileno(), 2000)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.torch.save = half  # type: ignore[attr-defined]
    for epoch in range(3):
        save_checkpoint(path, epoch=epoch, weight=torch.full((1000,), epoch))


def test_k06_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    """K06. kakaobrain/scrl#5, NVIDIA/apex#886, StrongResearch/isc-demos#3: a corrupt file."""
    path = tmp_path / "last.pt"
    with pytest.raises(RankFailedError) as caught:
        run_distributed(writes_and_dies, str(path))
    assert caught.value.failures[0].signal == "SIGKILL"
    rest = load_checkpoint(path)
    assert rest["epoch"] == 1
    assert bool((rest["weight"] == 1).all())
    save_checkpoint(path, epoch=3)
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.distributed(world_size=2)
def test_k06_one_rank_writes(tmp_path: Path) -> None:
    """K06. kakaobrain/scrl#5, NVIDIA/apex#886: all ranks wrote one path, one over the other."""
    # The file is the same one after each rank's call: one writer makes one file.
    path = tmp_path / "last.pt"
    save_checkpoint(path, epoch=0)
    before = os.stat(path).st_ino
    meet("looked")
    seen = all_gather((before, os.stat(path).st_ino))
    assert len({inode for pair in seen for inode in pair}) == 1


@pytest.mark.distributed(world_size=2)
def test_k07_who_reads_right_after_a_save_reads_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K07. allenai/OLMo#234, pytorch/pytorch#84881: others loaded before rank 0 had finished."""
    if get_rank() == 0:
        real = torch.save

        def slow(value: Any, file: Any) -> None:
            if not isinstance(file, io.BytesIO):
                shared_store().wait(["rank one is here"])
            real(value, file)

        monkeypatch.setattr(torch, "save", slow)
    else:
        shared_store().set("rank one is here", "")
    save_checkpoint(tmp_path / "last.pt", epoch=7)
    assert torch.load(tmp_path / "last.pt")["epoch"] == 7


def test_k05_no_rank_loads_onto_the_device_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K05. pytorch/pytorch#23138, pytorch/examples#1078, Lightning-AI/pytorch-lightning#19219.

    Without ``map_location`` every rank put the file's tensors on GPU 0.
    """
    places: list[str] = []
    monkeypatch.setattr(reading, "get_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(
        reading, "default_restore_location", lambda s, where: places.append(where) or s
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"weight": torch.ones(2)}, tmp_path / "last.pt")
    assert load_checkpoint(tmp_path / "last.pt")["weight"].tolist() == [1, 1]
    assert places == ["cuda:1"]
    torch.save({"generator": torch.get_rng_state()}, tmp_path / "last.pt")
    torch.set_rng_state(load_checkpoint(tmp_path / "last.pt")["generator"])  # stays on the CPU
    assert places == ["cuda:1"]


def test_k08_what_scripts_store_beside_the_model(tmp_path: Path) -> None:
    """K08. ROCm/Megatron-LM#56, nerfstudio-project/nerfstudio#3702, materialyzeai/matgl#802.

    ``Weights only load failed`` for a namespace or a NumPy number in the file.
    """
    path = tmp_path / "last.pt"
    args = argparse.Namespace(lr=0.1, out=Path("runs"))
    content: dict[str, Any] = {"args": args, "best": np.float64(0.5), "step": np.int64(3)}
    torch.save(content, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(path)
    save_checkpoint(path, **content)
    plain = {"args": {"lr": 0.1, "out": "runs"}, "best": 0.5, "step": 3}
    assert torch.load(path) == plain
    with pytest.raises(TypeError, match=r"state\[1\] is a ndarray"):
        save_checkpoint(path, state=np.random.get_state())
    assert load_checkpoint(path) == plain


def learning_rates(path: str, resume: bool) -> list[float]:
    model = wrap_ddp(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start = load_checkpoint(path, missing_ok=True, **parts).get("step", 0)
    rates = []
    for step in range(start, 6):
        if step == 3 and not resume:
            save_checkpoint(path, step=step, **parts)
            break
        optimizer.zero_grad()
        model(torch.rand(4, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_k09_the_learning_rate_goes_on(tmp_path: Path) -> None:
    """K09. vllm-project/speculators#1048, wenet-e2e/wenet#2619, torch-points3d#630.

    Optimizer and scheduler were not restored: the rate jumped.
    """
    whole, *_ = run_distributed(learning_rates, str(tmp_path / "none.pt"), True)
    first, *_ = run_distributed(learning_rates, str(tmp_path / "last.pt"), False)
    second, *_ = run_distributed(learning_rates, str(tmp_path / "last.pt"), True)
    assert len(first) == len(second) == 3
    assert first + second == whole


@pytest.mark.distributed(world_size=3)
def test_k10_only_rank_zero_reads_if_so_wanted(tmp_path: Path) -> None:
    """K10. facebookresearch/detectron2#4667: host out of memory, each rank had loaded the file."""
    path = str(tmp_path / "last.pt")
    torch.manual_seed(0)
    saved, model = nn.Linear(200, 200), nn.Linear(200, 200)
    save_checkpoint(path, model=saved)
    opened = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]) == path:
            opened.append(path)

    sys.addaudithook(hook)
    load_checkpoint(path, broadcast=True, model=model)
    assert len(opened) == (1 if get_rank() == 0 else 0)
    assert model.bias.tolist() == saved.bias.tolist()


def test_d18_an_optimizer_made_before_its_model_was_replaced(tmp_path: Path) -> None:
    """D18. megvii-research/video_analyst#85, pytorch/pytorch#59147, pytorch/vision#1124.

    Resumed, the optimizer stepped parameters that the model no longer had.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    save_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer)
    replaced = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match="optimizer steps parameters like those of model"):
        load_checkpoint(tmp_path / "last.pt", model=replaced, optimizer=optimizer)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path / "last.pt", model=converted, optimizer=optimizer)


@pytest.mark.distributed(world_size=2)
def test_y09_rank_zero_decides_whether_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Y09. KempnerInstitute/KempnerForge#49: ranks disagreed on ``exists``, and deadlocked."""
    # Rank one's view of the folder is not rank zero's, and changes as it looks again.
    path = tmp_path / "last.pt"
    if get_rank() == 1:
        monkeypatch.setattr(os.path, "exists", lambda name: "last" not in str(name))
    assert load_checkpoint(path, missing_ok=True) == {}
    save_checkpoint(path, epoch=3)
    assert load_checkpoint(path, missing_ok=True) == {"epoch": 3}
    same_folder = broadcast(str(tmp_path / str(get_rank())))
    assert os.path.basename(same_folder) == "0"
