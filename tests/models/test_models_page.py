"""Does every example of ``docs/models.md`` run, on two ranks?"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist

from ddp_utils.testing import run_distributed

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def run_examples(blocks: list[tuple[int, str]]) -> int:
    torch.manual_seed(dist.get_rank())
    page = sys.modules["models_page"] = types.ModuleType("models_page")  # where pickle finds it
    for line, block in blocks:
        exec(compile("\n" * line + block, str(PAGE), "exec"), vars(page))
    return len(blocks)


def test_every_example_runs() -> None:
    text = PAGE.read_text()
    blocks = [
        (text[: found.start()].count("\n") + 1, found[1])
        for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]
    assert len(blocks) > 10
    assert run_distributed(run_examples, blocks) == [len(blocks)] * 2
