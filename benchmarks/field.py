"""Contenders in one process, on each rank: who is there, who is right, and steps of all of them in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from benchmarks.agreement import Difference, worst
from benchmarks.orders import balanced_orders
from benchmarks.together import Refused, together
from gradsync.cli.report import Reporter


class Runner(Protocol):
    """A contender, warmed up."""

    key: str

    def measure(self) -> float:
        """Seconds of one step. All ranks together."""


R = TypeVar("R", bound=Runner)


class Field(Generic[R]):
    """The contenders that are there, each in a state in which it can be measured."""

    def __init__(self) -> None:
        self.absent: dict[str, str] = {}  # key -> reason
        self.wrong: dict[str, str] = {}
        self.entrants: list[R] = []

    def admit(self, key: str, make: Callable[[], R]) -> None:
        """On all ranks, or nowhere."""
        try:
            self.entrants.append(together(make))
        except Refused as refused:
            self.absent[key] = str(refused)

    def entrant(self, key: str) -> R:
        return next(one for one in self.entrants if one.key == key)

    def judge(self, differences: Mapping[str, Difference]) -> None:
        """Who is wrong on any rank is not measured."""
        everywhere: list[Mapping[str, Difference]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, differences)
        for key in differences:
            found = worst(there[key] for there in everywhere)
            if found.wrong:
                self.wrong[key] = str(found)
        self.entrants = [entrant for entrant in self.entrants if entrant.key not in self.wrong]

    def compete(self, repetitions: int, report: Reporter) -> None:
        orders = balanced_orders(len(self.entrants))
        gc.collect()
        gc.freeze()  # else every collection looks through the modules of all
        gc.disable()
        for number in range(repetitions):
            turns = [self.entrants[place] for place in orders[number % len(orders)]]
            report.send("repetition", times={entrant.key: entrant.measure() for entrant in turns})
            gc.collect()
