"""What the watch over gradients says, and what it must be silent about."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from torch import nn

from ddp_utils import (
    DistributedError,
    RankFailedError,
    accumulate,
    all_reduce_mean,
    check_in_sync,
    unwrap,
    wrap_ddp,
)
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
        return kinds.get(kind) or {"object": Object, "opaque": Opaque}[kind](a, b)


@dataclass
class Output:
    a: torch.Tensor
    b: torch.Tensor


class Object:
    """An output that is no tree, and holds the tensors in another such."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.inner = SimpleNamespace(a=a, b=b)
        self.outputs = a, b


class Opaque:
    """An output that nobody can look into."""

    __slots__ = ("outputs",)

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
        for kind in ("object", "opaque"):
            a, b = model(batch(), kind).outputs
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


def skips_on_rank_one(kind: str, steps_before: int) -> list[str]:
    model: Any = wrap_ddp(Two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(skips: bool) -> None:
        optimizer.zero_grad()
        a, b = model(batch(), kind).outputs
        (a.sum() if skips else a.sum() + b.sum()).backward()
        if skips and kind == "object":
            raise AssertionError("not noticed at the end of the backward")
        optimizer.step()

    for _ in range(steps_before):
        train(skips=False)
    if dist.get_rank() == 1:
        found = said(lambda: train(skips=True))
        raise ValueError(*found)
    train(skips=False)
    return []


@pytest.mark.parametrize("steps_before", [0, 3, gradient_watch.FIRST_STEPS + 1])
@pytest.mark.parametrize("kind", ["object", "opaque"])
def test_a_skipped_parameter_is_noticed_through_any_output(kind: str, steps_before: int) -> None:
    """At the end of the backward, or where the output cannot be looked into, before the step."""
    with pytest.raises(RankFailedError, match=r"without a gradient for 'b.weight', 'b.bias'"):
        run_distributed(skips_on_rank_one, kind, steps_before, timeout=60)


def skips_under_torchs_debugging(level: str) -> list[list[str]]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    model: Any = wrap_ddp(Layers(layers))
    for _ in range(gradient_watch.FIRST_STEPS + 1):
        model(batch(), 4).sum().backward()
    return [said(lambda: model(batch(), 3).sum().backward())]


class Layers(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for layer in list(self.layers)[:first]:
            x = layer(x)
        return x


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_the_names_are_right_whatever_torch_adds(level: str) -> None:
    (((found,),),) = run_distributed(skips_under_torchs_debugging, level, world_size=1)
    assert "without a gradient for 'layers.3.weight', 'layers.3.bias'," in found


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("how", ["wrapper", "inside", "assignment"])
def test_a_model_that_was_converted_after_wrapping_is_an_error(how: str) -> None:
    model: Any = wrap_ddp(Two())
    x = batch().double()
    for _ in range(gradient_watch.FIRST_STEPS + 1):
        a, b = model(batch())
        (a.sum() + b.sum()).backward()
    if how == "wrapper":
        model.double()
    elif how == "inside":
        model.module.double()
    else:
        for parameter in model.parameters():
            parameter.grad, parameter.data = None, parameter.data.double()
    found: list[str] = []
    for _ in range(1 if how == "wrapper" else gradient_watch.LOOK_AGAIN):
        a, b = model(x)
        found += said((a.sum() + b.sum()).backward)
        if found:
            break
    assert all(repr(name) in found[0] for name in ("a.weight", "a.bias", "b.weight", "b.bias"))
    assert "given another dtype" in found[0]
    model.eval()
    with torch.no_grad():
        model(x)  # to evaluate it is no mistake


@pytest.mark.distributed(world_size=2)
def test_conversions_that_change_nothing_are_silent() -> None:
    model: Any = wrap_ddp(Two())
    found = []
    for convert in (model.float, model.cpu, lambda: model.to(memory_format=torch.channels_last)):
        convert()
        a, b = model(batch())
        found += said((a.sum() + b.sum()).backward)
    assert found == []


class Headed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).sum()


@pytest.mark.distributed(world_size=2)
def test_models_that_share_a_layer() -> None:
    body = nn.Linear(2, 2)
    pair = [wrap_ddp(Headed(body), gradient_as_bucket_view=False) for _ in range(2)]
    found = []
    for _ in range(3):
        for model in pair:
            body.zero_grad()
            found += said(model(batch()).backward)
            check_in_sync(model)
        body.zero_grad()
        losses = [model(batch()) for model in pair]
        found += said(sum(losses).backward)  # type: ignore[union-attr]
        check_in_sync(pair[0])
        expected = all_reduce_mean(body_gradient(pair, batch()))
        torch.testing.assert_close(body.weight.grad, expected)
    assert found == []


def body_gradient(pair: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    bare = [unwrap(model) for model in pair]
    loss = sum(model(x) for model in bare)
    return torch.autograd.grad(loss, bare[0].body.weight)[0]


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
