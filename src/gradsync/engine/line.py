"""Who arrives next, if a round repeats the one before.

Most rounds do. Autograd calls a hook for each arrival all the same, but for a parameter that is the next in line the
hook has nothing to do: those who came are counted in one go, when the line is at its end or another one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import length_hint

from torch import Tensor

# A transport that wants to be called now and then is called at the end of each line.
LONGEST = 16
NOBODY: Iterator[Tensor] = iter(())


class Line:
    """A stretch of the usual order of arrival, in which nothing has to be done for any of them."""

    def __init__(self, parameters: Sequence[Tensor], tell: Callable[[Iterator[Tensor]], None]) -> None:
        """`tell`: called with those who are in line from now on; whoever takes one from there says that it came."""
        self._parameters = parameters
        self._tell = tell
        self.order: list[int] = []
        self._in_order: list[Tensor] = []
        self._ends: list[int] = []  # of a line that begins at this position of the order
        self._repeats = False  # so far, this round does
        self._counted = self._end = 0  # positions: those before were counted; where the line ends
        self._them = NOBODY

    def learn(self, order: list[int], ends_before: Callable[[int], bool]) -> None:
        """Takes an order as the usual one. `ends_before`: whether there is something to do when this one comes."""
        self.order = order
        self._in_order = [self._parameters[index] for index in order]
        self._ends = []
        end = len(order)
        for position in reversed(range(end)):
            if ends_before(order[position]):
                end = position
            end = min(end, position + LONGEST)
            self._ends.append(end)
        self._ends.reverse()

    def forget(self) -> None:
        self.learn([], bool)

    def begin(self) -> None:
        """A round begins."""
        self._repeats, self._counted = bool(self.order), 0
        self._form(self._repeats)

    def stop(self) -> None:
        """It is over, or goes its own way from here."""
        self._repeats = False
        self._form(False)

    def come(self, beyond: int = 0) -> list[int]:
        """Those who have come and were not counted yet. `beyond`: so many were taken who have not come."""
        return self.order[self._counted : self._end - length_hint(self._them) - beyond]

    def count(self, beyond: int = 0) -> list[int]:
        """The same, and they are counted now."""
        come = self.come(beyond)
        self._counted += len(come)
        return come

    def pause(self) -> None:
        """Nobody is in line until `follow`."""
        self._form(False)

    def follow(self, index: int, waiting: bool) -> None:
        """One has come while nobody was in line. If it was its turn, a line forms behind it, unless it has to wait."""
        if self._repeats:
            self._repeats = self._counted < len(self.order) and self.order[self._counted] == index
            self._counted += self._repeats
            self._form(self._repeats and not waiting and self._counted < len(self.order))

    def _form(self, anybody: bool) -> None:
        self._end = self._ends[self._counted] if anybody else self._counted
        self._them = iter(self._in_order[self._counted : self._end]) if self._counted < self._end else NOBODY
        self._tell(self._them)
