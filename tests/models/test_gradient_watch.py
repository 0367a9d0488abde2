"""What the watch over gradients says, and what it must be silent about."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from torch import nn

from ddp_utils import DistributedError, accumulate, wrap_ddp
from ddp_utils.models import gradient_watch
from ddp_utils.testing import run_distributed


class Two(nn.Module):
    """Two branches; the forward returns both in containers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 1)
        self.b = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, kind: str = "tuple") -> Any:
        a, b = self.a(x), self.b(x)
        kinds = {"tuple": (a, b), "dict": {"a": a, "b": [b]}, "dataclass": Output(a, b)}
        return kinds.get(kind) or Opaque(a, b)


@dataclass
class Output:
    a: torch.Tensor
    b: torch.Tensor


class Opaque:
    """An output that nobody can look into."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.outputs = a, b


def batch() -> torch.Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(dist.get_rank()))


def said(step: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step()
        except DistributedError as error:
            return [str(error)]
    return [str(w.message) for w in caught if w.category is RuntimeWarning]


@pytest.mark.distributed(world_size=2)
def test_what_is_right_is_not_complained_of() -> None:
    model: Any = wrap_ddp(Two())

    def eval_with_gradients() -> None:
        model.eval()
        a, b = model(batch())
        (a.sum() + b.sum()).backward()
        model.train()

    def penalty() -> None:
        x = batch().requires_grad_()
        a, b = model(x)
        (slope,) = torch.autograd.grad(a.sum() + b.sum(), x, create_graph=True)
        (a.sum() + b.sum() + slope.square().sum()).backward()

    def only_the_inputs() -> None:
        x = batch().requires_grad_()
        a, b = model(x)
        torch.autograd.grad(a.sum() + b.sum(), x, retain_graph=True)
        (a.sum() + b.sum()).backward()

    def local_then_synchronised() -> None:
        with model.no_sync():
            model.module(batch())[0].sum().backward()
            a, b = model(batch())
            (a.sum() + b.sum()).backward()
        a, b = model(batch())
        (a.sum() + b.sum()).backward()

    def accumulated() -> None:
        for step in range(4):
            with accumulate(model, step, every=2):
                a, b = model(batch())
                (a.sum() + b.sum()).backward()

    def forward_outside_backward_inside() -> None:
        a, b = model(batch())
        with model.no_sync():  # torch does synchronise this one
            (a.sum() + b.sum()).backward()

    def two_forwards_one_backward() -> None:
        (a, b), (c, d) = model(batch()), model(batch())
        (a + b + c + d).sum().backward()

    def forward_without_backward() -> None:
        model(batch())
        a, b = model(batch())
        (a.sum() + b.sum()).backward()

    def containers() -> None:
        out = model(batch(), "dict")
        (out["a"].sum() + out["b"][0].sum()).backward()
        out = model(batch(), "dataclass")
        (out.a.sum() + out.b.sum()).backward()
        a, b = model(batch(), "opaque").outputs
        (a.sum() + b.sum()).backward()

    steps = [value for value in locals().values() if callable(value) and value is not model]
    assert len(steps) == 9
    found = []
    for _ in range(2):  # in the first steps, and after them
        for step in steps:
            found += said(step)
            model.zero_grad()
    assert model._watch._steps_left <= 0
    assert found == []


@pytest.mark.distributed(world_size=1)
def test_an_output_that_cannot_be_looked_into_is_left_to_torch() -> None:
    """Its backward cannot be told from an inner one, so nothing is claimed about its end."""
    model: Any = wrap_ddp(Two())
    a, _ = model(batch(), "opaque").outputs
    assert said(lambda: a.sum().backward()) == []


def astray_later() -> list[list[str]]:
    model: Any = wrap_ddp(Two())
    for _ in range(gradient_watch.FIRST_STEPS):
        a, b = model(batch())
        (a.sum() + b.sum()).backward()
    return [said(lambda: sum(t.sum() for t in model.module(batch())).backward())]  # type: ignore[union-attr]


def test_debug_watches_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_distributed(astray_later, world_size=1) == [[[]]]
    monkeypatch.setenv("DDP_UTILS_DEBUG", "1")
    ((found,),) = run_distributed(astray_later, world_size=1)
    assert "did not go through the wrapped model" in found[0]


@pytest.mark.distributed(world_size=1)
def test_parameters_unfrozen_late_are_noticed_once() -> None:
    bare = Two()
    bare.b.requires_grad_(False)
    model: Any = wrap_ddp(bare)
    for _ in range(gradient_watch.FIRST_STEPS + 3):
        model(batch())[0].sum().backward()
    bare.b.requires_grad_(True)
    found = []
    for step in range(gradient_watch.LOOK_AGAIN + 5):

        def train() -> None:
            a, b = model(batch())
            (a.sum() + b.sum()).backward()

        if said(train):
            found.append(step)
    (only,) = found
    assert only < gradient_watch.LOOK_AGAIN


@pytest.mark.distributed(world_size=1)
def test_a_parameter_on_the_wrapper_itself_is_noticed() -> None:
    model: Any = wrap_ddp(Two())
    model.gain = nn.Parameter(torch.ones(1))  # on the wrapper: its model has no such name

    def train() -> None:
        a, b = model(batch())
        ((a.sum() + b.sum()) * model.gain).backward()

    (found,) = said(train)
    assert "the gradients of 'gain' were not averaged" in found


@pytest.mark.distributed(world_size=1)
def test_the_watch_keeps_no_model_alive() -> None:
    model: Any = wrap_ddp(Two())
    a, b = model(batch())
    (a.sum() + b.sum()).backward()
    model.module.b.weight = nn.Parameter(torch.ones(1, 2))
    a, b = model(batch())
    assert len(said((a.sum() + b.sum()).backward)) == 1
    alive = [weakref.ref(p) for p in (*model.parameters(), model.module, model._watch)]
    del model, a, b
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@pytest.mark.distributed(world_size=2)
def test_a_parameter_in_two_places_counts_once() -> None:
    bare = Two()
    bare.b.weight = bare.a.weight
    model: Any = wrap_ddp(bare)
    found = []
    for _ in range(3):
        a, b = model(batch())
        found += said(lambda: (a.sum() + b.sum()).backward())  # noqa: B023
    assert found == []


@pytest.mark.distributed(world_size=2)
def test_parameters_that_ddp_was_told_to_ignore_are_ignored() -> None:
    bare: Any = Two()
    bare._ddp_params_and_buffers_to_ignore = ["b.weight", "b.bias"]
    model: Any = wrap_ddp(bare)

    def train() -> None:
        a, b = model(batch())
        (a.sum() + b.sum()).backward()

    assert said(train) == []
