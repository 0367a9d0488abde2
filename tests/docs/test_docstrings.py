"""Do the examples in the docstrings do what they say? In one process, without a group."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import ddp_utils

PACKAGE = Path(ddp_utils.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_do_what_they_say(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_UTILS_NPROC", "1")
    monkeypatch.setenv("DDP_UTILS_QUIET", "1")
    module = importlib.import_module(name)
    public = {each: getattr(ddp_utils, each) for each in ddp_utils.__all__}
    assert doctest.testmod(module, extraglobs={"torch": torch, **public}).failed == 0
