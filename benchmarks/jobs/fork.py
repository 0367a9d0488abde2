"""The floor: ranks that are forked from a process with torch, with nothing to make it safe.

``python fork.py WORK NPROC``. When one fails the others are killed, and its traceback is the
last thing printed.
"""

import os
import signal
import sys
import tempfile
import traceback

import torch.distributed as dist
import work


def rank_main(rank, store):
    status = 0
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=work.NPROC
        )
        work.run()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


def main():
    with tempfile.TemporaryDirectory() as folder:
        ranks = set()
        for rank in range(work.NPROC):
            pid = os.fork()
            if pid == 0:
                rank_main(rank, f"{folder}/store")
            ranks.add(pid)
        while ranks:
            pid, status = os.wait()
            ranks.discard(pid)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                sys.exit(1)


if __name__ == "__main__":
    work.start_with(main)
