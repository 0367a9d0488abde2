"""A rank that keeps what it raised for torchrun: ``torchrun ... env_record.py WORK NPROC``."""

import torch.distributed as dist
import work
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    work.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
