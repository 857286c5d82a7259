"""Arrivals are counted alike, whether they repeat the round before or not."""

from __future__ import annotations

import contextlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradsync import _torch
from gradsync.engine import line
from gradsync.engine.arrivals import Arrivals

PARAMETERS, BUCKETS = 40, 4


class Rounds:
    """Takes part in the reducer's place, and writes down what it is told."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.ones(1)) for _ in range(PARAMETERS)]
        self.backwards: set[int] = set()
        self.arrivals = Arrivals(self.parameters, self.backwards)
        self.arrivals.listener = self
        self.arrivals.bucket_of = [index * BUCKETS // PARAMETERS for index in range(PARAMETERS)]
        self.arrivals.large = {7}
        self.told: list[tuple[str, int]] = []
        self.looks = 0

    def backward_met(self) -> None:
        if not self.backwards:
            self.arrivals.begin_round(BUCKETS)
            self.arrivals.progress = self._look
        self.backwards.add(_torch.current_graph_task())

    def _look(self) -> None:
        self.looks += 1

    def bucket_complete(self, index: int) -> None:
        self.told.append(("complete", index))

    def unexpected(self, index: int) -> None:
        self.told.append(("unexpected", index))

    def large_arrived(self, index: int) -> None:
        self.told.append(("large", index))

    def run(self, orders: list[list[int]]) -> None:
        """A round of one backward for each order."""
        self.told, self.looks = [], 0
        for order in orders:
            backward(self.parameters, order)
        self.arrivals.count_line()

    def close(self) -> None:
        self.arrivals.synchronised()
        self.arrivals.forget_round()
        self.backwards.clear()


def backward(parameters: list[nn.Parameter], order: list[int]) -> None:
    """In which gradients arrive in this order: what was used last comes first."""
    loss = torch.zeros(1, requires_grad=True).sum()
    for index in reversed(order):
        loss = loss + parameters[index].sum()
    loss.backward()


class Expected:
    """The same, counted one by one."""

    def __init__(self) -> None:
        self.usual = [0] * PARAMETERS

    def run(self, bucket_of: list[int], orders: list[list[int]]) -> tuple[list[int], list[tuple[str, int]]]:
        counts, told = [0] * PARAMETERS, []
        missing = [sum(usual > 0 and bucket_of[i] == b for i, usual in enumerate(self.usual)) for b in range(BUCKETS)]
        for index in (index for order in orders for index in order):
            counts[index] += 1
            if index == 7:
                told.append(("large", index))
            if counts[index] == self.usual[index]:
                missing[bucket_of[index]] -= 1
                if not missing[bucket_of[index]]:
                    told.append(("complete", index))
            elif counts[index] > self.usual[index]:
                told.append(("unexpected", index))
        self.usual = list(map(max, self.usual, counts))
        return counts, told


@st.composite
def nearly_usual(draw: st.DrawFn) -> list[int]:
    """Two neighbours swapped, and perhaps the end is missing."""
    order = list(range(PARAMETERS))
    at = draw(st.integers(0, PARAMETERS - 2))
    order[at : at + 2] = reversed(order[at : at + 2])
    return order[: draw(st.integers(at + 2, PARAMETERS))]


orders = st.permutations(range(PARAMETERS)) | st.lists(st.integers(0, PARAMETERS - 1), unique=True, min_size=1)
usual = st.just(list(range(PARAMETERS)))
once = st.lists(usual | usual | nearly_usual() | orders.map(list), min_size=1, max_size=1)
rounds = once | once | once | st.lists(usual | orders.map(list), min_size=2, max_size=2)


@settings(max_examples=60, deadline=None)
@given(st.lists(rounds, min_size=3, max_size=9))
def test_whatever_comes_is_counted(script: list[list[list[int]]]) -> None:
    found, expected = Rounds(), Expected()
    for backwards in script:
        found.run(backwards)
        counts, told = expected.run(found.arrivals.bucket_of, backwards)
        assert found.arrivals.counts == counts
        assert found.told == told
        assert found.arrivals.order == list(dict.fromkeys(i for order in backwards for i in order))
        assert found.arrivals.dirty == set(found.arrivals.order)
        found.close()
        assert found.arrivals.dirty == set()


def test_what_repeats_itself_is_not_looked_at() -> None:
    found, order = Rounds(), list(range(PARAMETERS))
    for _ in range(2):
        found.run([order])
        assert found.looks == PARAMETERS
        found.close()
    found.run([order])
    # The last one of each bucket, the large one, and one after each full line.
    assert BUCKETS < found.looks < PARAMETERS // 3
    assert found.looks >= PARAMETERS // (line.LONGEST + 1)


def test_a_backward_that_raises_leaves_its_gradients_dirty() -> None:
    found, order = Rounds(), list(range(PARAMETERS))
    for _ in range(3):
        found.run([order])
        found.close()

    def fail(gradient: Tensor) -> None:
        raise RuntimeError

    handle = found.parameters[5].register_hook(fail)
    with contextlib.suppress(RuntimeError):
        backward(found.parameters, order)
    handle.remove()
    assert found.arrivals.dirty == set(range(5))
    found.arrivals.forget_round()
    found.backwards.clear()
    assert found.arrivals.dirty == set(range(5))


def test_looking_from_outside_changes_nothing() -> None:
    found, order = Rounds(), list(range(PARAMETERS))
    seen: list[int] = []
    for _ in range(4):
        handles = [p.register_hook(lambda _: seen.append(len(found.arrivals.seen_dirty()))) for p in found.parameters]
        found.run([order])
        for handle in handles:
            handle.remove()
        assert seen == order  # before the n-th arrives, n are dirty
        assert found.arrivals.counts == [1] * PARAMETERS
        seen.clear()
        found.close()
        if found.arrivals._line.order:
            return
    raise AssertionError("there was never a line")


def test_without_a_listener_only_what_is_dirty_is_noted() -> None:
    found, order = Rounds(), list(range(PARAMETERS))
    for _ in range(3):
        found.run([order])
        found.close()
    found.arrivals.listener = None
    backward(found.parameters, order[:9])
    assert found.arrivals.dirty == set(range(9))
    assert found.arrivals.order == []
