"""What of its parent's state must a forked rank not have?

A rank is to be as a fresh interpreter would be, in which the script is imported again.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_utils.callsite import note_epoch

__all__ = ["forget_state", "logging_set_up_anew"]


def forget_state() -> None:
    """Seed what is random anew, give torch its defaults back, and forget what data was walked."""
    note_epoch(None)
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch.seed()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # imports much, hence the question
    for device_type in ("cpu", "cuda"):
        torch.set_autocast_enabled(device_type, False)


@contextmanager
def logging_set_up_anew() -> Iterator[None]:
    """Let the script, imported inside the block, set up its logging as if nobody had.

    A logger that it gives handlers loses the inherited ones, which would log everything twice;
    one that it leaves alone keeps them, for the script may have set it up under its guard.
    Inherited log files are opened again: their descriptors were not inherited.
    """
    inherited = {logger: logger.handlers[:] for logger in _loggers() if logger.handlers}
    root = logging.getLogger()
    root.handlers[:] = []  # or logging.basicConfig would do nothing
    try:
        yield
    finally:
        for logger, handlers in inherited.items():
            added = [handler for handler in logger.handlers if handler not in handlers]
            logger.handlers[:] = added or [_reopened(handler) for handler in handlers]


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(each for each in known if isinstance(each, logging.Logger))]


def _reopened(handler: logging.Handler) -> logging.Handler:
    if isinstance(handler, logging.FileHandler):
        handler.mode = "a"  # its file must not be emptied by each rank
        handler.stream = None  # is opened with the next record
    return handler
