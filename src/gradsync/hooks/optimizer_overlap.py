"""Optimizers that step during backward: each bucket's parameters as soon as it is reduced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync import _torch
from gradsync.errors import HookError

Stepper = Callable[[Sequence[nn.Parameter]], None]
"""Called with parameters whose gradients were just delivered."""


class StepInBackward:
    """Steps one optimizer bucket by bucket.

    Learning rates and other settings are read from the optimizer's groups at each step, and its state is
    the optimizer's own: schedules and checkpoints work as ever.
    """

    def __init__(self, optimizer: Optimizer, clip_value: float | None, free_gradients: bool) -> None:
        self.optimizer = optimizer
        self.clip_value = clip_value
        self.free_gradients = free_gradients
        self._stepping = False
        optimizer.register_step_pre_hook(self._refuse_other_steps)

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        groups = [
            {**group, "params": [p for p in group["params"] if id(p) in wanted]}
            for group in self.optimizer.param_groups
        ]
        groups = [group for group in groups if group["params"]]
        if not groups:
            return
        if self.clip_value is not None:
            nn.utils.clip_grad_value_([p for group in groups for p in group["params"]], self.clip_value)
        part = copy.copy(self.optimizer)  # shares the state
        part.param_groups = groups
        self._stepping = True
        try:
            with torch.enable_grad():  # `step` turns it off itself, and some look at it first
                part.step()
        finally:
            self._stepping = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        if self.free_gradients:
            for group in groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _refuse_other_steps(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._stepping:
            raise HookError(
                f"this {type(optimizer).__name__} steps by itself during backward, since gradsync.overlap_optimizer(): "
                "a step() of your own would be a second one. Leave it out; learning-rate schedules go on as before."
            )


class TorchsInBackward:
    """Optimizers that torch's `_apply_optimizer_in_backward` has put on the parameters."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            for optimizer in _torch.in_backward_optimizers(parameter):
                optimizer.step()
            if _torch.in_backward_optimizers(parameter):
                parameter.grad = None

    @staticmethod
    def found_on(parameters: Iterable[Tensor]) -> TorchsInBackward | None:
        """Takes over if there are any: their own hooks would step on gradients that nobody reduced yet."""
        parameters = [p for p in parameters if _torch.in_backward_optimizers(p)]
        if not parameters:
            return None
        for parameter in parameters:
            _torch.remove_in_backward_hooks(parameter)
        return TorchsInBackward()


def make_stepper(
    optimizer: Any, parameters: Iterable[nn.Parameter], clip_value: float | None, free_gradients: bool
) -> StepInBackward:
    """From an optimizer, or from a function that makes one of the parameters."""
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(list(parameters))
    if not isinstance(made, Optimizer):
        raise HookError(
            f"overlap_optimizer() takes an optimizer or a function that makes one, not {type(made).__name__}"
        )
    return StepInBackward(made, clip_value, free_gradients)
