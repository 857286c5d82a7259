"""What a composable API promises: registry, state, unchanged names, classes that stack."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.contract import contract as torch_contract

import gradsync
from gradsync import _torch
from gradsync.contract import (
    ComposableModule,
    RegistryItem,
    contract,
    enrol,
    original_class,
    put_on,
    registry,
    state_of,
    take_off,
    withdraw,
)
from gradsync.errors import AlreadyAppliedError, ModulesMissingError, NamesChangedError
from tests.support.ranks import on_ranks


class Remark:
    text = ""


@contract(Remark)
def remark(module: Any, text: str = "", *, then: Callable[[Any], Any] | None = None) -> Any:
    """Leaves a remark on the module, then does whatever it is told to."""
    found = remark.state(module if isinstance(module, nn.Module) else module[0])
    assert found is not None, "the state is there before the body runs"
    found.text = text
    return then(module) if then else None


@contract()
def wave(module: nn.Module) -> nn.Module:
    return module


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def test_state_and_registry() -> None:
    module = model()
    untouched = set(module.__dict__)
    assert remark.state(module) is None
    assert registry(module) == {}
    assert set(module.__dict__) == untouched, "asking must leave nothing behind"
    assert remark(module, "hello") is module
    assert wave(module) is module
    found = remark.state(module)
    assert isinstance(found, Remark)
    assert found.text == "hello"
    assert list(registry(module)) == ["remark", "wave"]
    for child in module:
        assert registry(child) == {}
        assert remark.state(child) is None
    assert getattr(remark, "__name__", None) == "remark"
    assert remark.__doc__
    assert remark.__doc__.startswith("Leaves a remark")


def test_the_registry_given_out_is_a_copy() -> None:
    module = wave(model())
    registry(module).clear()
    assert list(registry(module)) == ["wave"]


def test_items_compare_by_identity() -> None:
    first, second = wave(model()), wave(model())
    assert registry(first)["wave"] is registry(first)["wave"]
    assert registry(first)["wave"] != registry(second)["wave"]
    assert RegistryItem() != RegistryItem()


def test_once_a_module() -> None:
    module = wave(model())
    expected = (
        "Each distinct composable distributed API can only be applied to a module once. "
        f"wave has already been applied to the following module:\n{module}"
    )
    with pytest.raises(AssertionError, match="can only be applied to a module once") as caught:
        wave(module)
    assert isinstance(caught.value, AlreadyAppliedError)
    assert str(caught.value).startswith(expected)
    assert str(caught.value) != expected, "and the cure"
    assert list(registry(module)) == ["wave"], "the refusal must not undo the first call"
    wave(module[0])  # a child is another module


def test_of_a_refused_list_no_module_is_touched() -> None:
    first, second = model(), wave(model())
    with pytest.raises(AlreadyAppliedError):
        wave([first, second])
    assert registry(first) == {}
    assert list(registry(second)) == ["wave"]


def test_a_body_that_raises_leaves_nothing() -> None:
    def refuse(module: Any) -> None:
        raise KeyError("not today")

    module = model()
    before = set(module.__dict__)
    with pytest.raises(KeyError, match="not today"):
        remark(module, then=refuse)
    assert set(module.__dict__) == before
    wave(module)
    with pytest.raises(KeyError):
        remark(module, then=refuse)
    assert list(registry(module)) == ["wave"], "what others registered stays"
    remark(module, "second try")
    assert remark.state(module).text == "second try"  # type: ignore[union-attr]


def test_roots_of_a_list_share_state_and_item() -> None:
    first, second = model(), model()
    given = [first, first[0], second, first]
    assert remark(given, "both") is given
    assert remark.state(first) is remark.state(second)
    assert registry(first)["remark"] is registry(second)["remark"]
    assert registry(first[0]) == {}
    assert remark.state(first[0]) is None


def test_apis_of_one_name_do_not_mix_up_their_states() -> None:
    @contract()
    def remark(module: nn.Module) -> None: ...

    module = globals()["remark"](model(), "the first one's")
    assert remark.state(module) is None
    with pytest.raises(AlreadyAppliedError):
        remark(module)


def rename_parameter(module: Any) -> None:
    module[0].kernel = module[0].weight
    del module[0].weight


def add_buffer(module: Any) -> None:
    module.register_buffer("extra", torch.zeros(1))


def add_module(module: Any) -> None:
    module.add_module("extra", nn.ReLU())


@pytest.mark.parametrize(
    ("kind", "change", "differences"),
    [
        ("parameters", rename_parameter, ["original: ['0.weight']", "new: ['0.kernel']"]),
        ("buffers", add_buffer, ["original: []", "new: ['extra']"]),
        ("modules", add_module, ["original: []", "new: ['extra']"]),
        ("modules", lambda module: nn.Sequential(module), ["original: ['1', '2']", "new: ['0.0', '0.1', '0.2']"]),
    ],
)
def test_names_must_stay(kind: str, change: Callable[[Any], Any], differences: list[str]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh())
    if kind == "modules" and change is not add_module:  # a wrapper changes parameters first of all
        module = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Tanh())
    with pytest.raises(RuntimeError) as caught:
        remark(module, then=change)
    assert isinstance(caught.value, NamesChangedError)
    text = str(caught.value)
    assert text.startswith(f"Checking {kind}: Composable distributed API implementations cannot modify FQNs.\n")
    assert all(difference in text for difference in differences), text
    assert registry(module) == {}


def test_order_must_stay() -> None:
    def turn_round(module: Any) -> None:
        weight = module.weight
        del module.weight
        module.weight = weight

    with pytest.raises(NamesChangedError, match=r"^Checking parameters: .*cannot modify the order of FQNs") as caught:
        remark(nn.Linear(2, 2), then=turn_round)
    assert "['weight', 'bias']" in str(caught.value)
    assert "['bias', 'weight']" in str(caught.value)


def test_another_module_of_the_same_names_may_come_back() -> None:
    module = model()
    result = remark(module, then=copy.deepcopy)
    assert result is not module
    assert list(registry(module)) == ["remark"]


@pytest.mark.parametrize("then", [lambda modules: modules[:1], lambda modules: [*modules, nn.ReLU()]])
def test_as_many_modules_out_as_in(then: Callable[[Any], Any]) -> None:
    given = [nn.ReLU(), nn.Tanh()]
    with pytest.raises(AssertionError, match="remark should return the same number of modules") as caught:
        remark(given, then=then)
    assert isinstance(caught.value, ModulesMissingError)
    assert registry(given[0]) == {}


def test_only_modules() -> None:
    with pytest.raises(TypeError, match="found a str"):
        wave([nn.ReLU(), "relu"])  # type: ignore[type-var]


def test_by_keyword() -> None:
    module = model()
    assert remark(module=module, text="by keyword") is module
    assert remark.state(module).text == "by keyword"  # type: ignore[union-attr]


def test_enrol_and_withdraw() -> None:
    module = model()
    before = set(module.__dict__)
    enrol(module, "mine", state := object())
    assert state_of(module, "mine") is state
    with pytest.raises(AssertionError, match="mine has already been applied"):
        enrol(module, "mine", object())
    wave(module)
    withdraw(module, "mine")
    assert state_of(module, "mine") is None
    assert list(registry(module)) == ["wave"]
    withdraw(module, "wave")  # not by its function: its state stays, so nothing of others is lost
    assert wave.state(module) is not None
    assert {"mine", "wave"}.isdisjoint(registry(module))
    assert set(module.__dict__) - before == {_torch.composable_keys()[0]}


# --- torch's side -----------------------------------------------------------------------------------


def test_torch_sees_ours_and_we_see_torchs() -> None:
    @torch_contract()
    def theirs(module: nn.Module) -> nn.Module:
        return module

    @torch_contract()
    def wave(module: nn.Module) -> nn.Module:
        return module

    module = globals()["wave"](model())
    assert list(_get_registry(module) or {}) == ["wave"]
    theirs(module)
    assert list(registry(module)) == ["wave", "theirs"] == list(_get_registry(module) or {})
    with pytest.raises(AssertionError, match="wave has already been applied"):
        wave(module)  # torch's decorator respects our entry


def sharded(module: nn.Module) -> list[bool]:
    from torch.distributed.tensor import DTensor

    return [isinstance(parameter, DTensor) for parameter in module.parameters()]


@pytest.mark.filterwarnings("ignore")  # FSDP's own
@on_ranks(1, limit=60)
def test_fully_shard() -> None:
    """On a rank: torch leaves alone what we replicate, as it does with its own `replicate` over a group."""
    from torch.distributed.fsdp import fully_shard

    stack = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    gradsync.replicate(stack[0])
    fully_shard(stack)
    assert sharded(stack) == [False, False, True, True]
    replica = gradsync.replicate(nn.Linear(2, 2))
    fully_shard(replica)
    assert list(registry(replica)) == ["replicate", "fully_shard"]
    assert sharded(replica) == [False, False]
    plain = gradsync.unreplicate(gradsync.replicate(nn.Linear(2, 2)))
    fully_shard(plain)
    assert sharded(wave(plain)) == [True, True]
    assert list(registry(plain)) == ["fully_shard", "wave"]
    plain(torch.ones(1, 2)).sum().backward()


# --- classes ----------------------------------------------------------------------------------------


class Loud(ComposableModule, nn.Module):
    API = "loud"

    def forward(self, *args: Any) -> Any:
        return super().forward(*args) * 2

    def _apply_to(self, duplicate: nn.Module) -> None:
        super()._apply_to(duplicate)
        loud(duplicate)


class Late(ComposableModule, nn.Module):
    API = "late"

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) + 1

    def _apply_to(self, duplicate: nn.Module) -> None:
        super()._apply_to(duplicate)
        late(duplicate)


@contract()
def loud(module: nn.Module) -> None:
    put_on(module, Loud, "Loud")


@contract()
def late(module: nn.Module) -> None:
    put_on(module, Late, "Late")


ORDERS = pytest.mark.parametrize("order", [(loud, late), (late, loud)], ids=["loud first", "late first"])


class Parent(nn.Module):
    """Has a child that knows its parent, outside of what is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.child.__dict__["parent"] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


def dressed(order: tuple[Callable[[Any], Any], ...]) -> Parent:
    module = Parent()
    for api in order:
        api(module)
    return module


@ORDERS
def test_classes_stack_in_any_order(order: Any) -> None:
    module = dressed(order)
    assert isinstance(module, Parent)
    assert isinstance(module, Loud)
    assert isinstance(module, Late)
    assert module(torch.tensor(3.0)) == 7
    assert type(module) is type(dressed(order)), "modules of one class get one class"
    assert original_class(type(module)) is Parent


def test_a_class_of_its_own() -> None:
    first, second = Parent(), Parent()
    for module in (first, second):
        put_on(module, Loud, "Loud", shared=False)
        put_on(module, Late, "Late")
    type(first).extra = 1  # type: ignore[attr-defined]
    assert not hasattr(second, "extra")
    take_off(first, Late)
    assert repr(first).startswith("LoudParent(")
    assert type(first) is not type(loud(Parent()))


@ORDERS
@pytest.mark.parametrize("off", [Loud, Late])
def test_classes_come_off_in_any_order(order: Any, off: type[ComposableModule]) -> None:
    module = dressed(order)
    take_off(module, off)
    assert not isinstance(module, off)
    assert module(torch.tensor(3.0)) == (4 if off is Loud else 6)
    take_off(module, Late if off is Loud else Loud)
    assert type(module) is Parent


@ORDERS
def test_copies_keep_everything(order: Any) -> None:
    module = remark(dressed(order), "kept")
    duplicate = copy.deepcopy(nn.Sequential(module))[0]
    assert type(duplicate) is type(module)
    assert duplicate(torch.tensor(3.0)) == 7
    assert set(registry(duplicate)) == {"loud", "late", "remark"}
    assert registry(duplicate)["loud"] is not registry(module)["loud"]
    assert remark.state(duplicate).text == "kept"  # type: ignore[union-attr]
    assert remark.state(duplicate) is not remark.state(module)
    assert duplicate.child.parent is duplicate
    with pytest.raises(AlreadyAppliedError):
        loud(duplicate)


@ORDERS
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_plain(order: Any, protocol: int) -> None:
    module = remark(dressed(order))
    loaded = pickle.loads(pickle.dumps(module, protocol))
    assert type(loaded) is Parent
    assert loaded.__dict__.keys() == Parent().__dict__.keys()
    assert module(torch.tensor(3.0)) == 7, "the one that was saved is as before"
    saved = io.BytesIO()
    torch.save(module, saved)
    assert b"gradsync" not in saved.getvalue()
    assert b"Loud" not in saved.getvalue()


class CopiesItself(nn.Module):
    copied = False

    def __deepcopy__(self, memo: Any) -> CopiesItself:
        duplicate = type(self)()
        duplicate.copied = True
        return duplicate


class ReducesItself(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __reduce__(self) -> Any:
        return type(self), (self.size,)


def test_a_modules_own_way_of_copying_is_respected() -> None:
    duplicate = copy.deepcopy(loud(CopiesItself()))
    assert duplicate.copied
    assert isinstance(duplicate, Loud)
    reduced = loud(ReducesItself(3))
    assert copy.deepcopy(reduced).size == 3
    assert isinstance(copy.deepcopy(reduced), Loud)
    assert type(pickle.loads(pickle.dumps(reduced))) is ReducesItself


def test_a_slice_of_a_container_is_not_what_the_container_is() -> None:
    stack = loud(nn.Sequential(nn.Identity(), nn.Identity()))
    assert registry(stack[:1]) == {}
