"""What does a wrapped model do that torch's own ``DistributedDataParallel`` does not?

It passes attributes on to the model inside it, keeps the buffers of all ranks the same after
each training forward, watches the gradients, and refuses forwards that other ranks cannot match.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from ddp_utils.agree.loggers import get_logger
from ddp_utils.callsite import refuse_in_section
from ddp_utils.ground import settings
from ddp_utils.ground._torch_private import (
    JoinedUntilExit,
    in_join,
    is_to_rebuild_buckets,
    reduces_in_python,
    skip_frame,
    skip_frames,
    without_reducer,
)
from ddp_utils.ground.errors import DistributedError
from ddp_utils.ground.unwrapping import uncompiled
from ddp_utils.models.buffers import BufferSync
from ddp_utils.models.comm_hooks import CommHook, register_hook
from ddp_utils.models.gradient_watch import GradientWatch
from ddp_utils.talk.circle import circle_of
from ddp_utils.talk.debug import compare
from ddp_utils.world.world import get_rank

__all__ = ["WrappedModel"]

_logger = get_logger("ddp_utils.models")

FORWARD = "a training forward"
NOT_FORWARDED = frozenset({"buffer_hook"})
"""Names that torch asks its own wrapper for, to see whether they are there."""
NOT_COPIED = (
    "process_group",
    "reducer",
    "logger",
    "_comm_hooks",
    "_buffers_of_all",
    "_watch",
    "_passes_on",
    "_compiled_call_impl",
)
"""What belongs to this process and this group, and is made anew in a copy, or by the user."""


class WrappedModel(DistributedDataParallel):
    """What :func:`wrap_ddp` returns."""

    def __init__(
        self, module: nn.Module, *, sync_buffers: bool, comm_hook: CommHook, **ddp_kwargs: Any
    ) -> None:
        super().__init__(module, **ddp_kwargs)
        # Set afterwards, so that buffers are the same on all ranks at the start either way, and
        # under the name that every version of torch takes without a warning.
        self.broadcast_buffers = sync_buffers
        self._comm_hook = comm_hook
        register_hook(self, comm_hook)
        self._start()

    def _start(self) -> None:
        """Make what is made anew in each copy; from here on attributes are passed on."""
        self._has_peers = dist.get_world_size(self.process_group) > 1
        self._compares = settings.DEBUG.get()
        self._buffers_of_all: BufferSync | None = None
        if self.broadcast_buffers and self._has_peers:
            self._buffers_of_all = BufferSync(
                self.module, self.parameters_to_ignore, self.process_group, self.device
            )
        self._watch: GradientWatch | None = None
        if self.mixed_precision is None and not reduces_in_python(self):
            self._watch = GradientWatch(self)
        self._passes_on = True

    @skip_frame
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._before_forward()
        puts_off = self._puts_reducer_off()
        with without_reducer(self) if puts_off else nullcontext():
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._after_forward(output, puts_off)
        return output

    @skip_frames
    def _before_forward(self) -> None:
        self._finish_buffers()
        uneven_loader = self._uneven_loader()
        if self._trains and self._has_peers and not in_join(self):
            refuse_in_section(FORWARD)
            if uneven_loader is not None:
                raise self._would_wait(uneven_loader)
            if self._compares:
                compare(circle_of(self.process_group, FORWARD), FORWARD)
        if self._watch is not None:
            self._watch.before_forward()

    @skip_frames
    def _after_forward(self, output: Any, reducer_put_off: bool) -> None:
        synchronises = self._trains and self.require_backward_grad_sync and not in_join(self)
        if self._buffers_of_all is not None and synchronises:
            self._buffers_of_all.after_forward(self.module)
            self._buffers_of_all.end_with_backward_of(output)
        if self._watch is not None:
            self._watch.after_forward(output, reducer_put_off)

    def _puts_reducer_off(self) -> bool:
        """Whether this forward leaves the reducer to its backward, if ever there is one.

        One rank may evaluate alone. With gradients torch's forward would wait for the others to
        rebuild buckets with it, or leave a reducer armed, which cannot rebuild them any more.
        """
        evaluates = self._watch is not None and not self._trains and not in_join(self)
        return evaluates and is_to_rebuild_buckets(self)

    @property
    def _trains(self) -> bool:
        """Whether the model is in ``train()`` mode; it may have been told without the wrapper."""
        return uncompiled(self.module).training

    @staticmethod
    def _uneven_loader() -> str | None:
        passes = sys.modules.get("ddp_utils.data.passes")  # without it none is being walked
        return None if passes is None else passes.take_uneven_draw()

    @staticmethod
    def _would_wait(loader: str) -> DistributedError:
        return DistributedError(
            f"rank {get_rank()}: a training forward while {loader} is being walked, whose "
            "ranks have unequal numbers of batches: the last batches would wait for ever for "
            "ranks that have none. Make the training loader with pad=True (or drop_last="
            "True), call model.eval() to evaluate, or train inside model.join()."
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether torch itself sends the buffers before a forward: only inside ``join()``.

        There ranks that are out of batches take part, and they know torch's order of things.
        """
        return in_join(self) and bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinedUntilExit(self, super().join_hook(**kwargs))  # type: ignore[no-untyped-call]

    def _finish_buffers(self) -> None:
        """Let nobody see buffers that others have sent and that have not been put in place."""
        buffers = self.__dict__.get("_buffers_of_all")
        if buffers is not None:
            buffers.finish()

    def train(self, mode: bool = True) -> Self:
        self._finish_buffers()
        super().train(mode)  # type: ignore[no-untyped-call]
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._finish_buffers()
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        watch = self.__dict__.get("_watch")
        if watch is not None:
            watch.look_again()  # another dtype or device would leave the reducer behind
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_buffers()
        return super().state_dict(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self._finish_buffers()
        return super().named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        self._finish_buffers()  # also for whoever asks for the model inside
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            special = name in NOT_FORWARDED or (name.startswith("__") and name.endswith("__"))
            if module is None or special:
                raise
        return getattr(uncompiled(module), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_the_modules(name):
            setattr(uncompiled(self.module), name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_the_modules(name):
            delattr(uncompiled(self.module), name)
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(uncompiled(self.module))})  # type: ignore[no-untyped-call]

    def _is_the_modules(self, name: str) -> bool:
        own = self.__dict__
        if "_passes_on" not in own or name in own or name == "module":
            return False
        module = uncompiled(self.module)
        # The class first: asking the object may run a property.
        has = hasattr(type(module), name) or hasattr(module, name)
        return has and not hasattr(type(self), name) and name not in NOT_FORWARDED

    def shadowed_names(self) -> list[str]:
        """Return the names of the module that through the wrapper mean DDP's own attribute."""
        of_every_module = set(dir(nn.Module()))
        own = {*dir(DistributedDataParallel), *self.__dict__} - of_every_module
        public = {name for name in dir(uncompiled(self.module)) if not name.startswith("_")}
        return sorted(own & public - of_every_module)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        kept = self._kept()
        if not dist.is_initialized():
            bare: nn.Module = copy.deepcopy(self.module, memo)
            return bare
        memo[id(self._comm_hook)] = self._comm_hook  # shared: it may hold a process group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied  # before the model, which may lead back here (a trainer's ring)
        copied.__setstate__(copy.deepcopy(kept, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the model; where it is loaded without a group, it comes out bare."""
        return _copied, (type(self), self._kept())

    def _kept(self) -> dict[str, Any]:
        """Return what a copy has of this one's state; refuse where a copy could not work."""
        self._finish_buffers()
        if self._comm_hook == "post_local_sgd":
            raise TypeError(
                "a model with comm_hook='post_local_sgd' belongs to the groups it was made with "
                "and cannot be copied or pickled: copy unwrap(model), or save its state_dict()"
            )
        if dist.is_initialized() and self.process_group is not dist.group.WORLD:
            raise TypeError(
                "a model that was wrapped with a process_group of its own cannot be copied or "
                "pickled: copy unwrap(model), or save its state_dict()"
            )
        return {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._comm_hooks = []
        self._has_rebuilt_buckets = False
        if self.static_graph:  # its new reducer, too, waits for a first backward to be told to add
            self._static_graph_delay_allreduce_enqueued = False
        register_hook(self, self._comm_hook)
        self._start()


def _copied(kind: type[WrappedModel], state: dict[str, Any]) -> nn.Module:
    if not dist.is_initialized():
        _logger.info("a wrapped model was loaded without a process group: it comes out bare")
        module: nn.Module = state["_modules"]["module"]
        return module
    model = kind.__new__(kind)
    model.__setstate__(state)
    return model
