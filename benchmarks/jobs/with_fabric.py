"""Ranks started by lightning-fabric: ``python with_fabric.py WORK NPROC``."""

import torch.distributed as dist
import work
from lightning_fabric import Fabric

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=work.NPROC, strategy="ddp")
    fabric.launch()
    work.run()
    dist.destroy_process_group()
