"""Did every gradient pass the reducer that averages it over the ranks?

DDP's reducer is armed by a forward through the wrapped model and averages the gradients of the
next backward. Torch says nothing about a gradient that comes while it is not armed, or that
belongs to a parameter it does not know; and where a parameter gets no gradient, the other ranks
wait for it. So we look at the gradients themselves, with a hook on each parameter: a forward
hook would miss ``model.module.loss(x)`` and suspect copies of the model that nobody trains.

The hooks stay for the first steps, or for all of them under ``DDP_UTILS_DEBUG``. After that one
question to the reducer at the end of each backward is left, which costs next to nothing.
"""

from __future__ import annotations

import math
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_utils.ground import settings
from ddp_utils.ground._torch_private import (
    arm,
    at_end_of_backward,
    rebuild_buckets,
    reduced_parameters,
    reducer_is_waiting,
)
from ddp_utils.ground.errors import DistributedError
from ddp_utils.ground.trees import flatten
from ddp_utils.world.world import get_rank

__all__ = ["GradientWatch", "models_that_average", "tensors_with_backward"]

FIRST_STEPS = 10
"""Synchronised backward passes with a hook on each parameter."""
LOOK_AGAIN = 100
"""Every so many forwards after those, look for parameters that DDP does not know."""
MOST_SHOWN = 6
UNUSED = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")
"""What torch says of parameters by their numbers, beside their names where it is asked to."""

Reason = Literal["around", "half_no_sync", "twice", "unknown", "converted"]

ADVICE: dict[Reason, str] = {
    "around": "their forward did not go through the wrapped model. Call model(...), not "
    "model.module(...), a part of it or a method of it; if a later backward of the same step is "
    "to average them, run this one under model.no_sync()",
    "half_no_sync": "their forward ran inside no_sync() or accumulate() and their backward "
    "outside. Put both inside",
    "twice": "this is another backward after one forward had already been averaged. Add the "
    "losses and call backward() once, or call it right after each forward",
    "converted": "they were given another dtype or device after wrapping, and DDP has lost sight "
    "of them. Convert the model before wrap_ddp, or compute in another dtype under torch.autocast",
    "unknown": "DDP does not know these parameters, which were replaced, added or unfrozen after "
    "wrapping. Call wrap_ddp after the last change of the model",
}


class GradientWatch:
    """Watches the gradients of one wrapped model on this rank. Never communicates."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        names = {p: name for name, p in ddp.module.named_parameters()}
        self._names = {p: names[p] for p in reduced_parameters(ddp)}
        self._may_skip = ddp.find_unused_parameters or ddp.static_graph
        self._steps_left: float = math.inf if settings.DEBUG.get() else FIRST_STEPS
        self._forwards = 0
        self._looks = True
        self._unknown: dict[nn.Parameter, str] = {}
        self._converted: set[nn.Parameter] = set()
        self._nodes: dict[nn.Parameter, Node] = {}
        self._hooks: list[RemovableHandle] = []
        self._armed = False
        self._put_off = False
        self._fired: set[nn.Parameter] = set()
        self._begun: Reason | None = None
        self._astray: dict[str, Reason] = {}
        self._warned: set[str] = set()
        for parameter in self._names:
            self._watch(parameter)
        _watches.add(self)

    def before_forward(self) -> None:
        """Look for parameters that were added, unfrozen or converted after DDP took stock."""
        ddp = self._ddp()
        if ddp is None or not torch.is_grad_enabled():
            return
        self._forwards += 1
        if not (self._looks or self._forwards % LOOK_AGAIN == 0):
            return
        self._looks = self._steps_left > 0
        for name, parameter in ddp.named_parameters():
            name = name.removeprefix("module.")
            if not parameter.requires_grad or name in ddp.parameters_to_ignore:
                continue
            if parameter not in self._names and parameter not in self._unknown:
                self._unknown[parameter] = name
                self._watch(parameter)
            elif get_gradient_edge(parameter).node is not self._nodes[parameter]:
                self._converted.add(parameter)
                self._watch(parameter)

    def look_again(self) -> None:
        """Look for such parameters before the next forward, whichever it is."""
        self._looks = True

    def after_forward(self, output: Any, reducer_put_off: bool) -> None:
        """Note whether the reducer is armed now, and see to being told when a backward begins.

        A reducer that was put off is armed then, and rebuilds its buckets when that has ended.
        """
        ddp = self._ddp()
        if ddp is None or not torch.is_grad_enabled():
            return
        self._begun = None  # also if the last backward broke off
        synchronised = ddp.require_backward_grad_sync
        if synchronised:
            self._armed = not reducer_put_off
            self._put_off = reducer_put_off
            self._fired.clear()
        if synchronised or self._steps_left > 0:
            begin = partial(self._on_begin, "twice" if synchronised else "half_no_sync")
            tensors = tensors_with_backward(output)
            for tensor in tensors:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]
            if not tensors:
                self._arm_if_put_off()

    def before_optimizer_step(self) -> None:
        """Raise where a backward that nobody saw the end of has left other ranks waiting."""
        if self._steps_left <= 0:
            self._ask_reducer()
        elif self._armed and self._fired and (unused := self._not_fired()):
            raise self._unused(unused)

    def _watch(self, parameter: nn.Parameter) -> None:
        node = get_gradient_edge(parameter).node
        on_gradient = weakref.WeakMethod(self._on_gradient)

        def hook(*_: object) -> None:
            method = on_gradient()
            if method is not None:
                method(parameter)

        # The node is kept: torch itself holds it only while somebody else does.
        self._nodes[parameter] = node
        self._hooks.append(node.register_hook(hook))

    def _on_begin(self, reason: Reason, _: torch.Tensor) -> None:
        """An output's gradient has come: the first of all, and in the outermost backward.

        A parameter's may come in an inner one first, with reentrant checkpointing.
        """
        if self._begun is None:
            at_end_of_backward(self._on_end)
            self._arm_if_put_off()
        self._begun = reason

    def _arm_if_put_off(self) -> None:
        ddp = self._ddp()
        if self._put_off and not self._armed and ddp is not None:
            arm(ddp)
            self._armed = True

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        ddp = self._ddp()
        if ddp is None:
            return
        if self._begun is None:
            self._begun = "around"
            at_end_of_backward(self._on_end)
        self._fired.add(parameter)
        if parameter in self._unknown:
            self._astray[self._unknown[parameter]] = "unknown"
        elif parameter in self._converted:
            self._astray[self._names[parameter]] = "converted"
        elif ddp.require_backward_grad_sync and not _will_be_averaged(parameter):
            self._astray[self._names[parameter]] = self._begun

    def will_average(self, parameter: nn.Parameter) -> bool:
        """Whether this model's reducer takes the parameter's next gradient."""
        return self._armed and parameter in self._names

    def model_of(self, parameter: nn.Parameter) -> DistributedDataParallel | None:
        """Return the watched model if the parameter is one that it averages."""
        return self._ddp() if parameter in self._names else None

    def _on_end(self) -> None:
        begun, self._begun = self._begun, None
        self._warn_of_astray()
        if self._steps_left <= 0:
            self._after_reducer(self._ask_reducer)
        elif self._armed and self._fired:
            unused = self._not_fired()
            if unused and begun == "around":
                return  # perhaps only an inner backward has ended
            if unused:
                raise self._unused(unused)
            self._finish_step()

    def _not_fired(self) -> list[str]:
        if self._may_skip:
            return []
        return [name for p, name in self._names.items() if p not in self._fired]

    def _finish_step(self) -> None:
        self._armed = False
        self._steps_left -= 1
        if self._steps_left <= 0:
            for handle in self._hooks:
                handle.remove()
            self._hooks.clear()
        if self._put_off:
            self._put_off = False
            self._after_reducer(self._rebuild_buckets)

    def _after_reducer(self, callback: Callable[[], None]) -> None:
        """Call back after the reducer's own end of this backward, which may not be queued yet."""
        at_end_of_backward(lambda: at_end_of_backward(callback))

    def _rebuild_buckets(self) -> None:
        ddp = self._ddp()
        if ddp is not None:
            rebuild_buckets(ddp)

    def _ask_reducer(self) -> None:
        ddp = self._ddp()
        complaint = None if ddp is None or self._may_skip else reducer_is_waiting(ddp)
        if complaint is not None:
            found = UNUSED.search(complaint)
            names = list(self._names.values())
            raise self._unused([names[int(i)] for i in found[1].split()] if found else ["?"])

    def _unused(self, names: Sequence[str]) -> DistributedError:
        ddp = self._ddp()
        now = {} if ddp is None else dict(ddp.module.named_parameters())
        then = {name: p for p, name in self._names.items()}
        gone = [n for n in names if n in then and now.get(n) is not then[n]]
        frozen = [n for n in names if n not in gone and n in now and not now[n].requires_grad]
        why = "".join(
            f" {what} after wrapping: {_listed(which)}; call wrap_ddp after the last change."
            for which, what in ((gone, "Replaced"), (frozen, "Frozen"))
            if which
        )
        return DistributedError(
            f"rank {get_rank()}: a synchronised backward has ended without a gradient for "
            f"{_listed(names)}, for which the other ranks wait.{why} If the loss may leave "
            "parameters out, wrap with find_unused_parameters=True; if they are never trained, "
            "call requires_grad_(False) on them before wrapping; if several losses come from "
            "one forward, add them and call backward() once."
        )

    def _warn_of_astray(self) -> None:
        astray, self._astray = self._astray, {}
        for reason, advice in ADVICE.items():
            names = [n for n, why in astray.items() if why == reason and n not in self._warned]
            self._warned.update(names)
            if names:
                told = (
                    f"rank {get_rank()}: the gradients of {_listed(names)} were not averaged over "
                    f"the ranks: {advice}."
                )
                if reason == "converted":  # nothing of this kind is ever meant
                    raise DistributedError(told)
                warnings.warn(told, RuntimeWarning, stacklevel=2)


_watches: weakref.WeakSet[GradientWatch] = weakref.WeakSet()


def models_that_average(parameter: nn.Parameter) -> list[DistributedDataParallel]:
    """Return the wrapped models of this process that the parameter's gradient belongs to."""
    found = [watch.model_of(parameter) for watch in _watches]
    return [model for model in found if model is not None]


def _will_be_averaged(parameter: nn.Parameter) -> bool:
    """Whether a wrapped model takes the parameter's gradient: several may share it."""
    return any(watch.will_average(parameter) for watch in _watches)


def _before_optimizer_step(*_: object) -> None:
    for watch in tuple(_watches):
        watch.before_optimizer_step()


register_optimizer_step_pre_hook(_before_optimizer_step)


def tensors_with_backward(output: Any, depth: int = 3) -> list[torch.Tensor]:
    """Return the tensors of a forward's output from which a backward can begin.

    They are looked for in trees, and if there is none, in the attributes of objects.
    """
    leaves = [output] if isinstance(output, torch.Tensor) else flatten(output)[1]
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    if not found and depth:
        for leaf in leaves:
            if hasattr(leaf, "__dict__") and not isinstance(leaf, (torch.Tensor, nn.Module, type)):
                found += tensors_with_backward(vars(leaf), depth - 1)
    return found


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MOST_SHOWN])
    return shown if len(names) <= MOST_SHOWN else f"{shown} and {len(names) - MOST_SHOWN} more"
