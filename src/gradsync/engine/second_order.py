"""Gradients of gradients: `backward(create_graph=True)` leaves a `.grad` with a graph, and people differentiate it.

The graph leads to this rank's own gradient, not to the mean over the ranks. So the gradient that a round delivers has
a graph of one node, which says so when somebody passes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsync.errors import SecondOrderError


class _Synchronized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise second_order_error()


def second_order_error() -> SecondOrderError:
    return SecondOrderError(
        "a loss on `.grad` after backward(create_graph=True): what is in `.grad` is the mean over all ranks, which "
        "this rank can't differentiate. Take the gradients that the loss needs with torch.autograd.grad(loss, "
        "parameters, create_graph=True), which leaves them local; the backward of the whole loss is synchronized."
    )


def refuse_second_order(gradient: Tensor) -> Tensor:
    """The same values; a backward through them raises."""
    with torch.enable_grad():
        anchor = torch.empty((), device=gradient.device, requires_grad=True)
        return _Synchronized.apply(anchor, gradient)  # type: ignore[no-any-return, no-untyped-call]
