"""A rank that a launcher has started: ``torchrun --nproc-per-node NPROC env.py WORK NPROC``."""

import torch.distributed as dist
import work

dist.init_process_group("gloo")
work.run()
dist.destroy_process_group()
