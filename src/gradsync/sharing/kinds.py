"""Which optimizers can be stepped by shares of elements, which by whole parameters, and which not at all."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from gradsync.errors import NotSupportedError

# What these do to an element depends on nothing but that element, its gradient, its own state and the step's number.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Torch's own classes; what a subclass does, nobody knows."""
    return any(kind is getattr(torch.optim, name) for name in _ELEMENTWISE)


def check(optimizer: Optimizer) -> None:
    """Refuses those that need all parameters in one place."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotSupportedError(
            f"{name} can't be shared: each of its directions depends on all parameters at once, and it calls the "
            "closure several times a step. Use it as it is, without gradsync.share_optimizer()."
        )
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise NotSupportedError(
            f"{name} shares its work already. Give gradsync.share_optimizer() the optimizer that it has inside."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise NotSupportedError(
            f"{name} with differentiable=True can't be shared: nobody can differentiate a step that other ranks took."
        )
