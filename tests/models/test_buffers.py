"""Buffers of all ranks after a training forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import collectives_in
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_utils import RanksDisagreeError, accumulate, all_gather, check_in_sync, unwrap, wrap_ddp
from ddp_utils.models.buffers import LOOK_AGAIN, SETTLING, Held, Message
from ddp_utils.testing import run_distributed


class Buffered(nn.Module):
    """A buffer of every kind: constant, running statistics, changed in place, assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, track_running_stats=True)
        self.register_buffer("mask", torch.arange(3.0))
        self.register_buffer("in_place", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("anew", torch.ones(3))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)
        self.frozen.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(self.norm(self.layer(x)))
        y = self.instance(y.t().unsqueeze(0)).squeeze(0).t()
        if self.training:
            self.count += 1
            self.in_place.mul_(0.5).add_(y.detach().mean(0))
            self.anew = self.anew + y.detach().square().mean(0)
            self.flags.copy_(y.detach()[0] > 0)
            self.phase += y.detach().mean(0) * 1j
        return y * self.anew + self.mask


def batch(step: int = 0, rows: int = 5) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 2, generator=seed)


def buffers_of(model: Any) -> dict[str, Any]:
    return {name: b.tolist() for name, b in unwrap(model).named_buffers()}


@pytest.mark.distributed(world_size=2)
def test_changed_buffers_are_the_same_after_every_forward() -> None:
    model: Any = wrap_ddp(Buffered())
    model.frozen.eval()
    found = []
    for step in range(5):
        model.zero_grad()
        model(batch(step)).square().sum().backward()
        check_in_sync(model)
        found.append(buffers_of(model))
    planned = model._buffers_of_all._planned
    ours, theirs = all_gather((found, sorted(planned)))
    assert ours == theirs
    changing = {"in_place", "anew", "flags", "phase", "count"}
    layers = {f"norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(planned) >= changing | layers
    assert {"instance.running_mean", "instance.running_var"} <= set(planned)
    assert {"mask", *(f"frozen.{n}" for n in ("running_mean", "running_var"))}.isdisjoint(planned)
    assert found[0] != found[1]


def rank_zeros_alone() -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = wrap_ddp(Buffered())
    model.frozen.eval()
    for step in range(3):
        model(batch(step)).square().sum().backward()
    return buffers_of(model)


def test_the_values_are_rank_zeros() -> None:
    alone = run_distributed(rank_zeros_alone, world_size=1)[0]
    ours, theirs = run_distributed(rank_zeros_alone)
    assert ours == theirs
    for name, values in alone.items():
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(values))


@pytest.mark.distributed(world_size=2)
def test_in_plain_torch_each_rank_would_save_another_model() -> None:
    found = []
    for wrap in (DistributedDataParallel, wrap_ddp):
        model = wrap(Buffered())
        model(batch()).square().sum().backward()
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, buffers_of(model))
        found.append(everybodys[0] == everybodys[1])
    assert found == [False, True]


@pytest.mark.distributed(world_size=2)
def test_one_small_message_in_a_step_and_none_in_evaluation_or_accumulation() -> None:
    model: Any = wrap_ddp(Buffered())
    unbuffered: Any = wrap_ddp(nn.Linear(2, 2))
    constant: Any = wrap_ddp(Buffered().eval())

    def step(of: Any, i: int = 9) -> None:
        of(batch(i)).sum().backward()

    def inner_steps() -> None:
        for i in range(3):
            with accumulate(model, i, every=4):
                step(model, i)

    for i in range(4):
        step(model, i)
        step(unbuffered, i)
    constant.eval()
    gradients = ["all_reduce"]
    assert collectives_in(lambda: step(unbuffered)) == gradients
    assert collectives_in(lambda: step(model)) == [*gradients, "all_reduce"]
    assert collectives_in(lambda: constant(batch(9))) == []
    assert collectives_in(inner_steps) == []


class OnSomeRanks(nn.Module):
    """Changes a buffer on one rank only, as data may decide."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("hits", torch.zeros(2))
        self.on = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.on:
            self.hits += 1
        return self.layer(x)


@pytest.mark.distributed(world_size=3)
def test_a_buffer_that_one_rank_changes_is_rank_zeros_on_all() -> None:
    found = []
    for rank in range(dist.get_world_size()):
        model = wrap_ddp(OnSomeRanks(rank))
        for step in range(4):
            model(batch(step)).sum().backward()
            check_in_sync(model)
        found.append(buffers_of(model)["hits"])
    assert found == [[4, 4], [0, 0], [0, 0]]


class LaterOn(OnSomeRanks):
    """Begins to change its buffer after some steps."""

    def forward(self, x: torch.Tensor, now: bool = False) -> torch.Tensor:
        return super().forward(x) if now else self.layer(x)


@pytest.mark.distributed(world_size=2)
def test_without_waiting_for_the_device_a_new_change_is_a_step_late() -> None:
    buffered: Any = wrap_ddp(Buffered())
    later: Any = wrap_ddp(LaterOn(rank=1))
    found = []
    for each in (buffered, later):
        each._buffers_of_all._waits_for_device = True  # as on an accelerator
    for step in range(12):
        buffered(batch(step)).square().sum().backward()
        check_in_sync(buffered)
        later(batch(step), now=step == 6 or step >= 9).sum().backward()
        found.append(buffers_of(later)["hits"][0])
    expected = [[0] * 12, [0] * 6 + [1, 0, 0, 1, 0, 0]]
    assert found == expected[dist.get_rank()]


LOOKS: dict[str, Callable[[Any], nn.Module]] = {
    "the model inside": lambda model: model.module,
    "its own buffers": lambda model: holding(dict(model.named_buffers(prefix=""))),
    "its state": lambda model: holding(model.state_dict()),
    "a copy": lambda model: unwrap(copy.deepcopy(model)),
    "evaluation": lambda model: unwrap(model.eval()),
    "an attribute": lambda model: holding({"module.norm.running_mean": model.norm.running_mean}),
}


def holding(state: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module whose ``norm`` has the statistics of a wrapped model's state."""
    held = nn.Module()
    held.norm = nn.BatchNorm1d(3)
    held.norm.running_mean = state["module.norm.running_mean"]
    return held


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_before_the_backward_sees_rank_zeros(look: str) -> None:
    net = Buffered()
    model = wrap_ddp(net)
    for step in range(SETTLING + 2):
        model(batch(step)).square().sum().backward()
    model(batch(9))
    if dist.get_rank() == 1:  # alone: what was sent arrives without a collective
        own = net.norm.running_mean.tolist()
        seen = LOOKS[look](model).norm.running_mean.tolist()  # type: ignore[union-attr]
        assert net.norm.running_mean.tolist() == seen != own
        dist.send(torch.tensor(seen), 0)
    else:
        theirs = torch.empty(3)
        dist.recv(theirs, 1)
        assert net.norm.running_mean.tolist() == theirs.tolist()


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("how", ["backward", "no gradients"])
def test_the_model_inside_has_rank_zeros_in_place(how: str) -> None:
    net = Buffered()
    model = wrap_ddp(net)
    for step in range(SETTLING + 2):
        with torch.set_grad_enabled(how == "backward"):
            output = model(batch(step)).square().sum()
        if how == "backward":
            output.backward()
        ours, theirs = all_gather({name: b.tolist() for name, b in net.named_buffers()})
        assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_a_look_before_the_backward_does_not_hide_a_new_change() -> None:
    net = LaterOn(rank=0)
    model = wrap_ddp(net)
    for step in range(SETTLING + 4):
        output = model(batch(step), now=step == SETTLING + 2).sum()
        if dist.get_rank() == 0:
            model.eval().train()
        output.backward()
        ours, theirs = all_gather(net.hits.tolist())
        assert ours == theirs == [float(step >= SETTLING + 2)] * 2


class Caching(nn.Module):
    """Registers a buffer in its first forward, and lets it grow with its input."""

    def __init__(self, own_length: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.own_length = own_length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = len(x) + (dist.get_rank() if self.own_length else 0)
        if not hasattr(self, "cache") or len(self.cache) < length:
            self.register_buffer("cache", torch.full((length,), 1.0 + dist.get_rank()))
        return self.layer(x)


@pytest.mark.distributed(world_size=2)
def test_buffers_that_come_and_grow() -> None:
    model = wrap_ddp(Caching(own_length=False))
    found = []
    for rows in (2, 3, 3, 5, 6, 6):
        model(batch(rows, rows)).sum().backward()
        check_in_sync(model)
        found.append(buffers_of(model)["cache"])
    assert found == [[1.0] * rows for rows in (2, 3, 3, 5, 6, 6)]


@pytest.mark.distributed(world_size=2)
def test_buffers_of_other_shapes_are_the_same_error_on_all_ranks() -> None:
    model = wrap_ddp(Caching(own_length=True))
    with pytest.raises(RanksDisagreeError) as caught:
        model(batch(rows=2))
    ours, theirs = all_gather(str(caught.value))
    assert ours == theirs
    assert "cache: float32 (2,) on rank 0; float32 (3,) on rank 1" in ours
    assert "plain attribute" in ours


class Shared(nn.Module):
    """One buffer in two places, which must stay one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("first", torch.zeros(2))
        self.part = nn.Module()
        self.part.register_buffer("second", self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.add_(x.mean(0))
        return self.layer(x)


@pytest.mark.distributed(world_size=2)
def test_a_buffer_in_two_places_stays_one() -> None:
    model: Any = wrap_ddp(Shared())
    for step in range(3):
        model(batch(step)).sum().backward()
    assert model.first is model.part.second
    ours, theirs = all_gather(model.first.tolist())
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_training_forwards_without_gradients_count_too() -> None:
    model: Any = wrap_ddp(Buffered())
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        for step in range(2):
            with context:
                out = model(batch(step))
            check_in_sync(model)
    out.sum().backward()
    assert not any(b.is_inference() for b in model.buffers())
    ours, theirs = all_gather(buffers_of(model))
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_two_forwards_of_spectral_norm_and_batch_norm() -> None:
    model: Any = wrap_ddp(nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2)))
    weighted: Any = wrap_ddp(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)))
    for step in range(3):
        for each in (model, weighted):
            each.zero_grad()
            (each(batch(step)).square().sum() + each(batch(step + 9)).sum()).backward()
            check_in_sync(each)
    ours, theirs = all_gather([buffers_of(model), buffers_of(weighted)])
    assert ours == theirs


@pytest.mark.parametrize("sync_buffers", [True, False])
@pytest.mark.distributed(world_size=2)
def test_uneven_inputs_by_join(sync_buffers: bool) -> None:
    model: Any = wrap_ddp(Buffered(), sync_buffers=sync_buffers)
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            model(batch(step)).square().sum().backward()
    ours, theirs = all_gather(buffers_of(model))
    assert (ours == theirs) is sync_buffers


@pytest.mark.distributed(world_size=2, timeout=30)
def test_after_join_everything_is_as_before() -> None:
    model: Any = wrap_ddp(Buffered())
    for join in (model.join, lambda: Join([model])):
        with join():
            for step in range(1 + dist.get_rank()):
                model(batch(step)).square().sum().backward()
        model.zero_grad()
        model(batch(5)).square().sum().backward()
        check_in_sync(model)
        model.eval()
        if dist.get_rank() == 0:
            model(batch())  # torch would go on to wait for the others here
        model.train()
    ours, theirs = all_gather(buffers_of(model))
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_layers_may_be_exchanged() -> None:
    model: Any = wrap_ddp(Buffered())
    for step in range(6):
        if step == 3:
            model.instance = nn.InstanceNorm1d(3, track_running_stats=True)
        if step == 4:  # other layers with the same tensors
            before, model.norm = model.norm, nn.BatchNorm1d(3)
            model.norm.__dict__.update(before.__dict__)
        model.zero_grad()
        model(batch(step)).square().sum().backward()
        check_in_sync(model)
    ours, theirs = all_gather(buffers_of(model))
    assert ours == theirs


@pytest.mark.distributed(world_size=3)
def test_in_a_group_of_some_ranks_its_first_ranks_values_win() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model = wrap_ddp(Buffered(), process_group=group)
    for step in range(3):
        model(batch(step)).square().sum().backward()
        check_in_sync(model)
    ours, theirs = all_gather(buffers_of(model), group=group)
    assert ours == theirs


dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bool, torch.int64, torch.float16, torch.complex128]
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.tuples(shapes, dtypes), max_size=5), st.data())
def test_a_message_carries_every_buffer_bit_by_bit(specs: Any, data: Any) -> None:
    def held() -> dict[str, Held]:
        made = {}
        for name, (shape, dtype) in specs.items():
            tensor = torch.empty(shape, dtype=dtype)
            raw = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
            raw.copy_(torch.randint(0, 2, raw.shape))
            owner = nn.Module()
            owner.register_buffer("held", tensor)
            made[name] = Held(tensor, [(owner, "held")])
        return made

    flags = data.draw(st.lists(st.integers(0, 1), max_size=5))
    source, target = held(), held()
    sent = Message(len(flags), specs, torch.device("cpu"))
    received = Message(len(flags), specs, torch.device("cpu"))
    sent.fill(flags, source)
    received.fill([], {})
    received.bytes.copy_(torch.maximum(sent.bytes, received.bytes))
    received.deliver(target)
    assert received.flags.tolist() == flags
    for name, h in target.items():
        assert torch.equal(h.tensor, source[name].tensor)
        assert h.places[0][0].held is h.tensor


class Unseen(nn.Module):
    """Changes buffers in ways that no version counter notices."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.start = start
        self.forwards = 0
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("through_data", torch.ones(3))
        self.register_buffer("through_numpy", torch.ones(3))
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.forwards += 1
        if self.forwards > self.start:
            nn.functional.batch_norm(y.detach(), self.mean, self.var, training=True)
            self.through_data.data.mul_(0.9).add_(y.detach().mean(0))
            self.through_numpy.numpy()[:] += y.detach().mean(0).numpy()
        return (y - self.mean) * self.mask


@pytest.mark.distributed(world_size=2)
def test_changes_that_no_counter_notices() -> None:
    from_the_start: Any = wrap_ddp(Unseen())
    for step in range(6):
        from_the_start(batch(step)).square().sum().backward()
        check_in_sync(from_the_start)
    later: Any = wrap_ddp(Unseen(start=7))
    for step in range(2 * LOOK_AGAIN + 1):
        later(batch(step)).square().sum().backward()
    check_in_sync(later)
    for model in (from_the_start, later):
        assert set(model._buffers_of_all._planned) == {n for n in buffers_of(model) if n != "mask"}
