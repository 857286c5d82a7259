"""Rounds that no backward opens: for gradients that are there already, or on a rank that has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gradsync.engine.managed_parameters import DetachedGrad

if TYPE_CHECKING:
    from gradsync.engine.step import TrainingStep


def synchronize_now(step: TrainingStep) -> None:
    """Carries what backwards without synchronization have left, and what was put into `.grad` by hand."""
    reducer, group = step.reducer, step.reducer.group
    group.fold_in()
    # A mean of what is the same everywhere is the same: so all may go, also what was written into a `.grad` of ours.
    every = range(len(group.parameters))
    is_mean = reducer.config.scaling.multiplicity == 1
    group.mark_dirty(group.gradients.present() if is_mean else group.gradients.foreign(every))
    reducer.open_round()
    step.end_open_round()
    reducer.split_backward(False)
    step.show_registered()


def synchronize_tensors(step: TrainingStep, gradients: Sequence[Tensor | None]) -> None:
    """Carries gradients that are kept elsewhere, one for each parameter; they are changed in place.

    A parameter without one gets none, even if other ranks have some: there is no place to put it.
    """
    detached = [DetachedGrad(gradient) for gradient in gradients]
    step.reducer.open_round(gradients=detached)
    step.end_open_round()
    for gradient, reduced in zip(gradients, detached, strict=True):
        if gradient is not None and reduced.grad is not None:
            gradient.copy_(reduced.grad)


def shadow(step: TrainingStep, counted: bool) -> None:
    """On a rank without data: nothing to bring, and no say in the mean unless `counted`."""
    step.reducer.group.drop_gradients()
    step.reducer.rescale(weight=1.0 if counted else 0.0)
    step.reducer.open_round(follows=True)
    step.end_open_round()
