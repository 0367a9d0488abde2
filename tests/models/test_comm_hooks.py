"""How gradients travel."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from ddp_utils import RanksDisagreeError, all_gather, check_in_sync, unwrap, wrap_ddp
from ddp_utils.models import comm_hooks


def batch(step: int = 0) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, 2, generator=seed)


def gradients(comm_hook: Any) -> list[float]:
    torch.manual_seed(0)
    model = wrap_ddp(nn.Linear(2, 3), comm_hook=comm_hook)
    for _ in range(3):
        model.zero_grad()
        model(batch()).square().mean().backward()
    check_in_sync(model)
    return [float(v) for p in model.parameters() for v in p.grad.flatten()]


def halve(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Take half of the mean: told apart from what torch does by itself."""
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(lambda f: f.value() / 2)


class Doubling:
    """A hook that is an object, without a name."""

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert state is dist.group.WORLD
        return default_hooks.allreduce_hook(state, bucket).then(lambda f: f.value() * 2)


@pytest.mark.distributed(world_size=2)
def test_gradients_travel_by_every_hook() -> None:
    power = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    hooks: dict[str, Any] = {
        "none": None,
        "fp16": "fp16",
        "bf16": "bf16",
        "one argument": halve,
        "two arguments": default_hooks.allreduce_hook,
        "object": Doubling(),
        "partial": functools.partial(powerSGD_hook, power),
        "lambda": lambda state, bucket: default_hooks.allreduce_hook(state, bucket),
    }
    found, theirs = all_gather({name: gradients(hook) for name, hook in hooks.items()})
    assert found == theirs
    exact = torch.tensor(found["none"])

    def near(name: str, factor: float, tolerance: float) -> None:
        torch.testing.assert_close(
            torch.tensor(found[name]), exact * factor, rtol=tolerance, atol=tolerance
        )

    near("fp16", 1, 2e-3)
    near("bf16", 1, 2e-2)
    near("one argument", 0.5, 1e-6)
    near("two arguments", 1, 1e-6)
    near("object", 2, 1e-6)
    near("lambda", 1, 1e-6)
    near("partial", 1, 1e-3)  # of rank two, which a gradient of this size has
    assert found["fp16"] != found["none"]
    assert found["bf16"] != found["fp16"]


@pytest.mark.distributed(world_size=2)
def test_a_hook_that_the_backend_cannot_run_is_refused_at_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is torch.bfloat16:  # what gloo said before it could
            raise RuntimeError("Invalid scalar type")
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(ValueError, match="'gloo' on cpu cannot add") as caught:
        wrap_ddp(nn.Linear(2, 2), comm_hook="bf16")
    wrap_ddp(nn.Linear(2, 2), comm_hook="fp16")
    text = str(caught.value)
    assert text.startswith("comm_hook='bf16' sends gradients as bfloat16")
    assert "nccl" in text


@pytest.mark.distributed(world_size=2)
def test_post_local_sgd_lets_ranks_go_their_way_between_averages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comm_hooks, "WARM_UP", 3)
    torch.manual_seed(0)
    model = wrap_ddp(nn.Linear(2, 1), comm_hook="post_local_sgd")
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        PeriodicModelAverager(period=2, warmup_steps=3),
    )
    same = []
    for step in range(9):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            check_in_sync(model)
            same.append(True)
        except RanksDisagreeError:
            same.append(False)
    assert same == [True, True, True, True, False, True, False, True, False]


@pytest.mark.distributed(world_size=4)
def test_post_local_sgd_keeps_machines_together(monkeypatch: pytest.MonkeyPatch) -> None:
    node = dist.get_rank() // 2
    # Four ranks as if on two machines.
    monkeypatch.setattr(comm_hooks, "get_node_rank", lambda: node)
    state = comm_hooks._local_sgd_state(dist.group.WORLD)
    assert state.post_local_gradient_allreduce
    assert dist.get_process_group_ranks(state.subgroup) == [[0, 1], [2, 3]][node]


@pytest.mark.distributed(world_size=2)
def test_hooks_work_under_join() -> None:
    model = wrap_ddp(nn.Linear(2, 2), comm_hook="fp16")
    with model.join():
        for step in range(2 + dist.get_rank()):
            model(batch(step)).sum().backward()
    ours, theirs = all_gather([float(p.detach().sum()) for p in unwrap(model).parameters()])
    assert ours == theirs
