"""Functions typed into a notebook run on several ranks, in a real kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = [
    "import torch, torch.distributed as dist\nimport ddp_utils\noffset = 10",
    """
def work(x):
    total = torch.tensor(float(ddp_utils.get_rank()))
    dist.all_reduce(total)
    print("printed by", ddp_utils.get_rank())
    return total.item() + x + offset
""",
    "print(ddp_utils.launch(work, (1,), nproc=2))",
    "offset = 20\nprint(ddp_utils.launch(work, (1,), nproc=2))",
    """
@ddp_utils.distributed_main(nproc=3)
def main():
    return ddp_utils.all_reduce_sum(1)
print(main())
""",
    """
def fail():
    raise ValueError("typed in a cell")
try:
    ddp_utils.launch(fail, nproc=2)
except ddp_utils.RankFailedError as error:
    print(type(error.cause).__name__, error.cause)
""",
]


def run_notebook(folder: Path, cells: list[str]) -> list[str]:
    """Return what each cell has printed."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(folder)}}).execute()
    return [
        "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")
        for cell in notebook.cells
    ]


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_UTILS_QUIET", "1")
    printed = run_notebook(tmp_path, CELLS)
    assert "[12.0, 12.0]" in printed[2]
    assert "printed by 0" in printed[2]
    assert "[rank 1] printed by 1" in printed[2]
    assert "[22.0, 22.0]" in printed[3]
    assert printed[4].splitlines()[-1] == "3"
    assert printed[5].splitlines()[-1] == "ValueError typed in a cell"


def test_without_cloudpickle_the_error_says_what_to_install(script: Callable[..., Any]) -> None:
    """A script in which the import of cloudpickle fails, as where it is not installed."""
    done = script("""
        import sys
        sys.modules["cloudpickle"] = None
        import ddp_utils

        if __name__ == "__main__":
            ddp_utils.launch(lambda: 1, nproc=2)
        """).run()
    assert done.returncode == 1
    assert "torch-ddp-utils[notebook]" in done.stderr
