"""How long the phases of a rank take that are its own: forwards, backwards that are no rounds, and optimizers' steps.

Always on: a reading of the clock for each beginning and each end, and a sum. What lasts longer is for listeners.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from gradsync.events import BACKWARD, FORWARD, OPTIMIZER, PhaseSeconds, Span
from gradsync.observe.ranges import OpenRange


class Stopwatch:
    """Of one replicated module."""

    def __init__(self) -> None:
        self.forward_at = 0.0
        """The latest forward began."""
        self._is_forward = False
        self._range = OpenRange(FORWARD)
        self._backward_at = 0.0
        self._stepped_at = 0.0
        self._seconds = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0.0)
        self._listeners: tuple[Callable[[Span], None], ...] = ()

    def forward_begins(self) -> None:
        self._range.begin()
        self.forward_at, self._is_forward = perf_counter(), True

    def forward_ended(self) -> None:
        """Also one that raised."""
        if self._is_forward:  # not a recomputation inside backward
            self._is_forward = False
            self._ended(FORWARD, self.forward_at)
            self._range.end()

    def backward_begins(self) -> None:
        """One that only accumulates."""
        self._backward_at = perf_counter()

    def backward_ended(self) -> None:
        self._ended(BACKWARD, self._backward_at)

    def optimizer_stepped(self, began_at: float) -> None:
        """One that calls another one is counted without it."""
        self._ended(OPTIMIZER, max(began_at, self._stepped_at))
        self._stepped_at = perf_counter()

    def _ended(self, phase: str, began_at: float) -> None:
        ended_at = perf_counter()
        self._seconds[phase] += ended_at - began_at
        for listener in self._listeners:
            listener(Span(phase, began_at, ended_at))

    def take(self) -> PhaseSeconds:
        """Since this was called before."""
        taken = PhaseSeconds(**self._seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken

    def listen(self, listener: Callable[[Span], None]) -> None:
        """It is told of every phase that ends from now on."""
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[Span], None]) -> None:
        self._listeners = tuple(one for one in self._listeners if one != listener)
