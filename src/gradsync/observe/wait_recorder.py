"""Collects how long this rank waits in each round, and where its time goes, and hands that on a block at a time.

This is all that stragglers cost the training thread: a tuple a round. Who is slow is found out by rank 0, from what all
ranks have told it, beside the collectives (`watch/lost_time.py`).
"""

from __future__ import annotations

from collections.abc import Callable
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

    round: int
    waited: float
    forward_at: float
    opened_at: float
    backward_ended_at: float
    closed_at: float


class WaitRecorder:
    """Of one module."""

    def __init__(self, rank: int, size: int, name: str, tell: Callable[[Block], None]) -> None:
        """`name`: of the module; `tell`: brings a block to rank 0, some time."""
        self._rank, self._name, self._tell = rank, name, tell
        self._every = -(-size // _RANKS_THAT_TELL_ALL)
        self._module = -1
        self._times: list[_Times] = []  # of consecutive rounds; the first one only says when the second one began

    def record(self, event: Event) -> None:
        times = self._times
        if times and (event.round != times[-1].round + 1 or event.module != self._module):
            times.clear()  # a round failed here, or rounds are counted anew
        times.append(
            _Times(
                event.round,
                event.waited,
                event.forward_at,
                event.opened_at,
                event.backward_ended_at,
                event.closed_at,
            )
        )
        self._module = event.module
        # Blocks end at the same rounds on all ranks, unless rounds are slow: so those that are left out are the same.
        if len(times) > 1 and (
            (event.round + 1) % MOST_ROUNDS == 0 or event.closed_at - times[0].closed_at > _BLOCK_SECONDS
        ):
            if event.round // MOST_ROUNDS % self._every == 0:
                self._tell(self._block())
            del times[:-1]

    def _block(self) -> Block:
        times = self._times
        outside = forward = backward = 0.0
        for before, one in pairwise(times):
            # Without a forward since the round before, as after several backwards of one, all of it counts as outside.
            forward_at = one.forward_at if one.forward_at > before.closed_at else one.opened_at
            outside += forward_at - before.closed_at
            forward += one.opened_at - forward_at
            backward += one.backward_ended_at - one.opened_at
        phases = Phases(outside, forward, backward, times[-1].closed_at - times[0].closed_at)
        waits = tuple(one.waited for one in times[1:])
        return Block(self._rank, self._module, self._name, times[1].round, waits, phases)
