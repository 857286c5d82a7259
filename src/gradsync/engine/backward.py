"""What autograd tells: where a backward begins and where it really ends, and when a gradient has arrived.

Autograd can call back at the end of a backward, but a callback queued inside a nested backward
(reentrant checkpointing starts those) fires when the nested one ends. A round belongs to the
outermost backward, so each backward that is met gets a callback, and only the outermost one's
counts: it is the one during which no autograd node is being evaluated.

An arrival: autograd has accumulated into a parameter's `.grad`. Hooks are armed from construction on and never ask how
backward was reached: through `forward`, another method, a submodule or a loss on the parameters themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradsync import _torch


class Backward:
    """Follows one outermost backward, and those nested in it, to its end."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self.met: dict[int, bool] = {}
        """Graph tasks that were entered, and whether they have ended."""

    def enter(self) -> bool:
        """Notes the backward that runs now; False if it was met before."""
        task = _torch.current_graph_task()
        if task in self.met:
            return False
        _torch.check_not_compiled()
        self.met[task] = False
        _torch.at_end_of_backward(lambda: self._ended(task))
        return True

    def died(self) -> bool:
        """Whether what was followed has raised: another backward runs, which nobody of those met has started."""
        return bool(self.met) and _torch.current_graph_task() not in self.met and not _torch.inside_another_backward()

    def forget(self) -> None:
        """Ends following; callbacks that still come are ignored."""
        self.met.clear()

    def _ended(self, task: int) -> None:
        if task not in self.met:
            return
        self.met[task] = True
        node = _torch.current_node()
        if node is None:
            self._at_end()
        elif all(self.met.values()):
            # A nested backward ended, and the one around it was not met yet. It is inside `node`
            # now and evaluates the nodes that follow next: before them we can enter it.
            _before_any_of({following for following, _ in node.next_functions if following}, self.enter)


def accumulates(parameters: Sequence[Tensor]) -> bool:
    """Whether the running backward, now at an output of the module, is one that accumulates gradients.

    `torch.autograd.grad` and `backward(inputs=...)` pass the outputs too, perhaps on one rank
    alone. If no parameter will be reached although the graph leads to one, it is such a call. If
    the graph leads to none, the parameters are hidden behind reentrant checkpoints, or this rank's
    branch uses none: then the other ranks count on us.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:  # some may have been unfrozen, which is found out when a round opens
        return not _torch.runs_grad()
    if any(map(_torch.will_accumulate, trained)):
        return True
    return not _torch.runs_grad() and not _leads_to(_torch.current_node(), trained)


def _leads_to(node: Node | None, parameters: Sequence[Tensor]) -> bool:
    """Whether the graph that begins at `node` reaches the accumulator of any of the parameters."""
    wanted = {id(parameter) for parameter in parameters}
    waiting, seen = [node], set()
    while waiting:
        current = waiting.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if id(getattr(current, "variable", None)) in wanted:
            return True
        waiting.extend(following for following, _ in current.next_functions)
    return False


def come_at_once(node: Node | None) -> list[Tensor]:
    """Parameters whose gradients come together, at the very end of a backward that is now at `node`.

    Those of what torch.compile made one graph of, if that is what backward comes to last: when the first of them is
    there, all have been computed, and nothing is left to overlap with.
    """
    waiting, seen, last = [node], set(), None
    while waiting:
        current = waiting.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        following = [each for each, _ in current.next_functions]
        waiting.extend(following)
        feeds = any(hasattr(each, "variable") for each in following)
        if feeds and (last is None or _torch.made_before(current) < _torch.made_before(last)):
            last = current
    if last is None or not _torch.is_compiled(last):
        return []
    return [each.variable for each, _ in last.next_functions if each is not None and hasattr(each, "variable")]


def _before_any_of(nodes: set[Node], act: Callable[[], object]) -> None:
    """Calls `act` once, as soon as one of the nodes is about to be evaluated."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(*_: object) -> None:
        if handles:
            act()
        while handles:
            handles.pop().remove()

    handles.extend(node.register_prehook(hook) for node in nodes)


class Listener(Protocol):
    """`TrainingStep`, as seen from here."""

    def gradient_arrived(self, leaf: Tensor) -> None:
        """Autograd has accumulated into it."""

    def gradient_comes(self, identity: int) -> None:
        """Autograd is about to accumulate into the leaf of this `id`."""


def arm(
    listener: Listener, leaves: Sequence[Tensor], turn: AbstractContextManager[Any], before: bool = False
) -> Callable[[], object]:
    """Tells of arrivals, and with `before` of what is about to arrive, until the function that it returns is called.

    `turn`: taken meanwhile if the leaves are on several devices, for each of which autograd has a thread of its own.

    The listener is held weakly: a parameter may outlive its engine, and then the hooks are removed. All leaves share
    one function: a closure for each costs half a microsecond more an arrival, in cache misses.
    """
    reference = weakref.ref(listener)

    def arrived(leaf: Tensor) -> None:
        me = reference()
        if me is not None:
            me.gradient_arrived(leaf)

    def arrived_in_turn(leaf: Tensor) -> None:
        with turn:
            arrived(leaf)

    tell = arrived if len({leaf.device for leaf in leaves}) < 2 else arrived_in_turn
    handles = [leaf.register_post_accumulate_grad_hook(tell) for leaf in leaves]
    if before:
        handles += _before(reference, leaves)
    return weakref.finalize(listener, _remove, handles)


def arm_before(listener: Listener, leaves: Sequence[Tensor]) -> Callable[[], object]:
    """The same, of what is about to arrive only."""
    return weakref.finalize(listener, _remove, _before(weakref.ref(listener), leaves))


def _before(listener: weakref.ref[Listener], leaves: Sequence[Tensor]) -> list[RemovableHandle]:
    return [leaf.register_hook(partial(_tell_before, listener, id(leaf))) for leaf in leaves]


def _tell_before(listener: weakref.ref[Listener], identity: int, gradient: Tensor) -> None:
    """(Not with the leaf itself, which would keep it alive, nor weakly: torch can't convert a DTensor then.)"""
    me = listener()
    if me is not None:
        me.gradient_comes(identity)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
