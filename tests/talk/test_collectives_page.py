"""Do the examples of ``docs/collectives.md`` run, on one process and on two ranks?"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import ddp_utils
from ddp_utils.testing import run_distributed

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"


def run_examples(folder: str) -> int:
    """Run the page's Python blocks one after the other, as one script; return their number."""
    os.chdir(folder)
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    namespace: dict[str, Any] = {}
    for block in blocks:
        above = text[: block.start(1)].count("\n")  # errors show the page's own lines
        exec(compile("\n" * above + block[1], str(PAGE), "exec"), namespace)
    return len(blocks)


@pytest.mark.parametrize("world_size", [2, 1])
def test_the_examples_run(world_size: int, tmp_path: Path) -> None:
    counts = run_distributed(run_examples, str(tmp_path), world_size=world_size)
    assert counts[0] > 8


def test_every_public_name_of_the_page_is_in_it() -> None:
    text = PAGE.read_text()
    public = ("talk", "agree.rank_zero", "agree.loggers")
    names = [name for name, home in ddp_utils._HOME.items() if home.startswith(public)]
    assert [name for name in names if name not in text] == []
