"""Every right-hand side of the migrating page runs, on one process and on two ranks."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_utils

PAGE = Path(__file__).parents[2] / "docs/migrating.md"
NOT_A_LINE = re.compile(r"^(python |def |@|\w+(\.\w+)?$)|\.\.\.")
"""Commands, mere names, and calls in which the reader has to fill something in."""
ELSEWHERE = ("launch(", "shutdown_distributed(")
"""What cannot be called by a rank of a test; their own tests do."""


def codes() -> list[str]:
    """Return the code in the tables' second column."""
    rows = [re.split(r"(?<!\\)\|", line) for line in PAGE.read_text().splitlines()]
    return [code for row in rows if len(row) == 4 for code in re.findall(r"`([^`]+)`", row[2])]


def statements() -> list[str]:
    """Return what of it is a line of a script."""
    lines = dict.fromkeys(code for code in codes() if not NOT_A_LINE.search(code))
    whole = [f"{code} pass" if code.endswith(":") else code for code in lines]
    return [code for code in whole if not code.startswith(ELSEWHERE)]


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """What a script has in hand, by the names that the page uses."""
    model = nn.Linear(2, 1)
    batch = torch.ones(3, 2)
    wrapped = ddp_utils.wrap_ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    ddp_utils.save_checkpoint(tmp_path / "saved.pt", **state)
    loader = ddp_utils.make_loader([float(i) for i in range(6)], batch_size=2)
    return {
        **{name: getattr(ddp_utils, name) for name in ddp_utils.__all__},
        "model": wrapped,
        "optimizer": optimizer,
        "data": list(range(512)),
        "loader": loader,
        "x": torch.cat(list(loader)),
        "batch": batch,
        "loss": wrapped(batch).sum(),
        "acc": 0.5,
        "obj": "any",
        "path": tmp_path / "saved.pt",
        "step": 0,
        "flag": False,
        "seed": 3,
        "download": int,
        "parser": argparse.ArgumentParser(),
        "state": state,
    }


def test_the_page_has_code() -> None:
    assert len(statements()) >= 28


def test_it_names_only_what_exists() -> None:
    known = set(ddp_utils.__all__) | {"backward", "print", "main", "to", "__init__", "DataLoader"}
    known |= {"download", "state_dict", "DataParallel", "GradScaler"}
    assert set(re.findall(r"(\w+)\(", " ".join(codes()))) - known == set()


@pytest.mark.distributed(world_size=[1, 2])
@pytest.mark.parametrize("code", statements())
def test_a_line_of_the_page_runs(code: str, script: dict[str, Any]) -> None:
    if "wrap_ddp(" in code:
        script["model"] = nn.Linear(2, 1)
    if "load_model_state(" in code:
        script["state"] = {f"module.{n}": v for n, v in script["model"].state_dict().items()}
    exec(code, script)
