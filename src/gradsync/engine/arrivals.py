"""Which gradients arrived, how often and in which order; and which are dirty.

An arrival is autograd having accumulated into a managed parameter's `.grad`. Hooks are armed from
construction on and never ask how backward was reached: through `forward`, another method, a
submodule or a loss on the parameters themselves.

The hook below runs for every parameter in every backward: it is the engine's innermost loop, and
therefore one function that calls out only when a bucket is complete or something is unusual.
It leaves even that to `line.py` while a round repeats the one before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsync import _torch
from gradsync.engine.line import NOBODY, Line


class Listener(Protocol):
    """The reducer, as seen from here. `index` is always the parameter that just arrived."""

    @property
    def arrivals(self) -> Arrivals:
        """The one it listens to now."""

    def backward_met(self) -> None:
        """A backward that is not part of the round yet; the round may open, or not."""

    def bucket_complete(self, index: int) -> None:
        """Each of a bucket's parameters has arrived as often as it ever did."""

    def unexpected(self, index: int) -> None:
        """A parameter arrived more often than ever before."""

    def large_arrived(self, index: int) -> None:
        """One whose gradient takes so much memory that it should not wait for its bucket."""


class Arrivals:
    """Counts arrivals for the running round, and remembers what was never synchronised.

    `counts`, `order` and `missing` belong to one round, and are complete after `count_line`; `dirty`
    lives on until a round has carried the gradient, through any number of backwards without
    synchronisation.
    """

    def __init__(
        self, parameters: Sequence[Tensor], backwards: Container[int], before: Callable[[int], None] | None = None
    ) -> None:
        self.backwards = backwards
        """Those that take part in the round."""
        self.listener: Listener | None = None
        """None while synchronisation is off."""
        self.counts = [0] * len(parameters)
        self.order: list[int] = []
        self._dirty: set[int] = set()
        self.expected = [0] * len(parameters)
        """How often each parameter arrived in the round in which it did so most often."""
        self.as_expected = False
        """Whether in the latest round each parameter arrived as often as it ever did."""
        self.bucket_of = [-1] * len(parameters)
        """-1: no plan yet, or a sparse gradient, which needs no bucket."""
        self.large: set[int] = set()
        self.missing: list[int] = [0]
        """For each bucket how many parameters have yet to arrive; one more at the end for bucket -1."""
        self._all_missing: list[int] = []
        self.progress: Callable[[], None] | None = None
        """Set while buckets are under way whose transport wants to be called now and then."""
        self.waiting = False
        """A complete bucket could not leave at once; the next arrival tells the listener again."""
        self._latest: list[int] = []  # the order of the round before
        self._in_one_thread = len({parameter.device for parameter in parameters}) == 1  # autograd has one a device
        # Hooks hold this object weakly: a parameter may outlive its engine, and then they are removed.
        # All share one function: a closure for each costs half a microsecond more an arrival, in cache misses.
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        hook, tell = _hook(weakref.ref(self))
        self._line = Line(parameters, tell)
        handles: list[RemovableHandle]
        handles = [p.register_post_accumulate_grad_hook(hook) for p in parameters]
        if before is not None:  # told of each arrival before autograd adds to `.grad`
            handles += [p.register_hook(_before_hook(before, i)) for i, p in enumerate(parameters)]
        self.disarm = weakref.finalize(self, _remove, handles)

    def begin_round(self, buckets: int) -> None:
        if len(self._all_missing) != buckets + 1:
            self._all_missing = [0] * (buckets + 1)
            for index, expected in enumerate(self.expected):
                if expected:
                    self._all_missing[self.bucket_of[index]] += 1
        self.missing = self._all_missing.copy()
        self._line.begin()

    @property
    def dirty(self) -> set[int]:
        """Those with gradients that were never synchronised."""
        self.count_line()
        return self._dirty

    def seen_dirty(self) -> set[int]:
        """The same for whoever looks from outside, perhaps from another thread: changes nothing."""
        return self._dirty.union(self._line.come())

    def forget_round(self) -> None:
        """The round is over. What was dirty still is, until `synchronised`."""
        self.count_line()
        self._line.stop()
        self.counts = [0] * len(self.counts)
        self.order = []
        self.waiting = False
        self.progress = None

    def synchronised(self) -> None:
        """The round has carried every gradient; what came is expected the next time."""
        self._dirty = set()
        self.as_expected = self.counts == self.expected
        if not self.as_expected:
            self.expected = list(map(max, self.expected, self.counts))
            self._all_missing = []
            self._line.forget()
        elif self._in_one_thread and self.order == self._latest != self._line.order and max(self.expected) == 1:
            complete = {self.bucket_of[index]: index for index in self.order}.values()
            self._line.learn(self.order, self.large.union(complete).__contains__)
        self._latest = self.order

    def count_line(self, beyond: int = 0) -> None:
        """Counts those in line who have come. `beyond`: so many were taken from it who have not."""
        if come := self._line.count(beyond):
            self._dirty.update(come)
            self.order += come
            for index in come:
                self.counts[index] = 1
                self.missing[self.bucket_of[index]] -= 1

    def end_line(self, beyond: int) -> None:
        self.count_line(beyond)
        self._line.pause()

    def follow(self, index: int) -> None:
        self._line.follow(index, self.waiting)


def _hook(arrivals: weakref.ref[Arrivals]) -> tuple[Callable[[Tensor], None], Callable[[Iterator[Tensor]], None]]:
    """The hook, and a function that tells it who comes next."""
    current_backward = _torch.current_graph_task
    line = NOBODY
    backward = _torch.NO_GRAPH_TASK  # that in which they come

    def tell(them: Iterator[Tensor]) -> None:
        nonlocal line, backward
        line, backward = them, current_backward()

    def arrived(parameter: Tensor) -> None:
        following = next(line, None)
        if following is parameter and current_backward() == backward:
            return
        me = arrivals()
        if me is None:
            return
        if line is not NOBODY:
            me.end_line(following is not None)
        index = me.index_of[id(parameter)]
        me._dirty.add(index)
        listener = me.listener
        if listener is None:
            return
        if current_backward() not in me.backwards:
            listener.backward_met()
            if current_backward() not in me.backwards:
                return
            if listener.arrivals is not me:  # the managed parameters were replaced
                me = listener.arrivals
                if id(parameter) not in me.index_of:
                    return
                index = me.index_of[id(parameter)]
                me._dirty.add(index)
        count = me.counts[index] + 1
        me.counts[index] = count
        if count == 1:
            me.order.append(index)
        if index in me.large:
            listener.large_arrived(index)
        if me.progress is not None:
            me.progress()
        if count == me.expected[index]:
            number = me.bucket_of[index]
            me.missing[number] -= 1
            if me.waiting or not me.missing[number]:
                listener.bucket_complete(index)
        elif count > me.expected[index]:
            listener.unexpected(index)
        me.follow(index)

    return arrived, tell


def _before_hook(before: Callable[[int], None], index: int) -> Callable[[Tensor], None]:
    return lambda _: before(index)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
