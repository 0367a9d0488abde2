"""Ranks started by torch.multiprocessing.spawn: ``python spawn.py WORK NPROC``."""

import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp
import work


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=work.NPROC)
    work.run()
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}/store",), nprocs=work.NPROC)


if __name__ == "__main__":
    work.start_with(main)
