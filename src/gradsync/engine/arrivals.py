"""Which gradients arrived, how often and in which order; and which are dirty.

An arrival is autograd having accumulated into a managed parameter's `.grad`. Hooks are armed from
construction on and never ask how backward was reached: through `forward`, another method, a
submodule or a loss on the parameters themselves.

The hook below runs for every parameter in every backward: it is the engine's innermost loop, and
therefore one function that calls out only when a bucket is complete or something is unusual.
Most rounds repeat the one before. So the hook has a line of those that come next if this one does
too, and for a parameter that is the next in line there is nothing to do: at the end of the line,
or if another one comes, those before it are counted in one go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from operator import length_hint
from typing import Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsync import _torch

# No line is longer: a transport that wants to be called now and then is called at its end.
LONGEST_LINE = 16
_NOBODY: Iterator[Tensor] = iter(())


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
        self._parameters = parameters
        self._usual: list[int] = []  # the order of arrival in two rounds, one after the other
        self._latest: list[int] = []
        self._in_usual_order: list[Tensor] = []
        self._line_ends: list[int] = []  # of a line that begins at this position in the usual order
        self._following = False  # so far, this round repeats the usual order
        self._position = self._end = 0  # in the usual order: those that were counted; where the line ends
        self._line = _NOBODY
        # Hooks hold this object weakly: a parameter may outlive its engine, and then they are removed.
        # All share one function: a closure for each costs half a microsecond more an arrival, in cache misses.
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        hook, self._set_line = _hook(weakref.ref(self))
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
        self._following, self._position = bool(self._usual), 0
        self._line_up()

    @property
    def dirty(self) -> set[int]:
        """Those with gradients that were never synchronised."""
        self.count_line()
        return self._dirty

    def forget_round(self) -> None:
        """The round is over. What was dirty still is, until `synchronised`."""
        self.count_line()
        self._following = False
        self._line_up()
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
            if max(self.expected) > 1:
                self._learn([])
        if self.order != self._usual and self.order == self._latest and max(self.expected) == 1:
            self._learn(self.order)
        self._latest = self.order

    # --- the line ----------------------------------------------------------------------------------

    def _learn(self, order: list[int]) -> None:
        """Takes an order, in which each parameter arrives once, as the usual one."""
        self._usual = order
        self._in_usual_order = [self._parameters[index] for index in self._usual]
        completes = {self.bucket_of[index]: index for index in self._usual}
        ends: list[int] = []
        end = len(self._usual)
        for position in reversed(range(end)):
            index = self._usual[position]
            if index in self.large or completes[self.bucket_of[index]] == index:
                end = position
            end = min(end, position + LONGEST_LINE)
            ends.append(end)
        self._line_ends = ends[::-1]

    def _line_up(self) -> None:
        """Tells the hook who comes next without anything to do for them: perhaps nobody."""
        self._end = start = self._position
        if self._following and start < len(self._usual) and not self.waiting:
            self._end = self._line_ends[start]
        self._line = iter(self._in_usual_order[start : self._end]) if start < self._end else _NOBODY
        self._set_line(self._line)

    def count_line(self, beyond: int = 0) -> None:
        """Counts those in line who have arrived. `beyond`: so many were taken from it who have not."""
        start, stop = self._position, self._end - length_hint(self._line) - beyond
        if start < stop:
            come = self._usual[start:stop]
            self._position = stop
            self._dirty.update(come)
            self.order += come
            for index in come:
                self.counts[index] = 1
                self.missing[self.bucket_of[index]] -= 1

    def end_line(self, beyond: int) -> None:
        """The same, and then nobody is in line until `follow`."""
        self.count_line(beyond)
        self._line, self._end = _NOBODY, self._position
        self._set_line(_NOBODY)

    def follow(self, index: int) -> None:
        """This one has arrived while nobody was in line. If it was its turn, a line begins behind it."""
        if self._following:
            self._following = self._position < len(self._usual) and self._usual[self._position] == index
            self._position += self._following
            self._line_up()


def _hook(arrivals: weakref.ref[Arrivals]) -> tuple[Callable[[Tensor], None], Callable[[Iterator[Tensor]], None]]:
    """The hook, and a function that tells it who comes next."""
    current_backward = _torch.current_graph_task
    line = _NOBODY
    backward = _torch.NO_GRAPH_TASK  # that in which they come

    def set_line(them: Iterator[Tensor]) -> None:
        nonlocal line, backward
        line, backward = them, current_backward()

    def arrived(parameter: Tensor) -> None:
        following = next(line, None)
        if following is parameter and current_backward() == backward:
            return
        me = arrivals()
        if me is None:
            return
        if line is not _NOBODY:
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

    return arrived, set_line


def _before_hook(before: Callable[[int], None], index: int) -> Callable[[Tensor], None]:
    return lambda _: before(index)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
