"""Gradients over several batches, and over ranks with unequal ones."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_utils import RanksDisagreeError, accumulate, all_gather, global_scale, wrap_ddp
from ddp_utils.models.accumulate import Window
from ddp_utils.testing import run_distributed


@given(st.integers(1, 40), st.integers(1, 9))
def test_windows_cover_an_epoch(total: int, every: int) -> None:
    windows = []
    for step in range(total):
        with accumulate(nn.Identity(), step, every, total) as window:
            windows.append(window)
    assert windows[-1].is_last
    assert sum(w.is_last for w in windows) == -(-total // every)
    # The scales of each window add up to one.
    assert sum(w.scale for w in windows) == pytest.approx(-(-total // every))
    lengths = {round(1 / w.scale) for w in windows}
    assert lengths <= {every, total % every}


def test_without_a_total_every_window_is_whole() -> None:
    found = []
    for step in range(5):
        with accumulate(nn.Identity(), step, 2) as window:
            found.append(window)
    assert found == [Window(0.5, False), Window(0.5, True)] * 2 + [Window(0.5, False)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 0), ValueError),
        ((-1, 2), ValueError),
        ((3, 2, 3), ValueError),
        ((0, 2, 0), ValueError),
        ((0, 2.0), TypeError),
        ((True, 2), TypeError),
        ((0, 2, "3"), TypeError),
    ],
)
def test_wrong_counts_are_refused(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="accumulate: "), accumulate(nn.Identity(), *arguments):
        pass


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


DATA = torch.randn(14, 2, 5, 3, generator=torch.Generator().manual_seed(0)).double()
"""Micro-batches by step, rank and sample."""


def gradients(model: nn.Module) -> list[float]:
    return [float(v) for p in model.parameters() for v in p.grad.flatten()]


def wraps_bucket(model: Any, syncs: list[int]) -> None:
    """Count every bucket that is sent."""

    def count(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        syncs.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    count.__annotations__ = {}
    model.register_comm_hook(None, count)


@pytest.mark.parametrize(("every", "total"), [(1, 3), (3, 7), (4, 4), (5, 3)])
@pytest.mark.distributed(world_size=2)
def test_accumulated_gradients_are_those_of_one_big_batch(every: int, total: int) -> None:
    model = wrap_ddp(net())
    syncs: list[int] = []
    wraps_bucket(model, syncs)
    found = []
    for step in range(total):
        before = len(syncs)
        with accumulate(model, step, every, total) as window:
            loss = model(DATA[step, dist.get_rank()]).square().mean() * window.scale
            loss.backward()
        assert (len(syncs) > before) == window.is_last
        if window.is_last:
            found.append(gradients(model))
            model.zero_grad()
    expected = []
    for start in range(0, total, every):
        alone = net()
        samples = DATA[start : min(start + every, total)].reshape(-1, 3)
        alone(samples).square().mean().backward()
        expected.append(gradients(alone))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-9)
    ours, theirs = all_gather(found)
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_a_static_graph_learns_it_in_the_first_micro_batch() -> None:
    model = wrap_ddp(net(), static_graph=True)
    syncs: list[int] = []
    wraps_bucket(model, syncs)
    found = []
    for step in range(6):
        before = len(syncs)
        with accumulate(model, step, every=3) as window:
            loss = model(DATA[step, dist.get_rank()]).square().mean() * window.scale
            loss.backward()
        assert (len(syncs) > before) == (window.is_last or step == 0)
        if window.is_last:
            found.append(gradients(model))
            model.zero_grad()
    alone = net()
    for grads, samples in zip(found, (DATA[:3], DATA[3:6]), strict=True):
        alone.zero_grad()
        alone(samples.reshape(-1, 3)).square().mean().backward()
        assert grads == pytest.approx(gradients(alone), rel=1e-6, abs=1e-9)


@pytest.mark.distributed(world_size=2)
def test_a_trainer_that_holds_wrapped_models() -> None:
    trainer = nn.ModuleDict({"first": wrap_ddp(net()), "second": wrap_ddp(net())})
    syncs: list[int] = []
    for model in trainer.values():
        wraps_bucket(model, syncs)
    for step in range(2):
        with accumulate(trainer, step, every=2) as window:
            x = DATA[step, dist.get_rank()]
            (sum(m(x).square().mean() for m in trainer.values()) * window.scale).backward()
        assert len(syncs) == (2 if window.is_last else 0)


def train_scaled(wrapped: bool) -> list[float]:
    """Train in windows with a scaler, clipping and an overflow, over two ranks or one."""
    model: Any = wrap_ddp(net().float()) if wrapped else net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(14):
        rows = DATA[step, dist.get_rank()] if wrapped else DATA[step].reshape(-1, 3)
        with accumulate(model, step, every=4, total=14) as window:
            loss = model(rows.float()).square().mean() * window.scale
            if step == 6 and (not wrapped or dist.get_rank() == 1):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        if window.is_last:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0.1 or not norm.isfinite() or step > 8
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return scales + [float(v) for p in model.parameters() for v in p.detach().flatten()]


def test_with_a_gradient_scaler_and_clipping() -> None:
    expected = train_scaled(wrapped=False)
    assert expected[:4] == [2.0**10, 2.0**9, 2.0**9, 2.0**10]  # one window overflowed
    for found in run_distributed(train_scaled, True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


COUNTS = [[[3, 1], [5, 2]], [[0, 4], [1, 5]]]
"""Tokens that count, by rank, window and micro-batch."""


@pytest.mark.distributed(world_size=2)
def test_masked_windows_give_the_single_process_gradient() -> None:
    model = wrap_ddp(net())
    for window, counts in enumerate(COUNTS[dist.get_rank()]):
        scale = global_scale(sum(counts)) / max(sum(counts), 1)
        for micro, count in enumerate(counts):
            rows = DATA[2 * window + micro, dist.get_rank()]
            mask = torch.arange(len(rows)) < count
            with accumulate(model, micro, every=2):
                errors = model(rows).square().squeeze(1)
                ((errors * mask).sum() * scale).backward()
        alone = net()
        kept = torch.cat(
            [
                DATA[2 * window + micro, rank][: COUNTS[rank][window][micro]]
                for rank in range(2)
                for micro in range(2)
            ]
        )
        alone(kept).square().mean().backward()
        assert gradients(model) == pytest.approx(gradients(alone), rel=1e-6, abs=1e-9)
        model.zero_grad()


@pytest.mark.distributed(world_size=2)
def test_scales_add_up_to_the_world_size() -> None:
    rank = dist.get_rank()
    found = [global_scale(3 if rank else 1), global_scale(torch.tensor(2.0 * rank))]
    assert [*found, global_scale(0)] == ([1.5, 2.0, 0.0] if rank else [0.5, 0.0, 0.0])


@pytest.mark.distributed(world_size=3)
def test_scales_of_a_group() -> None:
    group = dist.new_group([1, 2])
    if rank := dist.get_rank():
        assert global_scale(rank, group=group) == pytest.approx(2 * rank / 3)


def test_alone_the_scale_is_one() -> None:
    assert global_scale(17) == 1.0
    assert global_scale(0) == 0.0


@pytest.mark.parametrize("bad", [-1, "many", None, torch.ones(2)])
@pytest.mark.distributed(world_size=2)
def test_a_bad_count_is_an_error_on_all_ranks(bad: Any) -> None:
    with pytest.raises((ValueError, RanksDisagreeError)) as caught:
        global_scale(bad if dist.get_rank() else 2)
    assert (str(bad) if dist.get_rank() else "finite count") in str(caught.value)


@pytest.mark.distributed(world_size=1)
def test_an_error_inside_leaves_synchronisation_on() -> None:
    model: Any = wrap_ddp(net())
    with pytest.raises(ZeroDivisionError), accumulate(model, 0, every=2):
        raise ZeroDivisionError
    assert model.require_backward_grad_sync is True


def test_an_unwrapped_model_needs_nothing() -> None:
    model = copy.deepcopy(net())
    with accumulate(model, 0, every=2) as window, nullcontext():
        (model(DATA[0, 0]).mean() * window.scale).backward()
    assert window == Window(0.5, False)
