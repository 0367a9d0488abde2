"""For people who test distributed code: ranks for a function, a test, a step, or none at all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_utils.testing.matches import assert_matches_single_process
    from ddp_utils.testing.run import run_distributed
    from ddp_utils.testing.simulated import simulated_world

__all__ = ["assert_matches_single_process", "run_distributed", "simulated_world"]

_HOME = {
    "assert_matches_single_process": "matches",
    "run_distributed": "run",
    "simulated_world": "simulated",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
