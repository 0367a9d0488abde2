"""How does the epoch reach the copies of a dataset that loader workers hold?"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

__all__ = ["EpochFollower", "SharedNumbers"]


class SharedNumbers:
    """A few integers that a process and the workers it started, in any way, see alike."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._numbers.share_memory_()  # type: ignore[no-untyped-call]

    def __getitem__(self, place: int) -> int:
        return int(self._numbers[place])

    def __setitem__(self, place: int, number: int) -> None:
        self._numbers[place] = number


class EpochFollower(Dataset[Any]):
    """A dataset that tells another one the epoch, in each worker, before it is asked for samples.

    Persistent workers keep the copy of the dataset that they were started with, so that calling
    its ``set_epoch`` in the main process does not reach them.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.epoch = SharedNumbers(0)
        self._told: int | None = None
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._many

    def __getitem__(self, index: Any) -> Any:
        self._tell()
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def _many(self, indices: Any) -> Any:
        self._tell()
        return self.dataset.__getitems__(indices)

    def _tell(self) -> None:
        epoch = self.epoch[0]
        if epoch != self._told:
            self.dataset.set_epoch(epoch)
            self._told = epoch
