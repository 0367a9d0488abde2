"""Every private name of torch that is used exists in the installed version, and does its work."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_utils.ground import _torch_private as private
from ddp_utils.testing import run_distributed


def test_compiled_models_are_known() -> None:
    compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    assert isinstance(compiled, private.compiled_module_type())
    assert not isinstance(nn.Linear(1, 1), private.compiled_module_type())


def test_own_buffers_are_those_of_this_very_module() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert private.own_buffers(model) == {}
    assert private.own_buffers(model[0]) == dict(model[0].named_buffers())


def test_copies_go_into_their_targets() -> None:
    targets = [torch.zeros(2), torch.zeros((), dtype=torch.int64)]
    private.copy_all(targets, [torch.ones(2), torch.tensor(3)])
    assert [t.tolist() for t in targets] == [[1, 1], 3]
    private.copy_all([], [])


def test_versions_count_in_place_changes() -> None:
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) > before
    with torch.inference_mode():
        assert private.version_of(torch.zeros(1)) == -1


def test_the_end_of_a_backward_is_told_and_its_errors_come_out() -> None:
    order = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def begin(_: torch.Tensor) -> None:
        order.append("begin")
        private.at_end_of_backward(end)

    def end() -> None:
        order.append(f"end with {x.grad}")
        raise ZeroDivisionError

    y.register_hook(begin)
    with pytest.raises(ZeroDivisionError):
        y.backward()
    assert order == ["begin", "end with tensor([2.])"]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1)
        self.b = nn.Linear(1, 1)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


@pytest.mark.distributed(world_size=1)
def test_ddp_answers_what_it_is_asked() -> None:
    bare = TwoLayers()
    ddp = DistributedDataParallel(bare)
    assert private.reduced_parameters(ddp) == [*bare.a.parameters(), *bare.b.parameters()]
    assert not private.reduces_in_python(ddp)
    assert not private.in_join(ddp)
    with ddp.join():
        assert private.in_join(ddp)
    said = []
    for both in (True, True, False):
        ddp(torch.ones(1, 1), both).backward()
        said.append(private.reducer_is_waiting(ddp))
    assert said[:2] == [None, None]
    assert isinstance(private.default_store(), dist.Store)
    assert "did not receive grad for rank 0: 2 3" in (said[2] or "")


def test_ddp_has_what_the_wrapper_overrides_and_sets() -> None:
    assert inspect.isfunction(DistributedDataParallel.will_sync_module_buffers)
    names = set(inspect.signature(DistributedDataParallel.__init__).parameters)
    assert names >= {"process_group", "device_ids", "gradient_as_bucket_view", "static_graph"}
    source = inspect.getsource(DistributedDataParallel)
    for name in ("_comm_hooks", "_has_rebuilt_buckets", "parameters_to_ignore", "buffer_hook"):
        assert name in source
    for call in ("self.will_sync_module_buffers()", "broadcast_buffers"):
        assert call in source


def wraps_without_loading() -> bool:
    loaded = "torch._dynamo" in sys.modules
    DistributedDataParallel(nn.Linear(1, 1))
    return loaded


def test_what_ddp_loads_is_loaded_before_the_ranks_are_started() -> None:
    private.load_what_ddp_loads()
    assert run_distributed(wraps_without_loading, world_size=1) == [True]
