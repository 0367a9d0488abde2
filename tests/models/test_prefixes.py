"""Keys of state dictionaries, with and without wrappers."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP imports it; so every rank finds it loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_utils import load_model_state, strip_module_prefix, unwrap


class Layers(nn.Module):
    """Parameters, buffers, a counter of its own and something beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.tensor(3))

    def get_extra_state(self) -> Any:
        return {"version": 7}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 7}


class Renamed(nn.Module):
    """A model with a child that is really called ``module``."""

    def __init__(self, *, siblings: bool, deep: bool = False) -> None:
        super().__init__()
        self.module: nn.Module = nn.Linear(2, 3)
        if deep:
            self.module.module = nn.Linear(1, 1)
        if siblings:
            self.head = nn.Linear(3, 1)


def in_averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model)


def in_compiled(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        return model  # torch refuses to compile what it has just compiled
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


class LikeDdp(nn.DataParallel):
    """DDP names its keys as ``DataParallel`` does, which needs no group."""


WRAPPERS = {
    "ddp": LikeDdp,
    "dp": nn.DataParallel,
    "compile": in_compiled,
    "averaged": in_averaged,
}
nestings = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5)


def nested(model: nn.Module, wrappers: list[str]) -> nn.Module:
    for name in wrappers:
        model = WRAPPERS[name](model)
    return model


def without_counter(state: Any, wrappers: list[str]) -> Any:
    """Return the state as the bare model's would be, and check the counter that came with it."""
    if "averaged" in wrappers:
        assert state["n_averaged"].dtype is torch.int64
        assert next(iter(state)) == "n_averaged"
        state = copy.copy(state)
        del state["n_averaged"]
    return state


@pytest.mark.parametrize("with_model", [False, True])
@settings(deadline=None)
@given(wrappers=nestings)
def test_bare_wrapped_bare_is_the_identity(with_model: bool, wrappers: list[str]) -> None:
    model = nested(Layers(), wrappers)
    bare = unwrap(model)
    before = list(model.state_dict())
    wrapped_state = model.state_dict()
    stripped = strip_module_prefix(wrapped_state, model if with_model else None)
    expected = bare.state_dict()

    assert list(wrapped_state) == before
    assert type(stripped) is OrderedDict
    found = without_counter(stripped, wrappers)
    assert list(found) == list(expected)
    assert all(found[key] is wrapped_state_value for key, wrapped_state_value in found.items())
    for key, value in expected.items():
        same = torch.equal(found[key], value) if torch.is_tensor(value) else found[key] == value
        assert same
    assert list(found._metadata.items()) == list(expected._metadata.items())
    again = strip_module_prefix(stripped)
    assert list(again.items()) == list(stripped.items())
    assert again._metadata == stripped._metadata


@settings(deadline=None)
@given(outer=nestings, inner=nestings)
def test_any_nesting_loads_into_any_other(outer: list[str], inner: list[str]) -> None:
    source, target = nested(Layers(), outer), nested(Layers(), inner)
    with torch.no_grad():
        unwrap(source).scale.fill_(5)  # type: ignore[operator, union-attr]
        unwrap(source).norm.running_mean.fill_(2)  # type: ignore[operator, union-attr]
    loaded = load_model_state(target, source.state_dict())
    assert loaded == ([], [])
    mine, theirs = unwrap(target).state_dict(), unwrap(source).state_dict()
    assert all(torch.equal(mine[k], v) for k, v in theirs.items() if torch.is_tensor(v))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["module", "_orig_mod", "a", "b", "n_averaged"]), min_size=1).map(
            ".".join
        ),
        st.integers(),
    )
)
def test_stripping_twice_is_stripping_once(state: dict[str, int]) -> None:
    before = dict(state)
    once = strip_module_prefix(state)
    assert state == before
    assert strip_module_prefix(once) == once
    assert set(once.values()) <= set(state.values())


def test_a_child_called_module_survives_beside_others() -> None:
    bare = Renamed(siblings=True)
    wrapped = in_averaged(nn.DataParallel(bare)).state_dict()
    expected = [*bare.state_dict()]
    assert list(strip_module_prefix(wrapped)) == ["n_averaged", *expected]
    assert list(strip_module_prefix(bare.state_dict())) == expected


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("wrappers", [[], ["dp"], ["dp", "averaged", "compile"]])
def test_a_lone_child_called_module_survives_where_the_model_is_given(
    deep: bool, wrappers: list[str]
) -> None:
    bare = Renamed(siblings=False, deep=deep)
    model = nested(bare, wrappers)
    for known in (bare, model):
        stripped = strip_module_prefix(model.state_dict(), known)
        assert [key for key in stripped if key != "n_averaged"] == list(bare.state_dict())
    assert load_model_state(Renamed(siblings=False, deep=deep), model.state_dict()) == ([], [])


def test_other_keys_without_the_prefix_are_left_alone() -> None:
    for state in (
        {"module.a": 1, "b": 2},
        {"module.a": 1, "modules.b": 2},
        {"modulea": 1},
        {"module": 1},
        {},
        {"model": {"module.a": 1}, "epoch": 3},
        {3: 1, "module.a": 2},
    ):
        assert strip_module_prefix(dict(state)) == state  # type: ignore[arg-type]


def test_the_outer_of_two_counters_stays() -> None:
    inner = AveragedModel(Layers())
    outer = AveragedModel(inner)
    inner_state = outer.state_dict()
    inner_state["n_averaged"] = torch.tensor(4)
    assert strip_module_prefix(inner_state)["n_averaged"] == 4


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_the_type_of_the_mapping_stays(kind: Any) -> None:
    stripped = strip_module_prefix(kind({"module.a": 1}))
    assert type(stripped) is kind
    assert dict(stripped) == {"a": 1}


def test_a_factory_and_other_attributes_stay() -> None:
    state = defaultdict(list, {"module.a": [1]})
    assert strip_module_prefix(state)["new"] == []
    ordered: Any = OrderedDict({"module.a": 1})
    ordered.note = "mine"
    assert strip_module_prefix(ordered).note == "mine"


class Calls(TorchDispatchMode):
    """The operations on tensors that were run: a copy is one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_tensor_is_copied_among_very_many() -> None:
    value, calls = torch.ones(1), Calls()
    state = {f"module._orig_mod.module.layer{i}.weight": value for i in range(100_000)}
    with calls:
        stripped = strip_module_prefix(state)
    assert calls.names == []
    assert len(stripped) == len(state)
    assert all(tensor is value for tensor in stripped.values())
    assert next(iter(stripped)) == "layer0.weight"


def test_the_averages_counter_reaches_an_averaged_model() -> None:
    average = AveragedModel(Layers())
    average.update_parameters(Layers())
    average.update_parameters(Layers())
    target = in_compiled(AveragedModel(nn.DataParallel(Layers())))
    load_model_state(target, average.state_dict())
    assert target.n_averaged == 2  # else its first update would forget the averages
    load_model_state(target, Layers().state_dict())
    assert target.n_averaged == 2
    assert load_model_state(Layers(), average.state_dict()) == ([], [])


def test_a_model_that_counts_by_itself_gets_its_own_counter() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("n_averaged", torch.tensor(0))
    state = model.state_dict() | {"n_averaged": torch.tensor(9)}
    load_model_state(nn.DataParallel(model), state)
    assert model.n_averaged == 9


def test_parts_that_are_compiled_load_into_parts_that_are_not() -> None:
    plain, compiled = nn.Sequential(Layers()), nn.Sequential(in_compiled(Layers()))
    assert load_model_state(compiled, nn.DataParallel(plain).state_dict()) == ([], [])
    assert load_model_state(plain, compiled.state_dict()) == ([], [])


def test_what_does_not_fit_is_said() -> None:
    state = {"module.weight": torch.ones(1, 2), "module.extra": torch.ones(1)}
    model = nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match="extra"):
        load_model_state(model, state)
    assert load_model_state(model, state, strict=False) == (["bias"], ["extra"])
    assert model.weight.detach().tolist() == [[1, 1]]


def test_a_state_of_which_nothing_fits_is_an_error_also_when_not_strict() -> None:
    checkpoint = {"model": nn.Linear(2, 1).state_dict(), "epoch": 1}
    with pytest.raises(ValueError, match=r"'model', 'epoch'.*checkpoint\[\"model\"\]"):
        load_model_state(nn.Linear(2, 1), checkpoint, strict=False)
    load_model_state(nn.Identity(), {})


class Trainer(nn.Module):
    """Holds the network in an attribute, as a ``LightningModule`` does."""

    def __init__(self, network: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        self.network = network
        for name, module in others.items():
            self.add_module(name, module)


@pytest.mark.parametrize("inside", [[], ["compile"]])
@pytest.mark.parametrize("outside", [[], ["dp"], ["averaged", "compile"]])
def test_a_network_comes_out_of_a_trainers_attribute(inside: list[str], outside: list[str]) -> None:
    trained, other = Layers(), Layers()
    state = nested(Trainer(nested(trained, inside)), outside).state_dict()
    assert load_model_state(other, state) == ([], [])
    for expected, value in zip(trained.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, value)


def test_a_part_of_more_than_the_network_is_not_guessed() -> None:
    state = Trainer(nn.Linear(2, 1), teacher=nn.Linear(2, 1)).state_dict()
    with pytest.raises(ValueError, match="of a larger model, the keys of this part"):
        load_model_state(nn.Linear(2, 1), state)


def test_a_buffer_called_like_the_counter_is_the_models_own() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    for each, value in ((model, 5), (other, 0)):
        each.register_buffer("n_averaged", torch.tensor(value))
    average, loaded = AveragedModel(model), AveragedModel(other)
    average.n_averaged.fill_(9)
    assert strip_module_prefix(average.state_dict())["n_averaged"] == 5
    assert load_model_state(loaded, average.state_dict()) == ([], [])
    assert (loaded.n_averaged, loaded.module.n_averaged) == (9, 5)
