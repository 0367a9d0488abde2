"""What every test of this package is held to: no leaked process, no leaked variable."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves ranks, or environment variables, behind."""
    before = dict(os.environ)
    yield
    before.pop("PYTEST_CURRENT_TEST", None)
    after = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert after == before
    servers = psutil.Process().children()
    assert [p for server in servers for p in server.children(recursive=True)] == []
