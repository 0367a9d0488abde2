"""What wrap_ddp and wrap_dp make of a model, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_utils import (
    DistributedError,
    RanksDisagreeError,
    accumulate,
    all_gather,
    unwrap,
    wrap_ddp,
    wrap_dp,
)
from ddp_utils.models.wrap import placement
from ddp_utils.testing import run_distributed


def test_without_a_group_the_model_itself_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    assert wrap_ddp(model) is model
    assert [r.getMessage() for r in caplog.records] == [
        "wrap_ddp: there is no process group, so the model stays as it is"
    ]


def test_ranks_without_a_group_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    for name, value in (facts | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="init_distributed"):
        wrap_ddp(nn.Linear(2, 2))


@pytest.mark.parametrize("wrap", [wrap_ddp, wrap_dp])
def test_what_is_no_model_or_wrapped_already_is_refused(wrap: Any) -> None:
    with pytest.raises(TypeError, match="Module, not list"):
        wrap([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="it is wrapped in DataParallel already"):
        wrap(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"its part '1' is wrapped in DataParallel already"):
        wrap(nn.Sequential(nn.ReLU(), nn.DataParallel(nn.Linear(2, 2))))


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"broadcast_buffers": False}, TypeError, "write sync_buffers=False"),
        ({"forward_sync_buffers": True}, TypeError, "write sync_buffers=True"),
        ({"find_unused": True}, TypeError, "takes 'find_unused'"),
        ({"comm_hook": "fp8"}, ValueError, "'fp16', 'bf16', 'post_local_sgd'"),
        ({"comm_hook": 16}, TypeError, "not 16"),
    ],
)
def test_wrong_arguments_are_refused_also_without_a_group(
    kwargs: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        wrap_ddp(nn.Linear(2, 2), **kwargs)


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'weight' has no shape yet"):
        wrap_ddp(nn.LazyLinear(2))


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


CPU = torch.device("cpu")
PLACES: list[tuple[list[torch.device], torch.device, dict[str, Any], Any]] = [
    # on, this rank's, asked for: moved to, DDP's arguments
    ([CPU], CPU, {}, (CPU, {})),
    ([CPU], CPU, {"device_ids": [0], "output_device": 0}, (CPU, {})),
    ([CPU], *gpus(2), {}, (*gpus(2), {"device_ids": [2]})),
    (gpus(0), *gpus(1), {}, (*gpus(1), {"device_ids": [1]})),
    (gpus(0), *gpus(1), {"device_ids": None}, (*gpus(1), {"device_ids": [1]})),
    (gpus(0), *gpus(1), {"device_ids": [0]}, (*gpus(0), {"device_ids": [0]})),
    ([CPU], *gpus(1), {"device_ids": ["cuda:3"]}, (*gpus(3), {"device_ids": [3]})),
    ([CPU], *gpus(1), {"device_ids": gpus(2)}, (*gpus(2), {"device_ids": [2]})),
    ([CPU], *gpus(1), {"output_device": 1}, (*gpus(1), {"device_ids": [1], "output_device": 1})),
    (gpus(0, 1), *gpus(0), {}, (None, {})),
    (gpus(0, 1), *gpus(0), {"device_ids": [0], "output_device": 0}, (None, {})),
    ([], *gpus(1), {}, (*gpus(1), {"device_ids": [1]})),
]


@pytest.mark.parametrize(("on", "own", "asked", "expected"), PLACES)
def test_where_a_model_goes(on: Any, own: Any, asked: Any, expected: Any) -> None:
    assert placement(on, own, asked) == expected


def test_several_kinds_of_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="the parameters are on cpu, cuda:0"):
        placement([CPU, *gpus(0)], CPU, {})


@pytest.mark.distributed(world_size=1)
def test_at_world_size_one_the_model_is_wrapped_too() -> None:
    model = nn.Linear(2, 2)
    wrapped = wrap_ddp(model)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="it is wrapped in WrappedModel already"):
        wrap_ddp(wrapped)
    with pytest.raises(ValueError, match="already"):
        wrap_ddp(torch.compile(wrapped, backend="eager"))  # type: ignore[arg-type]
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.module is model
    assert wrap_ddp(frozen) is frozen
    assert wrapped.gradient_as_bucket_view is True
    copied = wrap_ddp(nn.Linear(2, 2), gradient_as_bucket_view=False)
    assert copied.gradient_as_bucket_view is False


@pytest.mark.distributed(world_size=2)
def test_all_ranks_start_with_rank_zeros_values() -> None:
    torch.manual_seed(dist.get_rank())
    model = wrap_ddp(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)))
    bare = nn.Linear(2, 2).requires_grad_(False)
    bare.register_buffer("phase", torch.randn(3, 2, dtype=torch.complex64).t())
    bare.register_buffer("empty", torch.ones(0, 3))
    frozen = wrap_ddp(bare)
    half = wrap_ddp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)))
    for _ in range(3):
        half(torch.ones(1, 2)).sum().backward()
    named = dist.new_group([0, 1])
    in_group = wrap_ddp(nn.Linear(2, 2), process_group=named)
    in_group(torch.ones(1, 2)).sum().backward()
    with pytest.raises(DistributedError, match="2 ranks use wrap_ddp"):
        wrap_dp(nn.Linear(2, 2))
    sums = [
        complex(sum(t.to(torch.complex128).sum() for t in m.state_dict().values()))
        for m in (model, frozen, half, in_group)
    ]
    ours, theirs = all_gather(sums)
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_other_arguments_on_one_rank_are_an_error_on_all() -> None:
    first = dist.get_rank() == 0
    options: list[tuple[dict[str, Any], str]] = [
        ({"sync_buffers": first}, "sync_buffers="),
        ({"comm_hook": "fp16" if first else None}, "comm_hook="),
        ({"bucket_cap_mb": 1 if first else 2}, "bucket_cap_mb="),
    ]
    found = []
    for kwargs, name in options:
        with pytest.raises(RanksDisagreeError) as caught:
            wrap_ddp(nn.Linear(2, 2), **kwargs)
        assert name in str(caught.value)
        found.append(str(caught.value))
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(first)
    with pytest.raises(RanksDisagreeError, match=r"bias: .*, trained on rank 0; .* on rank 1"):
        wrap_ddp(frozen)
    swapped = nn.ModuleDict({n: nn.Linear(1, 1) for n in ("ab" if first else "ba")})
    with pytest.raises(RanksDisagreeError, match=r"order: a\.weight.* on rank 0"):
        wrap_ddp(swapped)
    ours, theirs = all_gather(found)
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_trouble_on_one_rank_reaches_all() -> None:
    model: Any = nn.Linear(2, 2) if dist.get_rank() == 0 else None
    with pytest.raises((RanksDisagreeError, TypeError)) as caught:
        wrap_ddp(model)
    expected = [
        "RanksDisagreeError: rank 1 could not take part in wrap_ddp",
        "TypeError: wrap_ddp takes a torch.nn.Module",
    ]
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(expected[dist.get_rank()])


def train(wrap: Any, steps: int = 4) -> list[float]:
    torch.manual_seed(7)
    model = wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(steps, 4, 3, generator=torch.Generator().manual_seed(1))
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(steps):
        optimizer.zero_grad()
        model(data[step, rank::size]).square().mean().backward()
        optimizer.step()
    return [float(p.detach().sum()) for p in unwrap(model).parameters()]


def test_training_is_that_of_a_single_process() -> None:
    expected = pytest.approx(train(wrap_ddp), rel=1e-5)
    assert run_distributed(train, wrap_ddp) == [expected] * 2


def test_wrap_dp_leaves_a_model_alone_where_there_are_no_two_devices() -> None:
    model = nn.Linear(2, 2)
    if torch.cuda.device_count() < 2:
        assert wrap_dp(model) is model


def test_wrap_dp_takes_all_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.device] = []
    model = nn.Linear(2, 2)
    monkeypatch.setattr("ddp_utils.models.wrap.accelerator_type", lambda: "cuda")
    monkeypatch.setattr("ddp_utils.models.wrap.visible_devices", lambda kind: 4)
    monkeypatch.setattr(model, "to", lambda device: moved.append(device) or model)
    wrapped = wrap_dp(model)
    assert isinstance(wrapped, nn.DataParallel)
    assert wrapped.module is model
    assert moved == [torch.device("cuda", 0)]


@pytest.mark.distributed(world_size=1)
def test_accumulation_finds_ddp_inside_other_wrappers() -> None:
    model = wrap_ddp(nn.Linear(1, 1))
    found = []
    for step in range(4):
        with accumulate(torch.compile(model, backend="eager"), step, every=2):  # type: ignore[arg-type]
            found.append(model.require_backward_grad_sync)
    assert found == [False, True, False, True]


def share_a_parameter(one: bool, other: bool) -> list[str]:
    """Wrap two models with one encoder, whose gradients torch keeps in two ways or in one."""
    encoder, told = nn.Linear(3, 3), []
    dropped = wrap_ddp(nn.Sequential(encoder), gradient_as_bucket_view=other)
    dropped.ring = [dropped]  # only the garbage collector finds it
    del dropped
    first = wrap_ddp(nn.Sequential(encoder, nn.Linear(3, 1)), gradient_as_bucket_view=one)
    try:
        second = wrap_ddp(nn.Sequential(encoder, nn.Linear(3, 1)), gradient_as_bucket_view=other)
    except ValueError as error:
        return [str(error)]
    for _ in range(3):
        x = torch.randn(4, 3)
        expected = torch.autograd.grad(unwrap(first)(x).sum(), encoder.weight)[0]
        expected += torch.autograd.grad(unwrap(second)(x).square().sum(), encoder.weight)[0]
        encoder.weight.grad = None
        (first(x).sum() + second(x).square().sum()).backward()
        dist.all_reduce(expected)
        torch.testing.assert_close(encoder.weight.grad, expected / dist.get_world_size())
    return told


@pytest.mark.parametrize("one", [True, False])
def test_models_that_share_a_parameter_keep_its_gradient_in_one_way(one: bool) -> None:
    for told in run_distributed(share_a_parameter, one, not one):
        assert "'0.weight' belongs to another wrapped model too" in told[0]
    assert run_distributed(share_a_parameter, False, False) == [[], []]
