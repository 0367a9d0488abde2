"""What are a state dictionary's keys without the prefixes that wrappers add?

``DistributedDataParallel``, ``DataParallel`` and ``AveragedModel`` put ``module.`` before every
key of the model inside them, ``torch.compile`` puts ``_orig_mod.``, and nested they put several.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp_utils.ground.unwrapping import unwrap, wrapper_layers

State = TypeVar("State", bound=MutableMapping[str, Any])

__all__ = ["load_model_state", "strip_module_prefix"]

PREFIXES = ("module.", "_orig_mod.")
COUNTER = "n_averaged"
"""What ``AveragedModel`` keeps beside the model inside it, without a prefix of that model."""


def strip_module_prefix(state_dict: State, model: nn.Module | None = None) -> State:
    """Return a state dictionary with the keys of the bare model.

    Leading ``module.`` and ``_orig_mod.`` go, in any order and number, where every key has them.
    The order of the keys, the type of the mapping and its ``_metadata`` stay; no tensor is
    copied and the input is untouched. Applied twice it does nothing more. Never communicates.

    Args:
        state_dict: What ``state_dict()`` of a wrapped or bare model returned, or a file held.
        model: The model, wrapped or bare, that the keys are for. With it, a child that is really
            called ``module`` is never taken for a wrapper; without it, only where it has
            siblings (a bare model whose ONLY child is called ``module`` looks like a wrapped one).

    Returns:
        A new mapping. ``n_averaged`` of an ``AveragedModel`` stays, under that name (of two, the
        outer one), unless the model has a buffer of that name.

    Example:
        >>> strip_module_prefix({"module._orig_mod.weight": 1, "module._orig_mod.bias": 2})
        {'weight': 1, 'bias': 2}
        >>> strip_module_prefix({"n_averaged": 7, "module.module.weight": 1})
        {'n_averaged': 7, 'weight': 1}
        >>> strip_module_prefix({"module.weight": 1, "head.weight": 2})
        {'module.weight': 1, 'head.weight': 2}
    """
    return _stripped(state_dict, model)[0]


class LoadedKeys(NamedTuple):
    """Which keys of the bare model the state lacked, and which of the state had no place."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_model_state(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
) -> LoadedKeys:
    """Load a state dictionary into a model, either of them wrapped or bare.

    Not a collective: each rank loads what it was given. ``n_averaged`` reaches an
    ``AveragedModel`` around the model and is left out where there is none.

    Args:
        model: The model, in any nesting of wrappers or none.
        state_dict: A state of the same model, in any nesting of wrappers or none, or in an
            attribute of a trainer class that has no other state (``model.`` before every key).
        strict: Whether a missing or unexpected key is an error, as in ``load_state_dict``.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, named as in the bare model.

    Raises:
        RuntimeError: Keys or shapes do not fit (torch's own error), with ``strict=True``.
        ValueError: Not one key fits, also with ``strict=False``, where torch would keep the
            model's random weights without a word.

    Example:
        >>> from torch import nn
        >>> saved = nn.DataParallel(nn.Linear(2, 1)).state_dict()
        >>> load_model_state(nn.Linear(2, 1), saved).missing_keys
        []
    """
    bare = unwrap(model)
    own = bare.state_dict()
    given = state_dict if isinstance(state_dict, MutableMapping) else dict(state_dict)
    stripped, counter = _stripped(given, model)
    if COUNTER not in own and COUNTER in stripped:
        counter = stripped.pop(COUNTER)
    bare_state = _named_like(_out_of_owner(stripped, own), bare)
    if own and bare_state and not any(key in own for key in bare_state):
        raise ValueError(
            f"not one key of this state fits the model. The state has {_first(bare_state)}; the "
            f"model has {_first(own)}. Of a whole checkpoint, pass the model's part "
            '(checkpoint["model"]); of a larger model, the keys of this part, without their '
            "common beginning."
        )
    result = bare.load_state_dict(bare_state, strict=strict)
    if counter is not None:
        _set_counter(model, counter)
    return LoadedKeys(list(result.missing_keys), list(result.unexpected_keys))


def _stripped(state_dict: State, model: nn.Module | None) -> tuple[State, Any]:
    """Return the state under bare keys, and the counter of the outermost wrapper that has one."""
    prefix = _common_prefix(state_dict)
    if model is not None:
        prefix = _prefix_that_fits(prefix, state_dict, unwrap(model).state_dict().keys())
    whole = "".join(prefix)
    size = len(whole)
    levels = ("".join(prefix[:depth]) for depth in range(len(prefix)))
    counters = [level + COUNTER for level in levels if level + COUNTER in state_dict]
    left_out = counters if whole + COUNTER in state_dict else []  # the model's own has the name

    def rename(key: Any) -> Any:
        return key[size:] if size and key.startswith(whole) else _without(prefix, key)

    bare = _renamed(state_dict, rename, lambda path: _without_path(whole, path), left_out)
    return bare, state_dict[counters[0]] if counters else None


def _common_prefix(keys: Collection[Any]) -> tuple[str, ...]:
    """Return the wrappers' prefixes that every key starts with, from the outside in.

    A counter may stand at any level instead: it belongs to the wrapper of that level.
    """
    levels: list[str] = []
    if not all(issubclass(kind, str) for kind in set(map(type, keys))):
        return ()
    rest, whole = list(keys), ""
    while True:
        counter = whole + COUNTER
        if counter in keys:
            rest = [key for key in rest if key != counter]
        if not rest:
            break
        # What the first and the last in the order of strings start with, all between them do.
        ends = min(rest), max(rest)
        prefix = next((p for p in PREFIXES if all(k.startswith(whole + p) for k in ends)), "")
        if not prefix:
            break
        levels.append(prefix)
        whole += prefix
    return tuple(levels)


def _prefix_that_fits(
    prefix: tuple[str, ...], keys: Iterable[Any], wanted: Iterable[str]
) -> tuple[str, ...]:
    """Return as much of the prefix, from the outside, as leaves most keys that the model has."""
    wanted = set(wanted)
    keys = list(keys)
    fits = [
        sum(_without(prefix[:depth], key) in wanted for key in keys)
        for depth in range(len(prefix) + 1)
    ]
    return prefix[: fits.index(max(fits))] if any(fits) else prefix


def _without(prefix: tuple[str, ...], key: Any) -> Any:
    for level in prefix:
        if not key.startswith(level):
            break
        key = key[len(level) :]
    return key


def _without_path(whole: str, path: str) -> str | None:
    """Return a module's path inside the wrappers, or None for a wrapper's own."""
    return path[len(whole) :] if f"{path}.".startswith(whole) else None


def _out_of_owner(state_dict: State, own: Collection[str]) -> State:
    """Return a state without one name before every key, if that makes it exactly the model's.

    A trainer class that holds the network in an attribute saves it so: ``model.layer.weight``.
    """
    owner = str(next(iter(state_dict), "")).partition(".")[0] + "."
    if owner[:-1] in {key.partition(".")[0] for key in own}:
        return state_dict
    if not all(isinstance(key, str) and key.startswith(owner) for key in state_dict):
        return state_dict
    size = len(owner)
    if {_uncompiled(key[size:]) for key in state_dict} != set(map(_uncompiled, own)):
        return state_dict
    return _renamed(state_dict, lambda key: key[size:], lambda path: _without_path(owner, path))


def _named_like(state_dict: State, model: nn.Module) -> State:
    """Return the state under the model's names, where parts of either of them are compiled.

    A submodule that went through ``torch.compile`` has ``_orig_mod.`` in the middle of its keys.
    """
    names = {_uncompiled(name): name for name in model.state_dict()}
    paths = {_uncompiled(path): path for path, _ in model.named_modules()}
    return _renamed(
        state_dict,
        lambda key: names.get(_uncompiled(key), key),
        lambda path: paths.get(_uncompiled(path), path),
    )


def _uncompiled(name: Any) -> Any:
    return (
        ".".join(p for p in name.split(".") if p != "_orig_mod") if isinstance(name, str) else name
    )


def _renamed(
    state_dict: State,
    rename: Callable[[Any], Any],
    rename_path: Callable[[str], str | None],
    left_out: Collection[Any] = (),
) -> State:
    """Return the same kind of mapping under other keys; of two that meet, the first stays."""
    new = _emptied(state_dict)
    for key, value in state_dict.items():
        if key not in left_out:
            new.setdefault(rename(key), value)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        kept = _emptied(metadata)
        for path, facts in metadata.items():
            new_path = rename_path(path)
            if new_path is not None:
                kept[new_path] = facts
        new._metadata = kept  # type: ignore[attr-defined]  # torch keeps it on the mapping
    return new


def _emptied(mapping: State) -> State:
    """Return another mapping of this kind, with what hangs on it and without its items."""
    if type(mapping) in (dict, OrderedDict):  # nearly always; the copy below takes its time
        new = type(mapping)()
        if isinstance(mapping, OrderedDict):
            vars(new).update(vars(mapping))
        return new
    new = copy.copy(mapping)
    new.clear()
    return new


def _set_counter(model: nn.Module, value: Any) -> None:
    for layer in wrapper_layers(model):
        if isinstance(layer, AveragedModel):
            layer.n_averaged.copy_(torch.as_tensor(value))
            return


def _first(keys: Iterable[Any], most: int = 3) -> str:
    keys = list(keys)
    shown = ", ".join(repr(key) for key in keys[:most])
    return shown if len(keys) <= most else f"{shown} and {len(keys) - most} more"
