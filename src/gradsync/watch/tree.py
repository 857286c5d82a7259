"""Who is connected to whom: a tree, over host leaders, so that 10,000 ranks need no more than 64 connections each.

    rank 0 ─┬─ rank 1, 2, 3              the ranks of a host are connected to its lowest, their leader
            ├─ rank 4 ─── rank 5, 6, 7   leaders to each other, as a tree with a fan-out of 64
            └─ rank 8 ─── ...

News goes up to rank 0, which puts it in order, and from there down to everybody: all ranks hear of the same loss first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FANOUT = 64


class Place(NamedTuple):
    """One rank's neighbors in the tree."""

    above: int | None
    """None: this is the root."""
    members: tuple[int, ...]
    """Below, on the same host."""
    leaders: tuple[int, ...]
    """Below, on other hosts."""
    above_is_remote: bool

    @property
    def below(self) -> tuple[int, ...]:
        return self.members + self.leaders


def place_of(rank: int, hosts: Sequence[Sequence[int]]) -> Place:
    """`hosts`: the ranks of each, in the order of their lowest rank."""
    leaders = [ranks[0] for ranks in hosts]
    number = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    if rank != leaders[number]:
        return Place(leaders[number], (), (), False)
    above = leaders[(number - 1) // FANOUT] if number else None
    below = leaders[number * FANOUT + 1 : (number + 1) * FANOUT + 1]
    return Place(above, tuple(hosts[number][1:]), tuple(below), True)
