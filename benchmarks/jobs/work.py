"""What do the ranks do, whoever has started them? The same in every job of this folder.

Each job is run as ``python JOB.py WORK NPROC [FOLDER]`` and calls one of these by name on every
rank, inside a process group.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

WORK = sys.argv[1] if len(sys.argv) > 1 else "reduce"
NPROC = int(sys.argv[2]) if len(sys.argv) > 2 else 2
FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else Path()


class TrueCauseError(Exception):
    """What rank 1 raises: the command's last lines should say so."""


def reduce():
    """Add up a one from every rank."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def fail():
    """Raise on rank 1 while the others wait for it; note when."""
    reduce()
    if dist.get_rank() == 1:
        (FOLDER / "raised").write_text(repr(time.time()))
        raise TrueCauseError("rank 1 found a broken sample")
    reduce()


def idle():
    """Say which process this is, and wait until told to end."""
    reduce()
    (FOLDER / "ranks").mkdir(exist_ok=True)
    (FOLDER / "ranks" / str(os.getpid())).touch()
    while not (FOLDER / "end").exists():
        time.sleep(0.02)
    reduce()


def run():
    """Do what the command line asks for."""
    {"reduce": reduce, "fail": fail, "idle": idle}[WORK]()


def start_with(start):
    """Start the ranks; with ``again`` on the command line once more, and print how long it took."""
    start()
    if "again" in sys.argv:
        begin = time.perf_counter()
        start()
        print("seconds", time.perf_counter() - begin)
