"""How the package writes to a terminal, or to what else stands there: whole lines."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["say"]


def say(text: str, stream: TextIO | None = None) -> None:
    """Write ``text`` and a line's end to ``stream`` in one piece; to stderr by default.

    Ranks may share a pipe, and torchrun starts them with ``python -u``, under which ``print``
    writes the end of a line for itself: another rank's line can come between.
    """
    stream = stream or sys.stderr
    if stream is not None:  # as in a program without a console
        stream.write(f"{text}\n")
        stream.flush()
