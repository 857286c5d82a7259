"""Who trains together, decided under any order of deaths, births and steps; ranks are imitated, time is a number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.elastic.coordinator import FRESH, Coordinator, Terms

STEPS = 12


@dataclass
class Imitated:
    """What a rank does with what it is told; see `elastic/training.py`."""

    name: str
    step: int = FRESH
    stage: str = "imports"  # ready, between, arrived, stepping
    whole: bool = True
    epoch: dict[str, Any] | None = None
    most: int | None = None
    before: int | None = None
    is_told_of_loss: bool = False

    def take(self, message: dict[str, Any]) -> int | None:
        """The step to answer "hold" with."""
        match message["is"]:
            case "epoch":
                assert self.stage == "ready", "an epoch begins with those who wait for it"
                mine, source = message["rank"], message["source"]
                assert self.whole or mine in message["behind"]
                if mine != source and mine not in message["behind"]:
                    assert self.step == message["step"]
                self.epoch, self.stage, self.whole = message, "between", True
                self.step, self.most, self.before, self.is_told_of_loss = message["step"], None, None, False
            case "lost":
                self.is_told_of_loss = True
            case "hold":
                self.most = self.step + 1
                return self.step
            case "break":
                self.before = message["before"]
        return None

    def has_brought(self, step: int) -> bool:
        """Its part of that step's gradients."""
        return self.step > step or (self.step == step and self.stage in ("arrived", "stepping"))

    @property
    def ends_at(self) -> int:
        ends = self.epoch["ends"] if self.epoch else None
        return STEPS if ends is None else min(STEPS, ends)


class World:
    """Ranks and the coordinator, until it says that training is over."""

    def __init__(self, seed: int, least: int) -> None:
        self.chance = random.Random(seed)
        self.coordinator = Coordinator(Terms(least=least, wait=1e9, limit=1e9))
        self.ranks: dict[str, Imitated] = {}
        self.members: list[str] = []
        self.begun: list[int] = []  # the steps that epochs began with
        self.all_lost = False
        self.dismissed: dict[str, str] = {}
        self.now = 0.0
        self.born = 0
        self.said: dict[str, list[dict[str, Any]]] = {}  # by ranks, and not heard yet
        self.told: dict[str, list[dict[str, Any]]] = {}

    def bear(self) -> None:
        name = f"0000.{self.born:04}.000001"
        self.born += 1
        self.ranks[name] = Imitated(name)
        self.coordinator.born(name, self.now)
        self.pass_on()

    def kill(self, name: str) -> None:
        while self.said.get(name):  # what it said before is heard before
            self.hear(name)
        del self.ranks[name]
        if not self.ranks.keys() & set(self.members):
            self.all_lost = True
        self.coordinator.died(name, "killed by SIGKILL", self.now)
        self.pass_on()

    def leave(self, one: Imitated, finished: bool = False) -> None:
        if one.stage == "stepping":
            one.whole = False
        one.stage = "ready"
        said = {"step": one.step, "whole": one.whole, "finished": finished, "model": "same", "blamed": []}
        self.said.setdefault(one.name, []).append({"is": "ready", **said})

    def hear(self, name: str) -> None:
        """The next thing that this rank has said."""
        message = self.said[name].pop(0)
        if message["is"] == "ready":
            self.coordinator.ready(name, message, self.now)
        else:
            self.coordinator.at(name, message["step"], self.now)
        self.pass_on()

    def deliver(self, name: str) -> None:
        """The next thing that this rank is told."""
        message, one = self.told[name].pop(0), self.ranks.get(name)
        if one is None:
            return
        if message["is"] in ("over", "give up", "kill", "refused"):
            self.dismissed[name], one.stage = message["is"], "dismissed"
        elif (asked := one.take(message)) is not None:
            self.said.setdefault(name, []).append({"is": "at", "step": asked})

    def settle(self) -> None:
        """Everything that was said or told has come."""
        while self.post():
            pass

    def post(self) -> bool:
        """One message on one of the ways; each way keeps its order."""
        ways = [(self.hear, name) for name in sorted(self.said) if self.said[name]]
        ways += [(self.deliver, name) for name in sorted(self.told) if self.told[name]]
        if not ways:
            return False
        way, name = self.chance.choice(ways)
        way(name)
        return True

    def move(self, one: Imitated) -> bool:
        """One thing that this rank does, if it can do any."""
        match one.stage:
            case "imports":
                self.leave(one)
            case "between":
                if one.step >= one.ends_at:
                    self.leave(one, finished=True)
                elif one.is_told_of_loss or (one.before is not None and one.step >= one.before):
                    self.leave(one)
                elif one.before is None and one.most is not None and one.step > one.most:
                    return False
                else:
                    one.stage = "arrived"
            case "arrived":
                others = [self.ranks.get(name) for name in self.members]
                if all(o is not None and o.has_brought(one.step) for o in others):
                    one.stage = "stepping"
                elif one.is_told_of_loss:
                    self.leave(one)
                else:
                    return False
            case "stepping":
                one.stage, one.step = "between", one.step + 1
            case _:
                return False
        return True

    def pass_on(self) -> None:
        while orders := self.coordinator.orders():
            began = [order for order in orders if order.message["is"] == "epoch"]
            if began:
                self.check(began[0].message["step"], [order.to for order in began])
            for order in orders:
                self.told.setdefault(order.to, []).append(order.message)

    def check(self, step: int, members: list[str]) -> None:
        """Before an epoch begins: no step is lost that a survivor has finished."""
        survivors = [self.ranks[name] for name in members if name in self.members]
        if survivors:
            assert step == max(one.step for one in survivors if one.whole)
            if self.begun:
                assert step >= self.begun[-1]
        else:
            assert not self.begun or self.all_lost
        assert len(members) >= self.coordinator.terms.least
        assert len(set(members)) == len(members)
        self.members, self.all_lost = members, False
        self.begun.append(step)

    def run(self, faults: int) -> None:
        """Things happen in any order; ranks that can go on do so in the end."""
        for _ in range(10_000):
            if self.coordinator.over:
                break
            self.now += 0.01
            if self.chance.random() < 0.6 and self.post():
                continue
            names = sorted(self.ranks)
            least = self.coordinator.terms.least
            if (faults and self.chance.random() < 0.15) or len(names) < least:
                if names and faults and self.chance.random() < 0.6:
                    faults -= 1
                    self.kill(self.chance.choice(names))
                elif len(names) < 5:
                    faults -= bool(faults)
                    self.bear()
                continue
            self.chance.shuffle(names)
            if not any(self.move(self.ranks[name]) for name in names) and not self.post():
                self.now += 100.0
            self.coordinator.decide(self.now)
            self.pass_on()


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 25))
def test_training_ends_whatever_happens(seed: int, least: int, faults: int) -> None:
    world = World(seed, least)
    for _ in range(world.chance.randint(least, 4)):
        world.bear()
    world.run(faults)
    assert world.coordinator.over == "finished", (world.coordinator, world.ranks)
    world.settle()
    trained = [one for name, one in world.ranks.items() if world.dismissed.get(name) == "over"]
    assert all(one.step == STEPS for one in trained)


def test_a_torn_rank_takes_over_from_a_whole_one() -> None:
    world = World(0, 1)
    for _ in range(2):
        world.bear()
    for name in list(world.ranks):
        world.move(world.ranks[name])
    world.settle()
    first, second = world.ranks.values()
    world.leave(first)
    second.stage = "stepping"
    world.leave(second)
    world.settle()
    assert (first.stage, second.stage) == ("between", "between")
    assert second.epoch is not None
    assert second.epoch["behind"] == [1]
    assert second.epoch["source"] == 0


def test_nobody_is_whole() -> None:
    world = World(0, 1)
    world.bear()
    (only,) = world.ranks.values()
    world.move(only)
    world.settle()
    only.stage = "stepping"
    world.leave(only)
    world.settle()
    assert "no rank that is left has a whole model" in world.coordinator.over
    assert world.dismissed == {only.name: "give up"}


def test_a_fresh_rank_is_no_source_beside_torn_ones() -> None:
    """It would begin the training again, without a word."""
    world = World(0, 1)
    world.bear()
    (old,) = world.ranks.values()
    world.move(old)
    world.settle()
    world.bear()
    world.move(list(world.ranks.values())[1])
    world.settle()
    old.stage = "stepping"
    world.leave(old)
    world.settle()
    assert "no rank that is left has a whole model" in world.coordinator.over


def test_too_few_ranks_wait_and_give_up() -> None:
    coordinator = Coordinator(Terms(least=2, wait=10.0))
    for name in "ab":
        coordinator.born(name, 0.0)
    for name in "ab":
        coordinator.ready(name, {"step": FRESH, "whole": True, "finished": False, "model": ""}, 1.0)
    assert [order.message["is"] for order in coordinator.orders()] == ["epoch", "epoch"]
    coordinator.died("b", "killed by SIGKILL", 2.0)
    coordinator.ready("a", {"step": 4, "whole": True, "finished": False, "model": ""}, 3.0)
    assert "1 of at least 2 ranks are left: waiting 10 s for others" in coordinator.words()
    coordinator.decide(12.0)
    assert not coordinator.over
    coordinator.decide(13.1)
    why = "only 1 of at least 2 ranks were there for 10 s"
    assert coordinator.orders()[-1].message == {"is": "give up", "why": why, "checkpoint": True}


def test_who_does_not_come_back_is_ended() -> None:
    coordinator = Coordinator(Terms(least=1, wait=10.0, limit=100.0, blamed=5.0))
    for name in "abc":
        coordinator.born(name, 0.0)
    for name in "abc":
        coordinator.ready(name, {"step": FRESH, "whole": True, "finished": False, "model": ""}, 1.0)
    coordinator.orders()
    coordinator.ready("a", {"step": 1, "whole": True, "finished": False, "model": "", "blamed": [2]}, 10.0)
    assert [(order.to, order.message["is"]) for order in coordinator.orders()] == [("b", "lost"), ("c", "lost")]
    coordinator.decide(16.0)
    assert [(order.to, order.message["is"]) for order in coordinator.orders()] == [("c", "kill")]
    coordinator.decide(109.0)
    assert coordinator.orders() == []
    coordinator.decide(111.0)
    assert ("b", "kill") in [(order.to, order.message["is"]) for order in coordinator.orders()]


@pytest.mark.parametrize("first", [True, False])
def test_ranks_that_train_something_else(first: bool) -> None:
    coordinator = Coordinator(Terms(least=1, wait=10.0))
    fresh = {"step": FRESH, "whole": True, "finished": False}
    coordinator.born("a", 0.0)
    if first:
        coordinator.born("b", 0.0)
    coordinator.ready("a", {**fresh, "model": "one"}, 1.0)
    if not first:
        coordinator.born("b", 2.0)
    coordinator.ready("b", {**fresh, "model": "another"}, 3.0)
    if first:
        assert "different models" in coordinator.over
    else:
        assert [(order.to, order.message["is"]) for order in coordinator.orders()] == [("a", "epoch"), ("b", "refused")]
