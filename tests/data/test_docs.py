"""What the page and the docstrings about data say is what happens."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import ddp_utils.data

MODULES = [
    f"ddp_utils.data.{module.name}" for module in pkgutil.iter_modules(ddp_utils.data.__path__)
]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def test_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "data.md"
    result = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert result.attempted > 30
    assert result.failed == 0


@pytest.mark.parametrize("name", [*MODULES, "ddp_utils.agree.seeding", "ddp_utils.agree.by_word"])
def test_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0
