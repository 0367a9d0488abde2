"""How do the ranks' predictions come together in the dataset's order?"""

from __future__ import annotations

from typing import Any

__all__ = ["gather_in_order"]


def gather_in_order(tree: Any, sampler: Any) -> Any:
    """Return the predictions of all ranks, in dataset order, each once."""
    raise NotImplementedError
