"""Rounds that no backward opens: for gradients that are there already, or on a rank that has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gradsync.engine.reducer import Reducer
from gradsync.engine.roster import Held

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine


def synchronise_now(reducer: Reducer) -> None:
    """Carries what backwards without synchronisation have left, and what was put into `.grad` by hand."""
    every = range(len(reducer.parameters))
    # A mean of what is the same everywhere is the same: so all may go, also what was written into a `.grad` of ours.
    may_go = reducer.gradients.present() if reducer.delivery.gain == 1 else reducer.gradients.foreign(every)
    reducer.dirty.update(may_go)
    reducer.open_round()
    reducer.close_round()
    reducer.halves_are_carried()


def synchronise_tensors(reducer: Reducer, gradients: Sequence[Tensor | None]) -> None:
    """Carries gradients that are kept elsewhere, one for each parameter; they are changed in place.

    A parameter without one gets none, even if other ranks have some: there is no place to put it.
    """
    slots = [Held(gradient) for gradient in gradients]
    with reducer.gradients_in(slots):
        reducer.dirty.update(index for index, gradient in enumerate(gradients) if gradient is not None)
        reducer.open_round()
        reducer.close_round()
    for gradient, slot in zip(gradients, slots, strict=True):
        if gradient is not None and slot.grad is not None:
            gradient.copy_(slot.grad)


def shadow(reducer: Reducer, counted: bool) -> None:
    """On a rank without data: nothing to bring, and no say in the mean unless `counted`."""
    reducer.drop_gradients()
    reducer.delivery.weight = 1.0 if counted else 0.0
    reducer.open_round(follows=True)
    reducer.close_round()


def skip_round(engines: Sequence[Engine]) -> None:
    """On a rank that skips its batch: what a backward would have closed together is closed in the same order."""
    for engine in engines:
        engine.ready_to_skip()
    for engine in sorted(engines, key=lambda engine: engine.reducer.serial):
        engine.reducer.launch_rest()
    for engine in sorted(engines, key=lambda engine: engine.reducer.serial):
        engine.skip_round()
