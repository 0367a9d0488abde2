"""A rank with accelerate, whose own command starts one process on a machine without GPUs:

``torchrun --nproc-per-node NPROC with_accelerate.py WORK NPROC``.
"""

import work
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
work.run()
accelerator.end_training()
