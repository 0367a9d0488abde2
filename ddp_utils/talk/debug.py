"""Do all ranks come to the same collective, from the same line? (``DDP_UTILS_DEBUG=1``)"""

from __future__ import annotations

from ddp_utils.talk.agreement import Agree, Came
from ddp_utils.talk.circle import Circle

__all__ = ["compare"]


def compare(circle: Circle, came: Came, agree: Agree) -> None:
    raise NotImplementedError
