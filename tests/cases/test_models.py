"""Public reports about models under DDP: rows D* and K01 to K03 of the list of cases.

Each test's docstring begins with its row and names where it was reported. Where plain torch is
silent, the test first shows that it goes wrong there.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from ddp_utils import (
    DistributedError,
    RankFailedError,
    RanksDisagreeError,
    accumulate,
    all_gather,
    check_equal_steps,
    check_in_sync,
    global_scale,
    load_model_state,
    revert_sync_batchnorm,
    strip_module_prefix,
    unwrap,
    wrap_ddp,
)
from ddp_utils.testing import run_distributed

Wrap = Callable[[nn.Module], Any]


class TwoLayers(nn.Module):
    """Two layers side by side, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.Linear(2, 3)
        self.custom = "of the model"

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.a(x) * self.b(x) if both else self.a(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().sum()


def batch() -> torch.Tensor:
    """Return other numbers on each rank."""
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(dist.get_rank()))


def in_sync(model: nn.Module) -> bool:
    """Whether ``check_in_sync`` finds nothing; compared with the bare fact on all ranks."""
    said = ""
    try:
        check_in_sync(model)
    except RanksDisagreeError as error:
        said = str(error)
    assert said == "" or "gradient of a." in said or "gradient of b." in said
    grads = [p.grad for p in unwrap(model).parameters() if p.grad is not None]
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, [g.tolist() for g in grads])
    assert (said == "") == all(theirs == everybodys[0] for theirs in everybodys)
    return said == ""


def what_is_said(step: Callable[[], Any]) -> str:
    """Return the warnings and the error of a step as one text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step()
        except DistributedError as error:
            return f"{error}"
    return "\n".join(str(w.message) for w in caught if w.category is RuntimeWarning)


# Silent in plain torch: said by ours.


def leave_one_out(model: Any) -> None:
    model(batch(), both=False).sum().backward()


def around_the_wrapper(model: Any) -> None:
    model.module(batch()).sum().backward()


def around_after_a_good_step(model: Any) -> None:
    model(batch()).sum().backward()
    model.zero_grad()
    model.module.loss(batch()).backward()


def half_a_no_sync(model: Any) -> None:
    with model.no_sync():
        out = model(batch())
    out.sum().backward()


def backward_twice(model: Any) -> None:
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def plain_step(model: Any) -> None:
    model(batch()).sum().backward()


def replace_a_parameter(model: Any) -> None:
    model.module.a.weight = nn.Parameter(torch.ones(3, 2))


def unfreeze(model: Any) -> None:
    model.module.b.requires_grad_(True)


def half_frozen() -> nn.Module:
    bare = TwoLayers()
    bare.b.requires_grad_(False)
    return bare


def said_by_ours(
    step: Callable[[Any], Any],
    change: Callable[[Any], Any] | None = None,
    make: Callable[[], nn.Module] = TwoLayers,
) -> str:
    """Check that plain torch diverges without a word, and return what ours says."""
    results: list[tuple[bool, str]] = []
    wraps: tuple[Wrap, ...] = (DistributedDataParallel, wrap_ddp)
    for wrap in wraps:
        model = wrap(make())
        if change is not None:
            change(model)
        said = what_is_said(lambda: step(model))  # noqa: B023
        results.append((in_sync(model), said))
    (plain_in_sync, plain_says), (_, ours_says) = results
    assert not plain_in_sync
    assert plain_says == ""
    assert ours_says != ""
    first, second = all_gather(ours_says)
    assert first.replace("rank 0", "rank 1") == second
    return ours_says


@pytest.mark.distributed(world_size=2)
def test_unused_parameters_are_named_at_the_end_of_the_backward() -> None:
    """D02 (pytorch/pytorch#112152): one step with an unused parameter diverges silently."""
    said = said_by_ours(leave_one_out)
    assert "without a gradient for 'b.weight', 'b.bias'" in said
    assert "find_unused_parameters=True" in said


@pytest.mark.distributed(world_size=2)
def test_a_forward_around_the_wrapper_is_noticed() -> None:
    """D10 (jingyaogong/minimind#853, intel/e2eAIOK#198): training through model.module."""
    for step in (around_the_wrapper, around_after_a_good_step):
        said = said_by_ours(step)
        assert "did not go through the wrapped model" in said
        assert "'a.weight'" in said


@pytest.mark.distributed(world_size=2)
def test_a_replaced_parameter_is_noticed() -> None:
    """D11 (pytorch/pytorch#12603): a parameter replaced after wrapping is not synchronised."""
    said = said_by_ours(plain_step, replace_a_parameter)
    assert "Replaced after wrapping: 'a.weight'" in said


@pytest.mark.distributed(world_size=2)
def test_an_unfrozen_parameter_is_noticed() -> None:
    """D12 (Lightning-AI/pytorch-lightning#20340): unfrozen after wrapping: local gradients."""
    said = said_by_ours(plain_step, unfreeze, half_frozen)
    assert "'b." in said
    assert "'a." not in said
    assert "unfrozen after wrapping" in said


@pytest.mark.distributed(world_size=2)
def test_half_a_no_sync_is_noticed() -> None:
    """D15 (Haian-Jin/LVSM#22, facebookresearch/ClassyVision#706): forward in, backward out."""
    assert "forward ran inside no_sync()" in said_by_ours(half_a_no_sync)


@pytest.mark.distributed(world_size=2)
def test_a_second_backward_is_noticed() -> None:
    """D10, the same kind: a second backward of one forward is not averaged."""
    assert "another backward" in said_by_ours(backward_twice)


def only_rank_one_leaves_out() -> None:
    model = wrap_ddp(TwoLayers())
    leave = dist.get_rank() == 1
    model(batch(), both=not leave).sum().backward()
    dist.barrier()


def test_one_rank_that_skips_a_parameter_does_not_hang_the_others() -> None:
    """D01 (pytorch/pytorch#43259, open-mmlab/mmdetection#4742): unused parameters, by name."""
    with pytest.raises(RankFailedError, match=r"'b\.weight'") as caught:
        run_distributed(only_rank_one_leaves_out, timeout=30)
    assert caught.value.rank == 1
    assert isinstance(caught.value.cause, DistributedError)


@pytest.mark.distributed(world_size=2)
def test_unused_parameters_are_named_in_any_later_step_too() -> None:
    """D01 (Megvii-BaseDetection/YOLOX#885): a branch that is first skipped after many steps."""
    model = wrap_ddp(TwoLayers())
    for _ in range(20):  # beyond the steps with a hook on each parameter
        plain_step(model)
    said = what_is_said(lambda: leave_one_out(model))
    rank = dist.get_rank()
    assert said.startswith(f"rank {rank}: a synchronised backward has ended without")
    assert "'b.weight', 'b.bias'" in said


def some_steps(*which: bool, **options: Any) -> list[str]:
    model = wrap_ddp(TwoLayers(), **options)
    said = []
    for both in which:
        said.append(what_is_said(lambda: model(batch(), both=both).sum().backward()))  # noqa: B023
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "check_in_sync: no rank has a gradient")
            assert in_sync(model)
        model.zero_grad()
    return said


@pytest.mark.distributed(world_size=2)
def test_find_unused_parameters_is_off_unless_asked_for(capfd: Any) -> None:
    """D03 (huggingface/transformers#9802, pytorch/pytorch#50133): never on by default, quiet."""
    assert some_steps(True, True, True) == [""] * 3
    assert "find_unused_parameters" not in capfd.readouterr().err
    assert some_steps(True, False, True, find_unused_parameters=True) == [""] * 3


class Recurrent(nn.Module):
    """Its buffer takes part in the gradient, and every forward changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("state", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + x.detach().mean(0)
        return self.norm(self.linear(x)) * self.state


@pytest.mark.distributed(world_size=2)
def test_two_forwards_before_a_backward() -> None:
    """D04 (pytorch/pytorch#22095, #175024): buffers must not be written under a backward."""
    torch.manual_seed(0)
    model = wrap_ddp(Recurrent())
    alone = copy.deepcopy(unwrap(model))
    x, y = batch(), batch() + 1
    (model(x).sum() + model(y).square().sum()).backward()
    # What this rank's own gradient is: its first forward began with ones, its second with what
    # rank zero had after the first.
    loss = alone(x).sum()
    state = alone.state.clone()
    dist.broadcast(state, 0)
    alone.state = state
    (loss + alone(y).square().sum()).backward()
    expected = alone.linear.weight.grad / 2
    dist.all_reduce(expected)
    grad = model.linear.weight.grad
    assert grad.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-5, abs=1e-6)
    ours, theirs = all_gather(model.state.tolist())
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_one_spelling_of_the_buffer_switch() -> None:
    """D05 (torch 2.13, distributed.py): broadcast_buffers is deprecated, its successor is new."""
    means = {}
    for sync_buffers in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = wrap_ddp(nn.BatchNorm1d(2), sync_buffers=sync_buffers)
            model(batch())
        means[sync_buffers] = all_gather(unwrap(model).running_mean.tolist())
    on, off = means[True], means[False]
    assert on[0] == on[1]
    assert off[0] != off[1]
    assert on[0] == off[0]


@pytest.mark.distributed(world_size=2)
def test_device_ids_are_for_accelerators_only() -> None:
    """D07 (pytorch/pytorch#100243, mlcommons/hpc#39): device_ids with a CPU model."""
    model = wrap_ddp(nn.Linear(2, 2), device_ids=[0], output_device=0)
    assert str(next(model.parameters()).device) == "cpu"


@pytest.mark.distributed(world_size=2)
def test_a_model_in_no_place_is_refused_on_all_ranks() -> None:
    """D08 (yuanzhoulvpi2017/zero_nlp#120): parameters on two kinds of devices."""
    first = dist.get_rank() == 0
    model = nn.Linear(2, 2, device="meta" if first else "cpu")
    with pytest.raises((ValueError, RanksDisagreeError)) as caught:
        wrap_ddp(model)
    said = f"{type(caught.value).__name__}: {caught.value}"
    if first:
        assert said.startswith("ValueError: wrap_ddp: 'weight' is on the meta device")
    else:
        assert said.startswith("RanksDisagreeError: rank 0 could not take part in wrap_ddp")
        assert "meta device" in said


@pytest.mark.distributed(world_size=2)
def test_attributes_reach_the_model() -> None:
    """D09 (ultralytics/yolov5#90, SeanNaren/deepspeech.pytorch#475): no attribute 'x'."""
    model = wrap_ddp(TwoLayers())
    assert model.custom == "of the model"
    model.custom = "changed"
    assert unwrap(model).custom == "changed"
    assert model.loss(batch()).ndim == 0


@pytest.mark.distributed(world_size=2)
def test_unlike_models_raise_the_same_error_everywhere() -> None:
    """D13 (pytorch/pytorch#76449, yifan123/flow_grpo#245): same model across all ranks."""
    rank = dist.get_rank()
    found = []
    for model in (nn.Linear(4, 2 + rank), nn.Linear(4, 2, bias=rank == 1)):
        with pytest.raises(RanksDisagreeError) as caught:
            wrap_ddp(model)
        found.append(str(caught.value))
    shapes, missing = found
    assert "weight: float32 (2, 4) on cpu, trained on rank 0; float32 (3, 4)" in shapes
    assert "bias: missing on rank 0; float32 (2,) on cpu, trained on rank 1" in missing
    ours, theirs = all_gather(found)
    assert ours == theirs


class Checkpointed(nn.Module):
    """Runs one layer twice, and keeps neither result."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.layer = nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(1 if self.reentrant else 2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return x


@pytest.mark.distributed(world_size=2)
def test_checkpointing_is_no_false_alarm() -> None:
    """D14 (huggingface/peft#313, pytorch/pytorch#24005): checkpointed layers, also reentrant."""
    said = []
    for reentrant, options in ((False, {}), (True, {}), (False, {"static_graph": True})):
        model = wrap_ddp(Checkpointed(reentrant), **options)
        for _ in range(14):
            said.append(what_is_said(lambda: model(batch()).sum().backward()))  # noqa: B023
            check_in_sync(model)
            model.zero_grad()
    assert said == [""] * 42


@pytest.mark.distributed(world_size=2)
def test_accumulation_synchronises_with_the_last_of_a_window() -> None:
    """D15 (NVlabs/stylegan2-ada-pytorch#233): no_sync goes around forward and backward."""
    model = wrap_ddp(TwoLayers())
    for step in range(5):
        with accumulate(model, step, every=3, total=5) as window:
            (model(batch() + step).sum() * window.scale).backward()
        synced = in_sync(model)
        assert synced == window.is_last
        if window.is_last:
            model.zero_grad()
    assert what_is_said(lambda: plain_step(model)) == ""


@pytest.mark.distributed(world_size=2)
def test_unequal_steps_are_refused_before_the_first_and_join_takes_them() -> None:
    """D16 (pytorch/pytorch#38174, k2-fsa/snowfall#152): ranks with unequal numbers of batches."""
    with pytest.raises(RanksDisagreeError) as caught:
        check_equal_steps(3 + dist.get_rank())
    check_equal_steps(4)
    assert "3 on rank 0; 4 on rank 1" in str(caught.value)
    ours, theirs = all_gather(str(caught.value))
    assert ours == theirs
    model = wrap_ddp(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with model.join():
        for _ in range(3 + dist.get_rank()):
            model(batch()).sum().backward()
    model.zero_grad()
    check_in_sync(model)
    ours, theirs = all_gather([float(p.sum()) for p in model.state_dict().values()])
    assert ours == theirs


@pytest.mark.distributed(world_size=2)
def test_sync_batchnorm_only_where_it_can_work() -> None:
    """D17 (open-mmlab/mmsegmentation#2147, ultralytics/yolov5#1018): SyncBatchNorm on the CPU."""
    model = wrap_ddp(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), sync_batchnorm=True)
    model(batch()).sum().backward()
    given = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))
    ready = wrap_ddp(given)
    ready(batch()).sum().backward()
    kinds = [type(unwrap(m)[-1]).__name__ for m in (model, ready)]
    assert kinds == ["BatchNorm1d", "BatchNormOfAnyShape"]
    reverted = revert_sync_batchnorm(nn.Sequential(nn.SyncBatchNorm(2)))
    assert reverted(torch.ones(3, 2)).shape == (3, 2)


@pytest.mark.distributed(world_size=2)
def test_an_optimizer_made_before_wrapping_still_works() -> None:
    """D18 (pytorch/pytorch#59147, pytorch/vision#1124): the parameters stay the same objects."""
    bare = TwoLayers()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    model = wrap_ddp(bare)
    before = unwrap(model).a.weight.detach().clone()
    plain_step(model)
    optimizer.step()
    assert (unwrap(model).a.weight != before).any()


@pytest.mark.distributed(world_size=2)
def test_uneven_batches_give_the_single_process_gradient() -> None:
    """D19 (huggingface/transformers#34242, facebookresearch/fairseq#494): weighted by tokens."""
    torch.manual_seed(0)
    alone = nn.Linear(2, 1, bias=False)
    model = wrap_ddp(copy.deepcopy(alone))
    samples = torch.arange(8.0).view(4, 2)
    alone(samples).square().mean().backward()
    assert alone.weight.grad is not None
    mine = samples[:1] if dist.get_rank() == 0 else samples[1:]
    loss = model(mine).square().mean()
    (loss * global_scale(len(mine))).backward()
    expected = pytest.approx(alone.weight.grad.flatten().tolist(), rel=1e-6)
    assert model.weight.grad.flatten().tolist() == expected


@pytest.mark.distributed(world_size=2)
def test_states_load_wrapped_and_bare() -> None:
    """K01 (pytorch/pytorch#41048, ray-project/ray#30705): Unexpected key module.encoder..."""
    model = wrap_ddp(TwoLayers())
    bare = TwoLayers()
    load_model_state(bare, model.state_dict())
    again = wrap_ddp(TwoLayers())
    load_model_state(again, bare.state_dict())
    load_model_state(again, model.state_dict())
    keys = ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(strip_module_prefix(model.state_dict())) == keys
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.distributed(world_size=1)
def test_compiled_and_wrapped_in_either_order() -> None:
    """K02 (huggingface/pytorch-image-models#2003): `_orig_mod.` beside `module.`, any order."""
    inner = wrap_ddp(torch.compile(TwoLayers(), backend="eager"))
    outer = torch.compile(wrap_ddp(TwoLayers()), backend="eager")
    states = [inner.state_dict(), outer.state_dict()]
    keys = ["module._orig_mod.a.weight", "_orig_mod.module.a.weight"]
    assert [next(iter(state)) for state in states] == keys
    assert [next(iter(strip_module_prefix(state))) for state in states] == ["a.weight"] * 2
    with pytest.raises(ValueError, match="not one key"):
        load_model_state(TwoLayers(), {"backbone.a": torch.ones(2)}, strict=False)


@pytest.mark.distributed(world_size=1)
def test_averaged_models_keep_their_counter() -> None:
    """K03 (sming256/OpenTAD#44): module.module.* beside n_averaged."""
    state = strip_module_prefix(AveragedModel(wrap_ddp(TwoLayers())).state_dict())
    assert list(state) == ["n_averaged", "a.weight", "a.bias", "b.weight", "b.bias"]


@pytest.mark.distributed(world_size=2)
def test_copies_are_no_false_alarm() -> None:
    """D10, the other side: copies of the model that nobody trains must not be suspected."""
    model = wrap_ddp(TwoLayers())
    average = AveragedModel(model)
    said = []
    for _ in range(3):
        said.append(what_is_said(lambda: plain_step(model)))
        average.update_parameters(model)
        said.append(what_is_said(lambda: average.module(batch()).sum().item()))
    pickled = pickle.loads(pickle.dumps(model))
    said.append(what_is_said(lambda: plain_step(pickled)))
    assert said == [""] * 7


def test_the_state_is_untouched() -> None:
    """K01: what state_dict() returns through a wrapper is torch's own, in type and order."""
    state = nn.DataParallel(TwoLayers()).state_dict()
    assert type(state) is OrderedDict
    assert math.prod(len(v) for v in state.values()) > 0
