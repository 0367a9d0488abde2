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

from ddp_utils import RanksDisagreeError, check_in_sync, unwrap, wrap_ddp
from ddp_utils.models import comm_hooks
from ddp_utils.testing import run_distributed


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


def all_hooks() -> dict[str, list[float]]:
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
    return {name: gradients(hook) for name, hook in hooks.items()}


def test_gradients_travel_by_every_hook() -> None:
    found, theirs = run_distributed(all_hooks)
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


def cannot_add() -> str:
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is torch.bfloat16:  # what gloo said before it could
            raise RuntimeError("Invalid scalar type")
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    with pytest.raises(ValueError, match="'gloo' on cpu cannot add") as caught:
        wrap_ddp(nn.Linear(2, 2), comm_hook="bf16")
    wrap_ddp(nn.Linear(2, 2), comm_hook="fp16")
    return str(caught.value)


def test_a_hook_that_the_backend_cannot_run_is_refused_at_the_call() -> None:
    text = run_distributed(cannot_add)[0]
    assert text.startswith("comm_hook='bf16' sends gradients as bfloat16")
    assert "nccl" in text


def less_synchronous() -> list[bool]:
    comm_hooks.WARM_UP = 3
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
    return same


def test_post_local_sgd_lets_ranks_go_their_way_between_averages() -> None:
    expected = [True, True, True, True, False, True, False, True, False]
    assert run_distributed(less_synchronous) == [expected] * 2


def subgroup_of_a_machine() -> list[int]:
    nodes = dist.get_rank() // 2
    comm_hooks.get_node_rank = lambda: nodes  # four ranks as if on two machines
    state = comm_hooks._local_sgd_state(dist.group.WORLD)
    assert state.post_local_gradient_allreduce
    return dist.get_process_group_ranks(state.subgroup)


def test_post_local_sgd_keeps_machines_together() -> None:
    assert run_distributed(subgroup_of_a_machine, world_size=4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def hook_and_join() -> list[float]:
    model = wrap_ddp(nn.Linear(2, 2), comm_hook="fp16")
    with model.join():
        for step in range(2 + dist.get_rank()):
            model(batch(step)).sum().backward()
    return [float(p.detach().sum()) for p in unwrap(model).parameters()]


def test_hooks_work_under_join() -> None:
    ours, theirs = run_distributed(hook_and_join)
    assert ours == theirs
