"""A training that saves after every fourth step and goes on from there when started again.

``resuming.py FOLDER [stop|kill]``: with ``stop`` it ends after the step whose checkpoint a killed
run falls back to; with ``kill`` rank 1 kills itself two steps later, in the first attempt.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ddp_utils as ddp

EPOCHS, EVERY, LAST_SAVED = 2, 4, 12  # ten steps an epoch: 12 is in the midst of the second


@ddp.distributed_main
def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    ddp.seed_everything(0)
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(1))
    loader = ddp.make_loader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch_size=8, shuffle=True
    )
    model = ddp.wrap_ddp(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    step = ddp.load_checkpoint(folder / "last.pt", missing_ok=True, **parts).get("step", 0)
    ddp.rank_zero_print(f"from step {step}", flush=True)
    while step < EPOCHS * 10:
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                ddp.save_checkpoint(folder / "last.pt", step=step, **parts)
            if mode == "stop" and step == LAST_SAVED:
                return
            if mode == "kill" and first_attempt and step == LAST_SAVED + 2 and ddp.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    ddp.save_checkpoint(folder / "end.pt", **parts)


if __name__ == "__main__":
    main()
