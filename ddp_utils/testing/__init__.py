"""For people who test distributed code; see :mod:`ddp_utils.testing.run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_utils.testing.run import run_distributed

__all__ = ["run_distributed"]


def __getattr__(name: str) -> Any:
    if name != "run_distributed":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddp_utils.testing.run import run_distributed

    return run_distributed
