"""Every right-hand side of the migrating page runs, on one process and on two ranks."""

from __future__ import annotations

import ast
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


def right_hand_sides() -> list[str]:
    """Return the code of the tables' second column, as statements."""
    rows = [re.split(r"(?<!\\)\|", line) for line in PAGE.read_text().splitlines()]
    cells = [row[2] for row in rows if len(row) == 4]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    statements = dict.fromkeys(code for code in codes if not NOT_A_LINE.search(code))
    return [f"{code} pass" if code.endswith(":") else code for code in statements]


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
    x = torch.cat(list(loader)) if len(loader) else torch.zeros(0)
    return {
        **{name: getattr(ddp_utils, name) for name in ddp_utils.__all__},
        "model": wrapped,
        "optimizer": optimizer,
        "data": list(range(512)),
        "loader": loader,
        "x": x,
        "batch": batch,
        "loss": wrapped(batch).sum(),
        "acc": 0.5,
        "obj": "any",
        "path": tmp_path / "saved.pt",
        "step": 0,
        "flag": False,
        "seed": 3,
        "nn": nn,
        "torch": torch,
        "download": int,
        "parser": _parser(),
        "fn": len,
        "args": "ab",
        "state": state,
    }


def _parser() -> Any:
    import argparse

    return argparse.ArgumentParser()


def test_the_page_has_code() -> None:
    assert len(right_hand_sides()) >= 30


@pytest.mark.distributed(world_size=[1, 2])
@pytest.mark.parametrize("code", [c for c in right_hand_sides() if not c.startswith(ELSEWHERE)])
def test_a_line_of_the_page_runs(code: str, script: dict[str, Any]) -> None:
    tree = ast.parse(code)
    if "wrap_ddp(" in code:
        script["model"] = nn.Linear(2, 1)
    if "load_model_state(" in code:
        script["state"] = {f"module.{n}": v for n, v in script["model"].state_dict().items()}
    exec(compile(tree, code, "exec"), script)
    assert tree.body
