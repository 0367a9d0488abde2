"""How do the objects that a user names take what a file holds for them?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ddp_utils.models.prefixes import load_model_state
from ddp_utils.models.random_states import RandomStates
from ddp_utils.models.reading import StrPath

__all__ = ["fill_all"]


def fill_all(
    content: Any, targets: Mapping[str, Any], strict: bool, path: StrPath
) -> dict[str, Any]:
    """Fill the targets in their order, and return what is left of the content."""
    wanted = {name: target for name, target in targets.items() if target is not None}
    content = _by_name(content, wanted, path)
    missing = [name for name in wanted if name not in content]
    if missing:
        raise KeyError(
            f"{os.fspath(path)!r} holds no {', '.join(missing)}; it holds {_some(content)}"
        )
    for name, target in wanted.items():
        _fill(target, content[name], name, strict)
    _warn_of_strange_optimizers(wanted)
    return {name: value for name, value in content.items() if name not in wanted}


def _by_name(content: Any, wanted: Mapping[str, Any], path: StrPath) -> Mapping[str, Any]:
    """Return the content as a mapping of names; a bare model state is the one model's."""
    if not isinstance(content, Mapping):
        raise TypeError(
            f"{os.fspath(path)!r} holds a {type(content).__name__} and no dictionary of names: "
            "read it with torch.load"
        )
    models = [name for name, target in wanted.items() if isinstance(target, nn.Module)]
    bare = content and all(isinstance(value, torch.Tensor) for value in content.values())
    if bare and len(models) == 1 and models[0] not in content:
        return {models[0]: content}
    return content


def _fill(target: Any, state: Any, name: str, strict: bool) -> None:
    if isinstance(target, RandomStates):
        target.restore(state)
    elif isinstance(target, nn.Module):
        load_model_state(target, state, strict=strict)
    elif callable(getattr(target, "load_state_dict", None)):
        target.load_state_dict(state)
    elif isinstance(target, Mapping) and isinstance(state, Mapping):
        _check_as_many(name, set(target) <= set(state), target, state)
        for key, part in target.items():
            _fill(part, state[key], f"{name}[{key!r}]", strict)
    elif isinstance(target, (list, tuple)) and isinstance(state, (list, tuple)):
        _check_as_many(name, len(target) == len(state), target, state)
        for i, (part, part_state) in enumerate(zip(target, state, strict=True)):
            _fill(part, part_state, f"{name}[{i}]", strict)
    else:
        raise TypeError(
            f"load_checkpoint({name}=...) fills objects with load_state_dict, and a "
            f"{type(target).__name__} is none. Leave it out: what is not asked for is returned."
        )


def _check_as_many(
    name: str, fits: bool, targets: Collection[Any], states: Collection[Any]
) -> None:
    if not fits:
        held = _some(states) if isinstance(states, Mapping) else str(len(states))
        given = _some(targets) if isinstance(targets, Mapping) else str(len(targets))
        raise KeyError(f"{name}: the file holds the states of {held}, to fill are {given}")


def _warn_of_strange_optimizers(targets: Mapping[str, Any]) -> None:
    """Warn of an optimizer that holds the parameters of a model that has since been replaced."""
    models = {name: t for name, t in targets.items() if isinstance(t, nn.Module)}
    for name, optimizer in targets.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        held = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(p) for model in models.values() for p in model.parameters()}
        if not held or any(id(p) in known for p in held):
            continue
        for model_name, model in models.items():
            if [p.shape for p in model.parameters()] == [p.shape for p in held]:
                warnings.warn(
                    f"load_checkpoint: {name} steps parameters like those of {model_name}, but "
                    "not those: it was made before the model was replaced, so the model would "
                    "never train. Make the optimizer last.",
                    stacklevel=4,
                )


def _some(names: Mapping[str, Any], most: int = 8) -> str:
    shown = ", ".join(map(repr, list(names)[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
