"""What a composable API promises, and what it leaves on a module: its name in a registry, its state, a class.

Registry and state are kept where torch's own composable APIs keep theirs, so that `fully_shard` sees
`replicate` and the other way round. To write such an API:

    @contract(state_cls=MyState)
    def freeze_slowly(module, *, steps):
        freeze_slowly.state(module).steps = steps

It then is applied to a module at most once, keeps the names of parameters, buffers and submodules, and
a call that raises leaves the module as if it had not been made.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from torch import nn

from gradsync import _torch
from gradsync.errors import AlreadyAppliedError, AlreadyReplicatedError, ModulesMissingError, NamesChangedError

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")
P = ParamSpec("P")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class RegistryItem:
    """Says that an API was applied. Compares by identity; modules of one call share one."""


class State:
    """The state of an API that names no class for it: an empty object to put things on."""


class Api(Protocol[P, S_co]):
    """A composable API: call it on a module or several; ask for the state it left."""

    def __call__(self, module: M, *args: P.args, **kwargs: P.kwargs) -> M: ...

    def state(self, module: nn.Module) -> S_co | None: ...


# --- the decorator -----------------------------------------------------------------------------------


def contract(
    state_cls: type[S] = State,  # type: ignore[assignment]
) -> Callable[[Callable[Concatenate[Any, P], Any]], Api[P, S]]:
    """Makes a function that takes a module, or a sequence of them, first a composable API.

    `api.state(module)` is a `state_cls()` made at the call, there already when the body runs, and None
    on a module that the API was not applied to. Of several modules, those that are part of another one
    among them are left out, and the others share one state. Returning None means the input.

    Raises `AlreadyAppliedError` for a module that has it already, `NamesChangedError` if the body
    renamed or reordered anything, `ModulesMissingError` if it returned fewer or more modules than it
    got. A call that raises, also from the body, registers nothing: it can be repeated.
    """

    def decorate(function: Callable[Concatenate[Any, P], Any]) -> Api[P, S]:
        @functools.wraps(function)
        def api(module: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            found = roots(_listed(module))
            before = [_Names.of(root) for root in found]
            with _enrolled(found, function.__name__, function, state_cls()):
                result = function(module, *args, **kwargs)
                if result is None:
                    result = module
                _check_kept(function.__name__, before, [_Names.of(root) for root in roots(_listed(result))])
            return result

        api.state = functools.partial(_state, key=function)  # type: ignore[attr-defined]
        return cast("Api[P, S]", api)

    return decorate


def roots(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The given modules without those that are part of another one."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inner]


def _listed(modules: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    given = [modules] if isinstance(modules, nn.Module) else list(modules)
    for module in given:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module or a sequence of them, but found a {type(module).__name__}")
    return given


class _Names(NamedTuple):
    """All names in a module, in order."""

    parameters: list[str]
    buffers: list[str]
    modules: list[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Names:
        named: list[Iterable[tuple[str, Any]]] = [
            module.named_parameters(),
            module.named_buffers(),
            module.named_modules(),
        ]
        return cls(*([name for name, _ in pairs] for pairs in named))


def _check_kept(api: str, before: list[_Names], after: list[_Names]) -> None:
    if len(before) != len(after):
        raise ModulesMissingError(
            f"{api} should return the same number of modules as input modules\n"
            f"Inputs: {len(before)} modules\nOutputs: {len(after)} modules\n"
            f"Return from {api} the modules it was given, or None."
        )
    for kind in _Names._fields:
        for old, new in zip(before, after, strict=True):
            _check_names(api, kind, getattr(old, kind), getattr(new, kind))


def _check_names(api: str, kind: str, before: list[str], after: list[str]) -> None:
    if before == after:
        return
    lost = [name for name in before if name not in set(after)]
    found = [name for name in after if name not in set(before)]
    if lost or found:
        what = f"modify FQNs.\nFQNs only in original: {lost}\nFQNs only in new: {found}"
    else:
        what = f"modify the order of FQNs.\nOriginal FQNs: {before}\nNew FQNs: {after}"
    raise NamesChangedError(
        f"Checking {kind}: Composable distributed API implementations cannot {what}\n"
        f"Checkpoints and optimizers go by these names: {api} must leave them as they are."
    )


@contextlib.contextmanager
def _enrolled(modules: list[nn.Module], api: str, key: Hashable, state: object) -> Iterator[None]:
    """Registers `api` on the modules, and takes it back should the block raise."""
    for module in modules:  # all of them before any is touched
        _refuse_twice(module, api, AlreadyAppliedError, "Use the module as it is.")
    item = RegistryItem()
    for module in modules:
        _insert(module, api, key, state, item)
    try:
        yield
    except BaseException:
        for module in modules:
            _remove(module, api, key)
        raise


# --- registry and state ------------------------------------------------------------------------------


def enrol(module: nn.Module, api: str, state: object) -> None:
    """Registers `api` on `module`, at most once."""
    check_not_applied(module, api)
    _insert(module, api, api, state, RegistryItem())


def check_not_applied(module: nn.Module, api: str) -> None:
    """Refuses a module that `api` was applied to already."""
    cure = "Use the module as it is, or undo the first call with gradsync.unreplicate(module)."
    _refuse_twice(module, api, AlreadyReplicatedError, cure)


def withdraw(module: nn.Module, api: str) -> None:
    """Takes `api` off `module`, leaving no trace."""
    _remove(module, api, api)


def state_of(module: nn.Module, api: str) -> Any:
    """The state that `api` left on `module`; None if it was never applied."""
    return _state(module, key=api)


def registry(module: nn.Module) -> dict[str, RegistryItem]:
    """Which composable APIs were applied to `module`, in order."""
    _, registry_key = _torch.composable_keys()
    found: dict[str, RegistryItem] = module.__dict__.get(registry_key, {})
    return dict(found)


def _refuse_twice(module: nn.Module, api: str, error: type[AlreadyAppliedError], cure: str) -> None:
    if api in registry(module):
        raise error(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"{api} has already been applied to the following module:\n{module}\n{cure}"
        )


def _insert(module: nn.Module, api: str, key: Hashable, state: object, item: object) -> None:
    """As torch does: the registry goes by name, the states by whatever nobody else has, the bare function."""
    state_key, registry_key = _torch.composable_keys()
    module.__dict__.setdefault(state_key, {})[key] = state
    module.__dict__.setdefault(registry_key, {})[api] = item


def _remove(module: nn.Module, api: str, key: Hashable) -> None:
    for table_key, entry in zip(_torch.composable_keys(), (key, api), strict=True):
        table = module.__dict__.get(table_key, {})
        table.pop(entry, None)
        if not table:
            module.__dict__.pop(table_key, None)


def _state(module: nn.Module, *, key: Hashable) -> Any:
    state_key, _ = _torch.composable_keys()
    return module.__dict__.get(state_key, {}).get(key)


# --- the class ---------------------------------------------------------------------------------------

_made: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()
_MADE_FROM = "_gradsync_made_from"


class _MadeFrom(NamedTuple):
    """What `put_on` made a class from."""

    mixin: type[ComposableModule]
    cls: type
    prefix: str
    shared: bool


class ComposableModule:
    """Base of what an API puts over a module's own class, to do something around its call or forward.

    A class rather than hooks: the user's hooks keep their order and run as often as before. Several
    APIs may be put over one another in any order. Copies keep all of them; a pickle has none, for a
    saved model should load anywhere, without gradsync.
    """

    API: ClassVar[str]
    """The name in the registry."""

    def _get_name(self) -> str:
        """The name that is shown, in `repr` for example: that of the class is the original's."""
        shown: str = super()._get_name()  # type: ignore[misc]
        return "".join(made_from.prefix for made_from in _worn(type(self))) + shown

    def _apply_to(self, duplicate: nn.Module) -> None:
        """Does to a copy, so far a plain module, what was done to `self`. Call `super()` first."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        mine = ("gradsync", id(self))
        if mine in memo:  # something inside refers back to us: the copy is in the making
            return copy.deepcopy(memo[mine], memo)
        memo[mine] = plain = copy.copy(self)  # plain, as a pickle is
        duplicate: Any = copy.deepcopy(plain, memo)
        memo[id(self)] = duplicate
        _copy_tables(cast(nn.Module, self), duplicate, memo)
        self._apply_to(duplicate)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        make, args, *rest = reduced
        original = original_class(type(self))
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # which pickle keeps for the object's own class
            make, args = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key not in _torch.composable_keys()}
        args = tuple(original if arg is type(self) else arg for arg in args)
        return (original if make is type(self) else make, args, *rest)


def put_on(module: nn.Module, mixin: type[ComposableModule], prefix: str, *, shared: bool = True) -> None:
    """Makes the module's class one of `mixin` over the present one.

    It goes by the original's name, under which those who save or export a model by the name of its class find it
    again; `repr` shows the prefix.

    Modules of one class get one class again, which spares torch.compile a compilation for each; with
    `shared=False` the module gets one for itself, to which methods may be added.
    """
    cls = type(module)
    made = _made.get((mixin, cls)) if shared else None
    if made is None:
        made_from = _MadeFrom(mixin, cls, prefix, shared)
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        made = type(cls.__name__, (mixin, cls), {**names, _MADE_FROM: made_from})
        if shared:
            _made[mixin, cls] = made
    module.__class__ = made


def take_off(module: nn.Module, mixin: type[ComposableModule]) -> None:
    """Undoes `put_on`, also if other mixins were put on since."""
    worn = list(_worn(type(module)))
    module.__class__ = original_class(type(module))
    for other in reversed(worn):
        if other.mixin is not mixin:
            put_on(module, other.mixin, other.prefix, shared=other.shared)


def original_class(cls: type) -> type:
    """A module's class without all that was put over it."""
    for made_from in _worn(cls):
        cls = made_from.cls
    return cls


def _worn(cls: type) -> Iterator[_MadeFrom]:
    """What was put over a class, the outermost first."""
    while (made_from := cls.__dict__.get(_MADE_FROM)) is not None:
        yield made_from
        cls = made_from.cls


def _copy_tables(module: nn.Module, duplicate: nn.Module, memo: dict[Any, Any]) -> None:
    """Gives a copy the registry and states of APIs that put no class on the module; the others do it themselves."""
    theirs = {made_from.mixin.API for made_from in _worn(type(module))}
    for key in _torch.composable_keys():
        table = module.__dict__.get(key, {})
        others = {entry: value for entry, value in table.items() if getattr(entry, "__name__", entry) not in theirs}
        if others:
            duplicate.__dict__[key] = copy.deepcopy(others, memo)
