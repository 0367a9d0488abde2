"""One rank as a user's script has it, for the tests of launchers.

``worker.py`` adds up the ranks' numbers and prints a line of JSON about itself. Further words
change what it does: see the functions.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import ddp_utils as ddp

RANK_AT_IMPORT = ddp.get_rank()


def report(**more: object) -> None:
    """Print one line at once, so that the lines of several ranks do not mix."""
    world = ddp.current_world()
    facts = {name: getattr(world, name) for name in world.__dataclass_fields__}
    facts |= {"interface": os.environ.get("GLOO_SOCKET_IFNAME"), "at_import": RANK_AT_IMPORT}
    facts |= {"threads": torch.get_num_threads()}
    sys.stdout.write(json.dumps(facts | more) + "\n")
    sys.stdout.flush()


def reduce() -> None:
    """Join, add up, leave, and do it once more."""
    for _ in range(2):
        world = ddp.init_distributed()
        total = torch.tensor([float(world.rank)])
        dist.all_reduce(total)
        assert total.item() == sum(range(world.world_size))
        last = ddp.current_world()
        ddp.shutdown_distributed()
    assert not ddp.is_distributed()
    assert last.rank == ddp.get_rank()
    report()


def leave_early() -> None:
    """Rank zero ends first; the others still use the store, for half a second and more."""
    world = ddp.init_distributed()
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        ddp.shutdown_distributed()
        # Registered last, so run first: rank zero's own code is over now.
        atexit.register(store.set, "over", "yes")
        return
    store.wait(["over"])
    deadline = time.monotonic() + 0.5
    turns = 0
    while time.monotonic() < deadline:
        turns += store.add(f"turns/{world.rank}", 1) > 0
    group = dist.new_group([world.rank], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)
    report(turns=turns)
    ddp.shutdown_distributed()


def killed_peer() -> None:
    """Rank zero ends first; another is killed without a word. Rank zero must not wait for it."""
    world = ddp.init_distributed()
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        ddp.shutdown_distributed()
        atexit.register(store.set, "over", "yes")
        report()
        return
    store.wait(["over"])
    os.kill(os.getpid(), signal.SIGKILL)


def failing_zero() -> None:
    """Rank zero fails while the others wait for it in a collective."""
    world = ddp.init_distributed()
    dist.barrier()
    if world.rank == 0:
        raise ArithmeticError("rank zero's own trouble")
    dist.barrier()


if __name__ == "__main__":
    {
        "reduce": reduce,
        "leave_early": leave_early,
        "killed_peer": killed_peer,
        "failing_zero": failing_zero,
    }[sys.argv[1] if len(sys.argv) > 1 else "reduce"]()
