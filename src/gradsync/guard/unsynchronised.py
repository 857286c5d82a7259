"""Promise 1: `optimizer.step()` on gradients that were never synchronised raises.

A step after `no_sync` without a backward outside, or an optimizer that steps inside backward,
would train each replica on its own part of the data, and nobody would notice. One hook on all
optimizers asks the reducers; while nothing is dirty it costs a few comparisons a step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gradsync.errors import UnsynchronizedStepError


class Watched(Protocol):
    """What a reducer tells."""

    @property
    def seems_dirty(self) -> bool: ...

    def name_dirty(self, among: set[int]) -> list[str]:
        """Names of dirty parameters whose ids are among those given and that have a gradient."""

    @property
    def hidden(self) -> dict[int, str]:
        """Ids of tensors that compute but are not registered, with their parameters' names."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_allowed = False
_registered = False


def watch(reducer: Watched) -> None:
    """From now on no optimizer steps over dirty parameters of `reducer` unnoticed."""
    global _registered
    if not _registered:
        register_optimizer_step_pre_hook(_before_step)
        _registered = True
    _watched.add(reducer)


@contextlib.contextmanager
def allow_unsynchronized_steps() -> Iterator[None]:
    """Inside, optimizers may step on local gradients: for local SGD and the like, on purpose."""
    global _allowed
    before, _allowed = _allowed, True
    try:
        yield
    finally:
        _allowed = before


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if _allowed:
        return
    for reducer in tuple(_watched):
        if reducer.hidden:
            _check_registered(optimizer, reducer)
        if reducer.size > 1 and reducer.seems_dirty:
            _check(optimizer, reducer)


def _check_registered(optimizer: Optimizer, reducer: Watched) -> None:
    """An optimizer that holds what only computes would never see a gradient, and never move anything."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if name := reducer.hidden.get(id(parameter)):
                raise UnsynchronizedStepError(
                    f"rank {reducer.rank}: this {type(optimizer).__name__} was built before the module was replicated "
                    f"over a mesh and holds the tensor that '{name}' computes with, not the registered DTensor. Build "
                    "the optimizer after gradsync.replicate(module, mesh=...)."
                )


def _check(optimizer: Optimizer, reducer: Watched) -> None:
    owned = {id(p) for group in optimizer.param_groups for p in group["params"] if isinstance(p, Tensor)}
    names = reducer.name_dirty(owned)
    if not names:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise UnsynchronizedStepError(
        f"rank {reducer.rank}: {type(optimizer).__name__}.step() on gradients that were never synchronised: "
        f"{', '.join(map(repr, names[:3]))}{more}. The replicas would drift apart. Run the last backward before a "
        "step outside of no_sync() and with set_requires_gradient_sync(True), and step after backward has ended. If "
        "local steps are what you want, put them in `with gradsync.allow_unsynchronized_steps():`."
    )
