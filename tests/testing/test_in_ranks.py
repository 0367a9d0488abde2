"""Marked tests of this very suite: what the mark promises to the body of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_utils import all_gather, current_world, get_rank, get_world_size, wrap_ddp

pytestmark = pytest.mark.distributed(world_size=2)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(get_rank())
    return wrap_ddp(nn.Linear(2, 1))


@pytest.fixture
def closed() -> Iterator[list[int]]:
    """Its teardown runs on every rank, while the group still exists."""
    ranks: list[int] = []
    yield ranks
    assert all_gather(get_rank()) == ranks


@pytest.mark.distributed(world_size=[1, 3])
def test_each_size_is_a_world_of_its_own() -> None:
    ranks = all_gather(get_rank())
    assert ranks == list(range(get_world_size()))
    assert get_world_size() in (1, 3)
    assert len(set(all_gather(os.getpid()))) == get_world_size()


def test_the_world_is_one_that_this_package_started() -> None:
    assert current_world().launcher == "spawn"
    assert dist.get_backend() == "gloo"


def test_fixtures_hold_models(model: nn.Module) -> None:
    model(torch.full((3, 2), 1.0 + get_rank())).sum().backward()
    first, second = all_gather([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_folders_are_shared(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("named", numbered=False)
    assert len({*all_gather(str(tmp_path)), *all_gather(str(other))}) == 2
    with pytest.raises(FileExistsError):
        tmp_path_factory.mktemp("named", numbered=False)
    with pytest.raises(ValueError, match="normalized"):
        tmp_path_factory.mktemp("../named")


def test_teardown_may_communicate(closed: list[int]) -> None:
    closed += all_gather(get_rank())


class TestInAClass:
    def setup_method(self) -> None:
        self.rank = get_rank()

    @pytest.mark.parametrize("factor", [1, 2])
    def test_parameters(self, factor: int) -> None:
        assert all_gather(factor * self.rank) == [0, factor]
