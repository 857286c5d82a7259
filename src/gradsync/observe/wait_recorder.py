"""Collects how long this rank waits in each round, and where its time goes, and hands that on a block at a time.

This is all that stragglers cost the training thread: a tuple a round. Who is slow is found out by rank 0, from what all
ranks have told it, beside the collectives (`watch/lost_time.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from gradsync.events import Event
from gradsync.watch.waits import MOST_ROUNDS, Block, Phases

# A block leaves after so many seconds, however long rounds take.
_BLOCK_SECONDS = 10.0
# With more ranks, only every second, third, ... block is told: rank 0 reads all of them, in Python.
_RANKS_THAT_TELL_ALL = 512


class _Times(NamedTuple):
    """What is kept of a round; the event itself also has the order of all parameters."""

    waited: float
    forward_at: float
    opened_at: float
    backward_ended_at: float
    closed_at: float


class WaitRecorder:
    """Of one module."""

    def __init__(self, rank: int, size: int, name: str, tell: Callable[[Callable[[], Block]], None]) -> None:
        """`name`: of the module; `tell`: has a block made, in another thread, and brings it to rank 0."""
        self._rank, self._name, self._tell = rank, name, tell
        self._every = -(-size // _RANKS_THAT_TELL_ALL)
        self._module, self._next = -1, -1
        self._ends_at = 0.0
        self._times: list[_Times] = []  # of consecutive rounds; the first one only says when the second one began

    def record(self, event: Event) -> None:
        number, closed_at = event.round, event.closed_at
        if number != self._next or event.module != self._module:  # one failed here, or they are counted anew
            self._begin(event)
        self._next = number + 1
        self._times.append(_Times(event.waited, event.forward_at, event.opened_at, event.backward_ended_at, closed_at))
        # Blocks end at the same rounds on all ranks, unless rounds are slow: so those that are left out are the same.
        if self._next % MOST_ROUNDS == 0 or closed_at > self._ends_at:
            self._end_block()

    def _begin(self, event: Event) -> None:
        self._module, self._times = event.module, []
        self._ends_at = event.closed_at + _BLOCK_SECONDS

    def _end_block(self) -> None:
        times, last = self._times, self._next - 1
        if len(times) > 1 and last // MOST_ROUNDS % self._every == 0:
            first = last - len(times) + 2
            self._tell(partial(_block, self._rank, self._module, self._name, first, times))
        self._times = times[-1:]
        self._ends_at = times[-1].closed_at + _BLOCK_SECONDS


def _block(rank: int, module: int, name: str, first: int, times: Sequence[_Times]) -> Block:
    outside = forward = backward = 0.0
    for before, one in pairwise(times):
        # Without a forward since the round before, as after several backwards of one, all of it counts as outside.
        forward_at = one.forward_at if one.forward_at > before.closed_at else one.opened_at
        outside += forward_at - before.closed_at
        forward += one.opened_at - forward_at
        backward += one.backward_ended_at - one.opened_at
    phases = Phases(outside, forward, backward, times[-1].closed_at - times[0].closed_at)
    return Block(rank, module, name, first, tuple(one.waited for one in times[1:]), phases)
