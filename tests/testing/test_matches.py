"""``assert_matches_single_process`` passes what is right, and tells why the rest is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_utils import RankFailedError, get_rank, get_world_size, make_loader, wrap_ddp
from ddp_utils.testing import assert_matches_single_process

Returned = tuple[Tensor, nn.Module]

BATCH = {"x": torch.randn(8, 4), "y": [torch.randn(8, 1)], "name": "train"}


class Net(nn.Module):
    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), *middle)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def train(share: Any, model: nn.Module) -> Returned:
    loss = (model(share["x"]) - share["y"][0]).square().mean()
    loss.backward()
    return loss, model


def good(share: Any) -> Returned:
    assert share["name"] == "train"
    assert len(share["x"]) == 8 // get_world_size()
    return train(share, wrap_ddp(Net(nn.ReLU())))


def batchnorm(share: Any) -> Returned:
    return train(share, wrap_ddp(Net(nn.BatchNorm1d(6))))


def dropout(share: Any) -> Returned:
    return train(share, wrap_ddp(Net(nn.Dropout(0.5))))


def both(share: Any) -> Returned:
    return train(share, wrap_ddp(Net(nn.BatchNorm1d(6), nn.Dropout(0.5))))


def bare(share: Any) -> Returned:
    return train(share, Net())


def summed(share: Any) -> Returned:
    model = wrap_ddp(Net())
    loss = (model(share["x"]) - share["y"][0]).square().sum()
    loss.backward()
    return loss, model


def half(share: Any) -> Returned:
    """Only a part of the model is wrapped."""
    model = Net()
    model.body = wrap_ddp(model.body)  # type: ignore[assignment]
    return train(share, model)


def mean_of_means(share: Any) -> Returned:
    """Each rank divides by the number of its own elements that count."""
    model = wrap_ddp(Net())
    counts = share["x"][:, 0] > share["limit"]
    loss = ((model(share["x"]) - share["y"][0]).square()[:, 0] * counts).sum() / counts.sum()
    loss.backward()
    return loss, model


def loads_itself() -> Returned:
    data = torch.arange(32.0).reshape(8, 4)
    (share,) = make_loader(data, global_batch_size=8)  # type: ignore[arg-type]
    return train({"x": share, "y": [share[:, :1]]}, wrap_ddp(Net()))


def test_a_right_step_passes() -> None:
    assert_matches_single_process(good, BATCH)
    assert_matches_single_process(good, BATCH, world_size=4)


def test_a_step_may_take_its_share_itself() -> None:
    assert_matches_single_process(loads_itself)


def message(step: Any, batch: Any = BATCH, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_matches_single_process(step, batch, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("step", "reasons"),
    [
        (batchnorm, ["Reason: BatchNorm"]),
        (dropout, ["Reason: dropout"]),
        pytest.param(both, ["Reason: dropout", "Reason: BatchNorm"], marks=pytest.mark.slow),
        (summed, ["Reason: every gradient is 1/2 of what it should be"]),
        (bare, ["Reason: the ranks have different gradients for every parameter"]),
    ],
)
def test_the_reason_is_told(step: Any, reasons: list[str]) -> None:
    text = message(step)
    assert all(reason in text for reason in reasons), text
    assert text.count("eason:") == len(reasons)
    assert "gradient of body.0.weight: " in text
    assert "on a batch of 8 samples" in text


def test_a_parameter_that_is_not_synchronised_is_named() -> None:
    text = message(half)
    assert "gradient of head.weight: rank 1 differs from rank 0 by up to" in text
    assert "Reason: the gradients of these parameters were not synchronised" in text


@pytest.mark.slow
def test_uneven_shares_and_uneven_counts() -> None:
    uneven = {"x": torch.randn(5, 4), "y": [torch.randn(5, 1)]}
    assert "Reason: the shares differ in size" in message(
        lambda share: train(share, wrap_ddp(Net())), uneven
    )
    x = torch.randn(8, 4)
    x[:, 0] = torch.tensor([1.0, 1, 1, 1, 1, -1, -1, -1])
    masked = {"x": x, "y": [torch.randn(8, 1)], "limit": 0.0}
    assert "Likely reason: a mean of means" in message(mean_of_means, masked)


def no_gradients(share: Any) -> Returned:
    model = Net()
    return model(share["x"]).mean(), model


def returns_the_loss_only(share: Any) -> Any:
    return train(share, Net())[0]


def fails_on_one(share: Any) -> Returned:
    if get_world_size() > 1 and get_rank() == 1:
        raise KeyError("x")
    return good(share)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (no_gradients, "left no gradients"),
        (returns_the_loss_only, r"returns \(loss, model\)"),
        (fails_on_one, "KeyError: 'x'"),
    ],
)
def test_a_step_that_cannot_be_compared_is_an_error(step: Any, said: str) -> None:
    with pytest.raises(RankFailedError, match=said):
        assert_matches_single_process(step, BATCH)


@pytest.mark.parametrize("batch", [torch.zeros(1, 4), (torch.zeros(4), torch.zeros(5)), "none"])
def test_a_batch_that_cannot_be_shared_out_is_an_error(batch: Any) -> None:
    with pytest.raises(ValueError, match="along their first dimension"):
        assert_matches_single_process(good, batch)
