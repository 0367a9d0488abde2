"""Does a training step over several ranks do what it does in one process?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from ddp_utils.ground.errors import RankFailedError
from ddp_utils.ground.trees import map_leaves
from ddp_utils.ground.unwrapping import unwrap
from ddp_utils.start.function import Function, refer_to
from ddp_utils.testing.run import run_distributed
from ddp_utils.world.world import get_rank, get_world_size

__all__ = ["assert_matches_single_process"]

Step = Callable[..., tuple[Tensor, nn.Module]]

SHOWN = 8
"""How many parameters the message names."""


def assert_matches_single_process(
    step: Step,
    batch: Any = None,
    *,
    world_size: int = 2,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    timeout: float = 60,
) -> None:
    """Assert that ranks that share a batch get the loss and the gradients of one process.

    The step runs in one process on the whole batch, and on ``world_size`` ranks on consecutive
    shares of it, each time in new processes and from the same seed.

    Args:
        step: Called as ``step(share)``. It builds the model and wraps it, computes the loss,
            calls ``backward`` and returns ``(loss, model)``, with the gradients still in place.
            Found like any function that ranks run: at the top level of a module, or with
            cloudpickle anywhere.
        batch: Tensors, in any nesting, with the samples along the first dimension. Without it
            the step is called without arguments and takes its share itself, as from
            ``make_loader(dataset, global_batch_size=...)``.
        world_size: Number of ranks.
        rtol: Allowed difference, as a part of a tensor's largest absolute value.
        atol: Allowed difference beside that.
        timeout: Seconds for each of the runs.

    Raises:
        AssertionError: They differ; it names the parameters, by how much they differ, and the
            reason where that can be told: BatchNorm, dropout, a mean of means, a sum as the
            loss, gradients that were not synchronised.
        RankFailedError: The step failed.

    Example:
        >>> def step(share):
        ...     model = wrap_ddp(nn.Linear(4, 1))
        ...     loss = model(share).square().mean()
        ...     loss.backward()
        ...     return loss, model
        >>> assert_matches_single_process(step, torch.randn(8, 4))  # doctest: +SKIP
    """
    samples = _samples(batch, world_size)
    compare = _Comparison(refer_to(step), batch, world_size, rtol, atol, timeout)
    differences = compare()
    if not differences:
        return
    count = "" if samples is None else f" on a batch of {samples} samples"
    lines = [f"over {world_size} ranks the step does not do what it does in one process{count}:"]
    lines += [f"  {difference.text}" for difference in differences[:SHOWN]]
    if len(differences) > SHOWN:
        lines.append(f"  and {len(differences) - SHOWN} more")
    uneven = samples is not None and samples % world_size != 0
    raise AssertionError("\n".join([*lines, _reason(differences, compare, uneven)]))


def _samples(batch: Any, world_size: int) -> int | None:
    """Return how many samples a batch has, None where there is no batch."""
    if batch is None:
        return None
    sizes: set[int] = set()
    map_leaves(lambda leaf: sizes.add(len(leaf)) if isinstance(leaf, Tensor) else None, batch)
    if len(sizes) != 1 or min(sizes) < world_size:
        raise ValueError(
            f"batch: its tensors have {sorted(sizes)} samples along their first dimension; all "
            f"need the same number, and at least one for each of the {world_size} ranks"
        )
    return sizes.pop()


@dataclass
class _Result:
    """What the step left on one rank."""

    loss: float
    samples: int
    gradients: dict[str, Tensor | None]


def _run_step(step: Function, batch: Any, without: Sequence[str]) -> _Result:
    """Run the step on this rank's share."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    rank, world_size = get_rank(), get_world_size()
    shares: list[int] = []

    def share(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        part = leaf.tensor_split(world_size)[rank]
        shares.append(len(part))
        return part

    arguments = () if batch is None else (map_leaves(share, batch),)
    with ExitStack() as stack:
        for probe in without:
            stack.enter_context(PROBES[probe]())
        returned = step.find()(*arguments)
    if not (
        isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], nn.Module)
    ):
        raise TypeError(f"the step returned {type(returned).__name__}: it returns (loss, model)")
    loss, model = returned
    named = unwrap(model).named_parameters()
    gradients = {name: None if p.grad is None else p.grad.detach().cpu() for name, p in named}
    if all(gradient is None for gradient in gradients.values()):
        raise ValueError(
            "the step left no gradients: it calls loss.backward(), and leaves zero_grad() away"
        )
    return _Result(float(loss), shares[0] if shares else 1, gradients)


@dataclass
class _Difference:
    """One thing that differs."""

    text: str
    between_ranks: bool = False
    ratio: float | None = None
    """The gradient over ranks as a multiple of that in one process, if it is one."""


@dataclass
class _Comparison:
    """Runs the step both ways; with the names of probes, without what those take out."""

    step: Function
    batch: Any
    world_size: int
    rtol: float
    atol: float
    timeout: float
    parameters: int = field(default=0, init=False)

    def agrees(self, without: Sequence[str]) -> bool:
        """Whether all is equal without these; False where the step cannot do without."""
        try:
            return not self(without)
        except RankFailedError:
            return False

    def __call__(self, without: Sequence[str] = ()) -> list[_Difference]:
        (single,), ranks = (
            run_distributed(
                _run_step,
                self.step,
                self.batch,
                without,
                world_size=size,
                timeout=self.timeout,
            )
            for size in (1, self.world_size)
        )
        self.parameters = len(single.gradients)
        return [*self._losses(single, ranks), *self._gradients(single, ranks)]

    def _losses(self, single: _Result, ranks: Sequence[_Result]) -> Iterator[_Difference]:
        total = sum(result.samples for result in ranks)
        mean = sum(result.loss * result.samples for result in ranks) / total
        if not self._close(torch.tensor(mean), torch.tensor(single.loss)):
            yield _Difference(f"loss: {single.loss:.6g} in one process, {mean:.6g} over the ranks")

    def _gradients(self, single: _Result, ranks: Sequence[_Result]) -> Iterator[_Difference]:
        for name in dict.fromkeys([*single.gradients, *ranks[0].gradients]):
            expected = single.gradients.get(name)
            difference = self._gradient([rank.gradients.get(name) for rank in ranks], expected)
            if difference is not None:
                difference.text = f"gradient of {name}: {difference.text}"
                yield difference

    def _gradient(
        self, found: Sequence[Tensor | None], expected: Tensor | None
    ) -> _Difference | None:
        lacking = [str(rank) for rank, gradient in enumerate(found) if gradient is None]
        if lacking or expected is None:
            if len(lacking) == len(found) and expected is None:
                return None
            where = "in one process" if expected is None else f"on rank {', '.join(lacking)}"
            return _Difference(f"there is none {where}", between_ranks=expected is not None)
        own = [gradient for gradient in found if gradient is not None]
        for rank, gradient in enumerate(own):
            if not self._close(gradient, own[0]):
                text = f"rank {rank} differs from rank 0 by up to {_distance(gradient, own[0]):.3g}"
                return _Difference(text, between_ranks=True)
        if self._close(own[0], expected):
            return None
        largest = f"{expected.abs().max():.3g}"
        text = f"differs by up to {_distance(own[0], expected):.3g} (largest value {largest})"
        return _Difference(text, ratio=self._ratio(own[0], expected))

    def _close(self, found: Tensor, expected: Tensor) -> bool:
        if found.shape != expected.shape:
            return False
        if found.numel() == 0:
            return True
        allowed = self.atol + self.rtol * float(expected.abs().max())
        return _distance(found, expected) <= allowed

    def _ratio(self, found: Tensor, expected: Tensor) -> float | None:
        """Return by which factor they differ, None where it is not one factor for all."""
        if found.shape != expected.shape:
            return None
        square = float((expected.double() ** 2).sum())
        factor = float((found.double() * expected.double()).sum()) / square if square else 0.0
        return factor if self._close(found, expected * factor) else None


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, infinite where only one is a number."""
    if one.shape != other.shape:
        return float("inf")
    difference = (one.double() - other.double()).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


def _reason(differences: Sequence[_Difference], compare: _Comparison, uneven: bool) -> str:
    """Return what the likely reason is; a guess is tried out where that is possible."""
    apart = [difference for difference in differences if difference.between_ranks]
    if apart and len(apart) >= compare.parameters:
        return (
            "Reason: the ranks have different gradients for every parameter, so nothing has "
            "synchronised them. Wrap the model with wrap_ddp(), and call the wrapped model."
        )
    if apart:
        return (
            "Reason: the gradients of these parameters were not synchronised, while others were. "
            "They were used around the wrapper (model.module.part(x)), or added or unfrozen "
            "after the model was wrapped."
        )
    for probes in (("batch statistics",), ("dropout",), tuple(PROBES)):
        if compare.agrees(without=probes):
            return "\n".join(REASONS[probe] for probe in probes)
    ratios = {round(d.ratio, 3) for d in differences if d.ratio is not None}
    if ratios == {round(1 / compare.world_size, 3)}:
        return (
            f"Reason: every gradient is 1/{compare.world_size} of what it should be. The loss is a "
            "sum over the samples, and DDP takes the mean over ranks: use the mean as the loss, "
            "or multiply it by the world size."
        )
    if uneven:
        return (
            "Reason: the shares differ in size, so that the mean over ranks of each rank's mean is "
            "not the mean over all samples. Weight the loss with global_scale(number of samples)."
        )
    return (
        "Likely reason: a mean of means. Where each rank divides by a count of its own (of "
        "tokens, of unmasked elements), the mean over ranks is not the mean over all: weight the "
        "loss with global_scale(count). Or the step draws random numbers, or looks beyond its "
        "own samples."
    )


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Let dropout pass everything."""
    attention = nn.functional.scaled_dot_product_attention

    def passes(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input

    def attends(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args[:4], **kwargs | {"dropout_p": 0.0})

    functional = "torch.nn.functional."
    with ExitStack() as stack:
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
            stack.enter_context(mock.patch(functional + name, passes))
        stack.enter_context(mock.patch(functional + "feature_alpha_dropout", passes))
        stack.enter_context(mock.patch(functional + "scaled_dot_product_attention", attends))
        yield


@contextmanager
def _without_batch_statistics() -> Iterator[None]:
    """Let BatchNorm use its running statistics, which the samples at hand do not change."""
    original = nn.functional.batch_norm

    def normalizes(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        mean = input.new_zeros(input.shape[1]) if running_mean is None else running_mean
        var = input.new_ones(input.shape[1]) if running_var is None else running_var
        return original(input, mean, var, weight, bias, False, momentum, eps)

    with mock.patch("torch.nn.functional.batch_norm", normalizes):
        yield


PROBES = {"dropout": _without_dropout, "batch statistics": _without_batch_statistics}

REASONS = {
    "batch statistics": (
        "Reason: BatchNorm. It normalizes with the statistics of each rank's own samples; without "
        "that, all is equal. wrap_ddp(model, sync_batchnorm=True) uses those of all "
        "ranks on accelerators; GroupNorm or LayerNorm have no such question."
    ),
    "dropout": (
        "Reason: dropout. Ranks drop other elements than one process does; without that, all is "
        "equal. That is how it should be in training: compare with p=0 or in eval mode."
    ),
}
