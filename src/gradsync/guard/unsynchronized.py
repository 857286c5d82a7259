"""Promise 1: `optimizer.step()` on gradients that were never synchronized raises.

A step after `no_sync` without a backward outside, on gradients that were made by hand, or by an optimizer that steps
inside backward, would train each replica on its own part of the data, and nobody would notice. One hook on all
optimizers asks the replicas; it looks when the gradients are used: if the step has a closure, after that.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync import _torch
from gradsync.errors import UnsynchronizedStepError

SAVED = "_gradsync_was_replicated"
"""In the `__dict__` of a module that was replicated when it was saved."""


class Rounds(Protocol):
    """What a reducer tells."""

    rounds: int

    @property
    def parameters(self) -> list[nn.Parameter]: ...

    @property
    def hidden(self) -> dict[int, str]: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def seems_dirty(self) -> bool: ...

    def name_dirty(self, among: Sequence[int]) -> list[str]: ...

    def name_lost(self, among: Sequence[int]) -> list[str]: ...

    def undo_divisions(self) -> None: ...

    def foreign(self, among: Sequence[int]) -> list[int]: ...

    def accept_edits(self, among: Sequence[int], since: int) -> None: ...

    def name_foreign(self, among: Sequence[int], since: int) -> list[str]: ...

    def left_dirty(self, parameter: Tensor) -> bool: ...


class Watched(Protocol):
    """An engine."""

    @property
    def reducer(self) -> Rounds: ...

    def unmanaged(self) -> dict[int, str]:
        """Ids and names of parameters of its module that it does not manage, and was not told to leave alone."""

    def known(self) -> set[int]:
        """Ids of the parameters that it manages, or was told to leave alone."""

    def trained_alone(self) -> None:
        """An optimizer has stepped on local gradients, on purpose."""

    def optimizer_begins(self) -> None:
        """To step its parameters; it may still be found that it must not."""

    def optimizer_stepped(self, began_at: float) -> None:
        """On its parameters, since then."""

    def check_alive(self) -> None:
        """Raises if a rank is lost, unless that is not to be heard of now."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises if such an optimizer must not step its parameters."""


class Owned(NamedTuple):
    """The part that one optimizer has in one replica."""

    engine: weakref.ref[Any]  # Watched
    parameters: list[nn.Parameter]  # all of the replica, as they were
    indices: list[int]  # those that the optimizer has
    strays: list[tuple[str, Tensor]]  # what it has of the module that is not managed, frozen parameters for example


class Known(NamedTuple):
    """What was found out about an optimizer."""

    sizes: list[int]  # of its groups
    engines: int  # as `_engines` was
    owned: list[Owned]


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[Optimizer, Known] = weakref.WeakKeyDictionary()
_since: weakref.WeakKeyDictionary[Optimizer, weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()
_began: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()  # its step, or what follows a closure
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_engines = 0  # counts changes of that
_state = threading.local()


def watch(engine: Watched) -> None:
    """From now on no optimizer steps on gradients of `engine`'s parameters that were never synchronized."""
    global _engines
    _engines += 1
    _watched.add(engine)


def unwatch(engine: Watched) -> None:
    """It does not keep its module in step any more."""
    global _engines
    _engines += 1
    _watched.discard(engine)


@contextlib.contextmanager
def allow_unsynchronized_steps() -> Iterator[None]:
    """Inside, optimizers may step on local gradients: for local SGD and the like, on purpose.

    Replicas that have done so are not compared any more, until `gradsync.verify` finds them equal.
    """
    with _flag("allowed"):
        yield


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Inside, an optimizer steps in backward, on what was just delivered."""
    with _flag("trusted"):
        yield


@contextlib.contextmanager
def _flag(name: str) -> Iterator[None]:
    before = getattr(_state, name, False)
    setattr(_state, name, True)
    try:
        yield
    finally:
        setattr(_state, name, before)


# --- the hooks -------------------------------------------------------------------------------------------


@_torch.outside_of_graphs
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _watched and not dist.is_initialized():
        return None
    if getattr(_state, "trusted", False):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _look(optimizer)
        _began[optimizer] = perf_counter()
        return None
    looking = _then_look(optimizer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": looking}
    return (args[0], looking, *args[2:]), kwargs


def _then_look(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure makes the gradients, so they are looked at after it, each time."""

    @_torch.frame_outside_of_graphs
    def looking() -> Any:
        result = closure()
        _look(optimizer)
        _began[optimizer] = perf_counter()
        return result

    return looking


@_torch.outside_of_graphs
def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if not _watched or getattr(_state, "trusted", False):
        return
    for one in _owned_by(optimizer):
        engine = one.engine()
        if engine is not None:
            engine.optimizer_stepped(_began.get(optimizer, perf_counter()))
            _since.setdefault(optimizer, weakref.WeakKeyDictionary())[engine] = engine.reducer.rounds


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


# --- what they look for ----------------------------------------------------------------------------------


@_torch.outside_of_graphs
def _look(optimizer: Optimizer) -> None:
    for engine in tuple(_watched):
        if engine.reducer.hidden:
            _check_registered(optimizer, engine.reducer)
    for one in _owned_by(optimizer):
        engine = one.engine()
        if engine is None or engine.reducer.size == 1:
            continue
        reducer: Rounds = engine.reducer
        engine.check_alive()
        engine.optimizer_begins()
        engine.check_optimizer(optimizer)
        reducer.undo_divisions()
        if reducer.seems_dirty and (lost := reducer.name_lost(one.indices)):
            raise _lost_error(optimizer, reducer.rank, lost)
        names = reducer.name_dirty(one.indices) if reducer.seems_dirty else []
        names += [name for name, parameter in one.strays if _is_local(parameter, reducer)]
        since = _since.get(optimizer, {}).get(engine, 0)
        edited = reducer.foreign(one.indices) if not names else []
        foreign = reducer.name_foreign(edited, since) if edited else []
        if not names and not foreign:
            if edited:
                reducer.accept_edits(edited, since)
            continue
        if getattr(_state, "allowed", False):
            engine.trained_alone()
        else:
            raise _error(optimizer, reducer.rank, names, foreign)


def _is_local(parameter: Tensor, reducer: Rounds) -> bool:
    """Whether a parameter that is not managed has a gradient that no round has seen.

    One that is trained was unfrozen or put into the module since the last round, or its gradient would be ours; one
    that is frozen may have what an earlier round left, but not what a backward without synchronization did.
    """
    if parameter.grad is None:
        return False
    return parameter.requires_grad or reducer.left_dirty(parameter)


def _owned_by(optimizer: Optimizer) -> list[Owned]:
    """The replicas whose parameters an optimizer has; remembered until its groups, or the replicas, change."""
    known = _known.get(optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if known is None or known.sizes != sizes or known.engines != _engines or any(map(_outdated, known.owned)):
        ids = {id(p) for group in optimizer.param_groups for p in group["params"] if isinstance(p, Tensor)}
        owned = []
        for engine in tuple(_watched):
            parameters = engine.reducer.parameters
            indices = [index for index, parameter in enumerate(parameters) if id(parameter) in ids]
            names = engine.unmanaged()
            strays = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
            if indices or strays:
                owned.append(Owned(weakref.ref(engine), parameters, indices, strays))
        known = _known[optimizer] = Known(sizes, _engines, owned)
        _warn_of_others(optimizer, bool(owned))
    return known.owned


def _outdated(one: Owned) -> bool:
    engine = one.engine()
    return engine is None or engine.reducer.parameters is not one.parameters


def _check_registered(optimizer: Optimizer, reducer: Rounds) -> None:
    """An optimizer that holds what only computes would never see a gradient, and never move anything."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if name := reducer.hidden.get(id(parameter)):
                raise UnsynchronizedStepError(
                    f"rank {reducer.rank}: this {type(optimizer).__name__} holds the tensor that '{name}' computes "
                    "with, not the registered parameter: it was built before the module was replicated, or between a "
                    "forward and the end of its backward. Build the optimizer after gradsync.replicate(module, ...), "
                    "and not there, or call module.reshard() first."
                )


def _list(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _lost_error(optimizer: Optimizer, rank: int, names: list[str]) -> UnsynchronizedStepError:
    return UnsynchronizedStepError(
        f"rank {rank}: {type(optimizer).__name__}.step() while gradients of {_list(names)} were lost with a backward "
        "that raised, or are still on their way: the others would step without them. Call zero_grad(), on all ranks, "
        "and run a backward again before the step."
    )


def _error(optimizer: Optimizer, rank: int, dirty: list[str], foreign: list[str]) -> UnsynchronizedStepError:
    listed = _list(dirty or foreign)
    cure = (
        "Run the last backward before a step outside of no_sync() and with set_requires_gradient_sync(True), and step "
        "after backward has ended; or call model.synchronize_gradients() on all ranks, also after a pipeline that "
        "splits backwards."
        if dirty
        else "They did not come from a backward that synchronizes, but from torch.autograd.grad, torch.func or by "
        "hand. Call model.synchronize_gradients() on all ranks before the step: it takes them too."
    )
    return UnsynchronizedStepError(
        f"rank {rank}: {type(optimizer).__name__}.step() on gradients that were never synchronized: {listed}. The "
        f"replicas would drift apart. {cure} If local steps are what you want, put them in "
        "`with gradsync.allow_unsynchronized_steps():`."
    )


# --- parameters that nobody manages ----------------------------------------------------------------------


def _warn_of_others(optimizer: Optimizer, owns: bool) -> None:
    """An optimizer that trains what is kept in step, and something beside it, trains the latter on each rank alone."""
    if optimizer in _warned or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    engines = [engine for engine in tuple(_watched) if engine.reducer.size > 1]
    known = set[int]().union(*(engine.known() for engine in engines))
    others = [
        (at, parameter)
        for at, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if isinstance(parameter, Tensor)
        and parameter.requires_grad
        and type(parameter) in (nn.Parameter, Tensor)  # a DTensor is somebody's who knows what it is
        and id(parameter) not in known
    ]
    if not others:
        return
    if owns and engines:
        _warned.add(optimizer)
        listed = ", ".join(f"one of shape {list(p.shape)} in group {at}" for at, p in others[:3])
        warnings.warn(
            f"this {type(optimizer).__name__} has {len(others)} parameter(s) that no replica manages: {listed}. Each "
            "rank trains its own on its own data, and they drift apart. Make them parameters of the replicated module, "
            "replicate what they belong to, or, if that is meant, pass them to replicate() as ignored_params.",
            UserWarning,
            stacklevel=6,
        )
        return
    ids = {id(parameter) for _, parameter in others}
    for module in _saved_modules():
        if any(id(parameter) in ids for parameter in module.parameters()):
            _warned.add(optimizer)
            warnings.warn(
                f"this {type(module).__name__} was replicated when it was saved, and is a plain module since it was "
                "loaded: each rank trains it alone, on its own data. Call gradsync.replicate(module) first, and build "
                "the optimizer after that.",
                UserWarning,
                stacklevel=6,
            )


def _saved_modules() -> list[nn.Module]:
    """Found by looking: a saved module has no trace of gradsync but a name in its `__dict__`."""
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and SAVED in one.__dict__]
