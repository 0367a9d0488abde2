"""Which line does a warning point at?"""

from __future__ import annotations

import sys
import warnings

from ddp_utils.callsite import PASSED_THROUGH

__all__ = ["warn_caller"]


def warn_caller(message: str) -> None:
    """Warn at the innermost line that is not this package's own, nor torch's data loading."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PASSED_THROUGH):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
