"""Which messages does the package raise with its own error classes? Read from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ddp_utils
from ddp_utils.ground import errors

PACKAGE = Path(ddp_utils.__file__).parent
CLASSES = {name for name in errors.__all__ if name.endswith("Error")}


@dataclass(frozen=True)
class Raised:
    """One place that makes an error: the class, where, and the message with `…` for what varies."""

    kind: str
    place: str
    message: str


def raised() -> Iterator[Raised]:
    """Find every call of an error class whose message is written there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            message = message_of(node.args[0])
            if name in CLASSES and message:
                yield Raised(name, f"{path.relative_to(PACKAGE)}:{node.lineno}", message)


def message_of(node: ast.expr) -> str:
    """Return a message's words, with `…` for each part that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        text = "".join(str(part) for part in parts)
    elif isinstance(node, ast.BinOp):
        text = message_of(node.left) + message_of(node.right)
    else:
        return ""
    return text if re.search(r"[a-z]{3}", text) else ""


def covers(fragment: str, message: str) -> bool:
    """Whether all of a fragment's words, between its `…`, are in the message in that order.

    >>> covers("rank … of … is late", "rank … of … is late: wait")
    True
    """
    pieces = [re.escape(piece.strip()) for piece in fragment.split("…") if piece.strip()]
    return re.search(".*".join(pieces), message, re.DOTALL) is not None
