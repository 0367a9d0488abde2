"""How does the retrofit guide show what changes from one script to the next?"""

from __future__ import annotations

import difflib
from pathlib import Path

RETROFIT = Path(__file__).parents[2] / "examples" / "retrofit"


def shown_diff(before: str, after: str) -> str:
    """Return the changed lines with one line around them, parts apart by ` ...`."""
    lines = [(RETROFIT / name).read_text().splitlines() for name in (before, after)]
    changes = list(difflib.unified_diff(*lines, n=1, lineterm=""))[2:]
    shown = [" ..." if line.startswith("@@") else line.rstrip() for line in changes]
    return "\n".join(shown[1:])


def changed_lines(before: str, after: str) -> int:
    """Return how many lines the newer script adds or changes."""
    return sum(line.startswith("+") for line in shown_diff(before, after).splitlines())
