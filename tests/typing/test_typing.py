"""Do mypy and pyright see the types that users are promised in ``check.py``?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.slow
def test_mypy_agrees(tmp_path: Path) -> None:
    strict = ["--strict", "--cache-dir", str(tmp_path), "--warn-unused-ignores"]
    config = ["--config-file", "setup.cfg", "--python-version", "3.10"]
    run("mypy", *config, *strict, str(HERE / "check.py"))


@pytest.mark.slow
def test_pyright_agrees() -> None:
    pytest.importorskip("basedpyright", reason="pyright needs basedpyright, which brings its node")
    run("basedpyright", "--project", str(HERE / "pyrightconfig.json"))


def run(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
