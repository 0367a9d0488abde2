"""What every test of the data's side begins with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddp_utils.agree import seeding


@pytest.fixture(autouse=True)
def no_seed_given() -> Iterator[None]:
    """Begin, and let the next test begin, as if nobody had called seed_everything."""
    before, seeding._given = seeding._given, None
    yield
    seeding._given = before
