"""Attributes, copies and compilation of a wrapped model; what it refuses to run."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_utils import (
    DistributedError,
    OneRankSectionError,
    RankFailedError,
    RanksDisagreeError,
    all_gather,
    check_in_sync,
    make_loader,
    rank_zero_only,
    unwrap,
    wrap_ddp,
)
from ddp_utils.models.wrapper import WrappedModel
from ddp_utils.testing import run_distributed


class Model(nn.Module):
    """A model with attributes of many kinds."""

    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("offset", torch.zeros(2))
        self.note = "mine"
        self.logger = "shadowed by DDP's"
        self.seen = 0
        self._half = 0.5

    @property
    def doubled(self) -> int:
        return 2 * self.seen

    @doubled.setter
    def doubled(self, value: int) -> None:
        self.seen = value // 2

    @property
    def broken(self) -> int:
        raise RuntimeError("a property that fails")

    def method(self) -> str:
        return self.note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.offset


@pytest.mark.distributed(world_size=1)
def test_attributes_are_the_models() -> None:
    bare = Model()
    model = wrap_ddp(bare)
    assert model.note == "mine"
    assert model.method() == "mine"
    assert model.limit == 3
    assert model._half == 0.5
    assert model.layer is bare.layer
    assert model.offset is bare.offset

    model.note = "changed"
    model.doubled = 8
    model._half = 0.25
    model.limit = 4
    model.offset = torch.ones(2)
    assert (bare.note, bare.seen, bare._half, bare.limit) == ("changed", 4, 0.25, 4)
    assert model.doubled == 8
    assert dict(bare.named_buffers())["offset"] is model.offset
    assert Model.limit == 3

    model.fresh = 1  # the model has no such name: it stays on the wrapper, as in torch
    assert not hasattr(bare, "fresh")
    assert model.fresh == 1
    del model.fresh
    del model.note
    assert not hasattr(bare, "note")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'note'"):
        _ = model.note
    with pytest.raises(AttributeError):
        del model.note
    with pytest.raises(RuntimeError, match="a property that fails"):
        _ = model.broken
    assert {"layer", "doubled", "no_sync"} <= set(dir(model))


@pytest.mark.distributed(world_size=1)
def test_torchs_own_names_stay_the_wrappers() -> None:
    bare = Model()
    model: Any = wrap_ddp(bare)
    model.require_backward_grad_sync = False
    model.train(False)
    assert not bare.training
    assert not model.training
    assert not hasattr(bare, "require_backward_grad_sync")
    assert model.logger is not bare.logger
    assert model.shadowed_names() == ["logger"]
    assert list(model.state_dict()) == ["module.offset", "module.layer.weight", "module.layer.bias"]
    assert not hasattr(model, "__len__")
    assert not hasattr(model, "buffer_hook")
    model.module = bare
    assert model.module is bare
    bare.buffer_hook = "torch asks for it"
    assert not hasattr(model, "buffer_hook")
    model.eval()(torch.ones(1, 2))


@pytest.mark.distributed(world_size=2)
def test_shadowed_names_are_logged_once() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_utils.models").addHandler(handler)
    wrap_ddp(Model())
    first, second = all_gather([line for line in lines if "own" in line])
    assert len(first) == 1
    assert "unwrap(model).logger" in first[0]
    assert second == []


def batch() -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(dist.get_rank()))


def negate(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(-bucket.buffer())
    return future


@pytest.mark.distributed(world_size=2)
def test_copies_are_wrapped_models_of_their_own() -> None:
    model = wrap_ddp(Model(), comm_hook=negate)
    model(batch()).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    made = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    for other in made:
        assert type(other) is WrappedModel
        assert other.module is not model.module
        other.note = "the copy's"
        assert model.note == "mine"
        assert unwrap(other).note == "the copy's"
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
            assert a is not b
        other.zero_grad()
        other(torch.ones(1, 2)).sum().backward()  # negated, not averaged: the hook came along
        assert (unwrap(other).layer.weight.grad == -1).all()
    if dist.get_rank() == 0:  # copying is no collective
        copy.deepcopy(model)
    assert pickle.dumps(unwrap(model))


@pytest.mark.distributed(world_size=2)
def test_a_copy_of_a_static_graph_averages_its_gradients() -> None:
    """Copy a model whose graph is static, and which has had the first backward of all."""
    model = wrap_ddp(Model(), static_graph=True)
    model(batch()).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(3):
            other.zero_grad()
            other(batch()).square().sum().backward()
            check_in_sync(other)


class Trainer:
    """What many frameworks hang on the model, and which holds the wrapped model."""

    model: nn.Module


@pytest.mark.distributed(world_size=2)
def test_a_model_that_leads_back_to_its_wrapper_is_copied() -> None:
    bare: Any = Model()
    bare.trainer = Trainer()
    model = bare.trainer.model = wrap_ddp(bare)
    other: Any = copy.deepcopy(model)
    assert other is not model
    assert other.trainer.model is other
    assert unwrap(other).trainer is other.trainer
    other(batch()).sum().backward()
    check_in_sync(other)


@pytest.mark.distributed(world_size=2)
def test_a_model_that_was_compiled_in_place_is_copied() -> None:
    model = wrap_ddp(Model())
    model.compile(backend="eager")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(batch()).sum().backward()  # as of any module, the copy is not compiled
        check_in_sync(other)


@pytest.mark.distributed(world_size=1)
def test_a_copy_made_without_a_group_is_bare() -> None:
    model = wrap_ddp(Model())
    dist.destroy_process_group()
    assert type(copy.deepcopy(model)) is Model


def pickled() -> bytes:
    return pickle.dumps(wrap_ddp(Model()))


def test_a_pickle_that_is_loaded_without_a_group_comes_out_bare() -> None:
    model = pickle.loads(run_distributed(pickled)[0])
    assert type(model) is Model
    assert model.note == "mine"


@pytest.mark.distributed(world_size=1)
def test_what_belongs_to_its_groups_is_not_copied() -> None:
    for model in (
        wrap_ddp(Model(), process_group=dist.new_group([0])),
        wrap_ddp(Model(), comm_hook="post_local_sgd"),
    ):
        with pytest.raises(TypeError, match=r"copy unwrap\(model\)"):
            copy.deepcopy(model)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.note = "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean(0))
        return self.norm(y)


@pytest.mark.slow
@pytest.mark.distributed(world_size=2)
def test_compiled_before_and_after_wrapping() -> None:
    made: list[Any] = []
    for way in ("inner", "outer", "in place before", "in place after"):
        torch._dynamo.reset()
        bare: Any = Normed()
        if way == "inner":
            bare = torch.compile(bare, backend="aot_eager")
        if way == "in place before":
            bare.compile(backend="aot_eager")
        model: Any = wrap_ddp(bare)
        if way == "outer":
            model = torch.compile(model, backend="aot_eager")
        if way == "in place after":
            model.compile(backend="aot_eager")
        made.append(model)
        for _ in range(13):
            model.zero_grad()
            model(batch()).square().sum().backward()
            check_in_sync(model)
        assert model.note == "mine"
        model.note = "changed"
        assert unwrap(model).note == "changed"
        assert int(unwrap(model).norm.num_batches_tracked) == 13
        model.eval()
        if dist.get_rank() == 0:
            model(batch())
    ours, theirs = all_gather([float(unwrap(m).mean.sum()) for m in made])
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_every_rank_evaluates_alone_the_same_model() -> None:
    model = wrap_ddp(Normed())
    model(batch()).sum().backward()
    model.eval()
    with torch.no_grad():
        for _ in range(3 * dist.get_rank()):
            model(batch())
    if dist.get_rank() == 0:
        model(batch())
    model.train()
    model(batch()).sum().backward()
    check_in_sync(model)
    model.eval()
    ours, theirs = all_gather(model(torch.ones(2, 2)).sum().item())
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_no_training_while_an_uneven_loader_is_walked() -> None:
    model = wrap_ddp(Normed())
    loader = make_loader(range(3), batch_size=1, pad=False)
    for _ in loader:
        model.eval()(batch())
    walk = iter(loader)
    next(walk)
    with pytest.raises(DistributedError) as caught:
        model.train()(batch())
    with model.join():
        model(batch()).sum().backward()
    for _ in walk:
        pass
    model(batch()).sum().backward()
    text = str(caught.value)
    assert text.startswith(f"rank {dist.get_rank()}: a training forward while ")
    assert "pad=True" in text


@pytest.mark.distributed(world_size=2)
def test_an_uneven_loader_that_is_kept_for_later_stops_no_training() -> None:
    model = wrap_ddp(Normed())
    for_evaluation = iter(make_loader(range(7), batch_size=1, pad=False))
    for _ in range(2):
        next(for_evaluation)
        model.eval()(batch())
        for _ in make_loader(range(4), batch_size=1, pad=True):
            model.train()(batch()).sum().backward()
    next(for_evaluation)
    with pytest.raises(DistributedError, match="is being walked"):
        model(batch())


@pytest.mark.distributed(world_size=2, timeout=60)
@pytest.mark.parametrize("static_graph", [False, True])
def test_one_rank_evaluates_with_gradients_after_the_first_step(static_graph: bool) -> None:
    model = wrap_ddp(Normed(), static_graph=static_graph)
    fine_tuned = wrap_ddp(Normed(), static_graph=static_graph)
    fine_tuned.eval()  # and trained so
    for each in (model, copy.deepcopy(model), fine_tuned):
        trains = each.training
        each(batch()).sum().backward()
        each.zero_grad()
        if dist.get_rank() == 1:
            each.eval()
            each(batch()).sum()
            each.train(trains)
        for _ in range(2):
            each.zero_grad()
            each(batch()).sum().backward()
        check_in_sync(each)
        assert each._has_rebuilt_buckets


@pytest.mark.distributed(world_size=2, timeout=60)
def test_the_mode_of_the_model_inside_counts() -> None:
    net = Normed()
    model = wrap_ddp(net)
    model(batch()).sum().backward()
    net.eval()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model(batch())
    model.eval()
    net.train()
    for _ in range(2):
        model(batch()).sum().backward()
        check_in_sync(model)


@pytest.mark.distributed(world_size=2, timeout=60)
@pytest.mark.parametrize("how", ["model", "Join"])
def test_an_error_inside_join_ends_it(how: str) -> None:
    model = wrap_ddp(Normed())

    def fail() -> None:
        with model.join() if how == "model" else Join([model]):  # type: ignore[list-item]
            model(batch()).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    model.eval()
    if dist.get_rank() == 1:
        model(batch())
    model.train()
    model.zero_grad()
    for _ in range(2):
        model(batch()).sum().backward()
        check_in_sync(model)


@pytest.mark.distributed(world_size=2)
def test_no_training_where_only_one_rank_runs() -> None:
    model = wrap_ddp(Normed())

    @rank_zero_only
    def train() -> None:
        model(batch())

    if dist.get_rank() == 0:
        with pytest.raises(OneRankSectionError) as caught:
            train()
        assert f"rank 0 called a training forward at {__file__}:" in str(caught.value)


def part_ways() -> str:
    model = wrap_ddp(Normed())
    for _ in range(2):
        model(batch()).sum().backward()
    ways: list[Callable[[], Any]] = [lambda: check_in_sync(model), lambda: model(batch())]
    with pytest.raises(RanksDisagreeError) as caught:
        ways[dist.get_rank()]()
    return str(caught.value)


def test_debug_tells_a_forward_from_what_other_ranks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_UTILS_DEBUG", "1")
    ours, theirs = run_distributed(part_ways)
    assert ours == theirs
    assert f"rank 1: a training forward at {__file__}:" in ours
    assert "rank 0: check_in_sync at" in ours


def leave_one_batch_out() -> None:
    model = wrap_ddp(nn.Linear(2, 2))
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            raise ZeroDivisionError("the true cause")
        model(batch()).sum().backward()


def test_a_rank_that_raises_in_training_ends_the_job_with_its_error() -> None:
    with pytest.raises(RankFailedError, match="the true cause") as caught:
        run_distributed(leave_one_batch_out, timeout=30)
    assert caught.value.rank == 1


@pytest.mark.distributed(world_size=1)
def test_it_is_a_distributed_data_parallel() -> None:
    model = wrap_ddp(nn.Linear(2, 2))
    assert isinstance(model, DistributedDataParallel)
    assert hasattr(model, "no_sync")
