"""Is the model still the same on all ranks, to the last bit?"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
import torch.distributed as dist
from ranks import from_all_ranks
from torch import nn

from ddp_utils import RanksDisagreeError, check_equal_steps, check_in_sync, wrap_ddp
from ddp_utils.agree.facts import differences


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.embed = nn.Embedding(3, 2, sparse=True)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("brief", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))


def filled() -> Layers:
    torch.manual_seed(0)
    model = Layers()
    (model.layer(torch.ones(1, 2)).sum() + model.embed(torch.tensor([1])).sum()).backward()
    return model


def complaint(change: Any) -> str:
    model = filled()
    if dist.get_rank() == 1:
        with torch.no_grad():
            change(model)
    try:
        check_in_sync(model)
    except RanksDisagreeError as error:
        return str(error)
    return ""


def flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.view(-1)[-1:].view(torch.uint8)[0] ^= 1


CHANGES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda m: None, ""),
    "parameter": (lambda m: flip_a_bit(m.layer.weight), "  layer.weight: "),
    "gradient": (lambda m: flip_a_bit(m.layer.bias.grad), "  gradient of layer.bias: "),
    "sparse": (lambda m: m.embed.weight.grad.mul_(2), "  gradient of embed.weight: "),
    "no gradient": (lambda m: setattr(m.layer.bias, "grad", None), "; none on rank 1"),
    "complex": (lambda m: flip_a_bit(m.phase), "  phase: "),
    "bfloat16": (lambda m: flip_a_bit(m.brief), "  brief: "),
    "bool": (lambda m: m.flag.fill_(True), "  flag: "),
    "swapped": (lambda m: m.layer.weight.copy_(m.layer.weight.flip(0)), "  layer.weight: "),
}


@pytest.mark.distributed(world_size=2)
def test_the_smallest_difference_is_named_on_all_ranks() -> None:
    texts = [complaint(change) for change, _ in CHANGES.values()]
    assert from_all_ranks(texts) == [texts] * 2
    for text, (_, expected) in zip(texts, CHANGES.values(), strict=True):
        assert expected in text
        assert text.count("\n") == (2 if expected else 0)  # one difference, no other


@pytest.mark.distributed(world_size=2)
def test_other_models_are_said_too() -> None:
    found = []
    rank = dist.get_rank()
    models: tuple[nn.Module, ...] = (nn.Linear(2, 2 + rank), nn.Linear(2, 2, bias=rank == 0))
    for model in models:
        with pytest.raises(RanksDisagreeError) as caught:
            check_in_sync(model)
        found.append(str(caught.value))
    assert from_all_ranks(found) == [found] * 2
    assert "bias: float32 (2,)" in found[1]
    assert "missing on rank 1" in found[1]


def test_without_a_group_everything_is_in_sync() -> None:
    model = filled()
    model.layer.bias.grad = None
    with pytest.warns(RuntimeWarning, match=r"no rank has a gradient for 'layer\.bias'"):
        check_in_sync(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_in_sync(filled())
        check_in_sync(Layers())  # before the first backward there is none to miss
    check_equal_steps(3)


@pytest.mark.distributed(world_size=4)
def test_only_the_ranks_of_the_models_group_are_compared() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    torch.manual_seed(mine)
    model = wrap_ddp(nn.Linear(2, 2), process_group=groups[mine])
    model(torch.ones(1, 2)).sum().backward()
    check_in_sync(model)
    check_equal_steps(mine, group=groups[mine])
    with pytest.raises(RanksDisagreeError, match="0 on ranks 0, 1; 1 on ranks 2, 3"):
        check_equal_steps(mine)


@pytest.mark.distributed(world_size=2)
def test_what_is_no_number_of_steps_is_an_error_on_all_ranks() -> None:
    with pytest.raises((TypeError, RanksDisagreeError)) as caught:
        check_equal_steps("3" if dist.get_rank() else 3)  # type: ignore[arg-type]
    expected = [
        "RanksDisagreeError: rank 1 could not take part",
        "TypeError: check_equal_steps takes a number",
    ]
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(expected[dist.get_rank()])


def test_many_differences_are_cut_short() -> None:
    facts = {0: {f"p{i}": "a" for i in range(20)}, 1: {f"p{i}": "b" for i in range(20)}}
    lines = differences(facts).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "  and 12 more"
