"""`share_optimizer(optimizer)`: each rank of a host steps its share of the parameters that lie there once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsync import arguments
from gradsync.engine.engine import Engine
from gradsync.engine.step import owner_of
from gradsync.errors import InvalidOptionError
from gradsync.sharing import kinds
from gradsync.sharing.counters import copied
from gradsync.sharing.shared_step import SharedStep

_STEP = "_gradsync_shared_step"


class SharedOptimizer(Optimizer):
    """What the class of a shared optimizer is besides its own: a step that is a share, and a state that is whole."""

    steps_shares = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's share; returns when all ranks of the host have stepped theirs."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_of(self).step(self)
        self._opt_called = True  # schedules ask for it
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so they need not put a step of theirs before it

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:  # type: ignore[override]
        """Of all parameters, as ever; what other ranks step, lies in memory that this one can read."""
        given: dict[Tensor, dict[str, Any]] = self.__dict__["state"]
        return given or step_of(self).plain_state()

    def state_dict(self) -> dict[str, Any]:
        """Complete, and a copy: an optimizer that goes on with it must not write to what the ranks have in common."""
        found = super().state_dict()
        of_all = found["state"]
        found["state"] = {at: {k: copied(v) for k, v in state.items()} for at, state in of_all.items()}
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what `load_state_dict` calls when it has read everything."""
        super().__setstate__(state)
        step_of(self).forget()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Copies and pickles are plain optimizers, with the whole state."""
        return _plain_copy, (plain_class(self), self.__getstate__())


def _plain_copy(kind: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    made: Optimizer = object.__new__(kind)
    made.__setstate__(state)
    return made


def plain_class(optimizer: Optimizer) -> type[Optimizer]:
    """What the class of an optimizer is, or was before it was shared."""
    return type(optimizer).__mro__[2] if isinstance(optimizer, SharedOptimizer) else type(optimizer)


def step_of(optimizer: Optimizer) -> SharedStep:
    """How a shared optimizer steps."""
    found: SharedStep = optimizer.__dict__[_STEP]
    return found


def _take_off_step(optimizer: Optimizer) -> None:
    """Of a schedule, which calls the plain one; what it does besides, ours does too."""
    put = optimizer.__dict__.get("step")
    if put is None:
        return
    if not hasattr(put, "_wrapped_by_lr_sched"):
        raise InvalidOptionError(
            f"somebody has replaced step() of this {type(optimizer).__name__}, and what was put there would step "
            "the whole, not a share. Call gradsync.share_optimizer() first, directly after the optimizer is made."
        )
    del optimizer.__dict__["step"]


def share_optimizer(optimizer: Optimizer) -> Optimizer:
    """Makes `optimizer` step only this rank's share of parameters that lie once a host, and returns it.

    For modules with `share_parameters=True`; on all ranks. In place: the same object, of a class with the same name.
    `step()` returns when all ranks of the host have stepped, and the parameters are whole again. Everything else is as
    ever: groups, schedules, `zero_grad`, closures, and a complete `state_dict()`, on each rank alone.

    Torch's elementwise optimizers (SGD, Adam, AdamW, RMSprop, Adagrad, ...) are cut by elements, others by whole
    parameters.
    """
    arguments.instance("optimizer", optimizer, Optimizer, "gradsync.share_optimizer() takes one that is made.")
    if isinstance(optimizer, SharedOptimizer):
        return optimizer
    kinds.check(optimizer)
    owners = [owner_of(p) for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(one, Engine) and one.shared is not None for one in owners):
        raise InvalidOptionError(
            f"this {type(optimizer).__name__} has no parameter that lies once a host, so there is nothing to share. "
            "Make it of the parameters of a module that was replicated with share_parameters=True, after that."
        )
    plain = type(optimizer)
    _take_off_step(optimizer)
    optimizer.__dict__[_STEP] = SharedStep(optimizer)
    names = {"step": Optimizer.profile_hook_step(SharedOptimizer.step), "__module__": plain.__module__}
    optimizer.__class__ = type(plain.__name__, (SharedOptimizer, plain), names)
    return optimizer
