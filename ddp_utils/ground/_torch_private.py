"""Which private names of torch, NumPy and CPython does this package use?

Each is used through one function here, with the reason that no public name will do. A test
asserts that every one of them exists in the installed versions.
"""

from __future__ import annotations

import sys
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["compiled_module_type", "default_store", "fork_is_poisoned"]


def default_store() -> dist.Store:
    """Return the store of the default process group, also of one that somebody else made.

    torch has no public way to reach it, and everything of ours that must not be a collective
    (the agreed seed, the names of the absent, one-rank sections) talks through it.
    """
    return dist.distributed_c10d._get_default_store()


def fork_is_poisoned() -> bool:
    """Whether an accelerator runtime was touched before this process was forked.

    ``is_initialized()`` is not the question: counting devices may call ``cuInit`` too, and only
    the runtime's own at-fork handler knows.
    """
    kinds = (torch.cuda, getattr(torch, "xpu", None), getattr(torch, "hpu", None))
    probes = (getattr(kind, "_is_in_bad_fork", None) for kind in kinds)
    return any(probe() for probe in probes if probe is not None)


def compiled_module_type() -> type[nn.Module] | tuple[()]:
    """Return the class of what ``torch.compile(module)`` returns, for ``isinstance``.

    torch names it nowhere in public. Its module is slow to import, and where nobody has
    imported it nothing can be compiled: then an empty tuple, of which nothing is an instance.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return () if dynamo is None else cast("type[nn.Module]", dynamo.OptimizedModule)
