"""Where do the random generators of every rank stand, and how do they go on from there?"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from ddp_utils.ground.trees import map_leaves
from ddp_utils.world.world import get_device, get_rank, get_world_size

__all__ = ["RandomStates"]

_logger = logging.getLogger("ddp_utils")


class RandomStates:
    """The global generators of torch, NumPy and ``random``, on every rank.

    For a checkpoint: given to ``save_checkpoint`` and ``load_checkpoint`` beside the model, it
    makes a resumed run draw the same dropout masks and augmentations as one that was never
    interrupted. Each rank has its own states, so all ranks have to call ``save_checkpoint``.
    What is held: torch's generators of the CPU and of the rank's device, NumPy's and Python's.
    Generators of your own are not: give their ``get_state()`` by name.

    Example:
        >>> from ddp_utils import load_checkpoint, save_checkpoint
        >>> save_checkpoint("random.pt", random=RandomStates())
        >>> drawn = torch.rand(3)
        >>> load_checkpoint("random.pt", random=RandomStates())
        {}
        >>> torch.equal(torch.rand(3), drawn)
        True
    """

    def own(self) -> dict[str, Any]:
        """Return this rank's states, as plain types and CPU tensors."""
        device = get_device()
        numpy_state = map_leaves(_as_tensor, np.random.get_state(legacy=False))
        version, numbers, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "device": None if device.type == "cpu" else _module(device).get_rng_state(device),
            "numpy": numpy_state,
            "python": [version, torch.tensor(numbers, device="cpu"), gauss],
        }

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Take this rank's part of all ranks' states, if there are as many ranks as there were."""
        if len(states) == get_world_size():
            _put_back(states[get_rank()])
        elif get_rank() == 0:
            _logger.warning(
                "the checkpoint holds the random states of %d ranks and this job has %d: they "
                "are not restored (samples are unaffected; dropout and augmentation differ)",
                len(states),
                get_world_size(),
            )


def _put_back(state: dict[str, Any]) -> None:
    device = get_device()
    torch.set_rng_state(state["torch"].cpu())
    if state["device"] is not None and device.type != "cpu":
        _module(device).set_rng_state(state["device"].cpu(), device)
    np.random.set_state(map_leaves(_as_array, state["numpy"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))


def _as_tensor(part: Any) -> Any:
    return torch.from_numpy(part.copy()) if isinstance(part, np.ndarray) else part


def _as_array(part: Any) -> Any:
    return part.cpu().numpy() if isinstance(part, torch.Tensor) else part


def _module(device: torch.device) -> Any:
    """Return ``torch.cuda`` or its kind."""
    return torch.get_device_module(device)
