"""Time is counted as on an idle machine."""

import time

import pytest

from gradsync.cli import crowding as counted
from tests.support import patience
from tests.support.patience import Stopwatch, crowding, seconds_since, wait_until


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many processes want each core, at each look."""
    looks = [1.0]
    for module in (counted, patience):
        monkeypatch.setattr(module, "crowding", lambda: looks[0])
    return looks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_an_idle_machine(busy: list[float], clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 3
    assert watch.seconds == 3
    assert watch.slice(5) == pytest.approx(0.25)
    assert watch.slice(3.125) == pytest.approx(0.125)
    clock[0] += 1
    assert watch.slice(3.5) < 0


def test_a_busy_machine(busy: list[float], clock: list[float]) -> None:
    watch = Stopwatch()
    busy[0] = 10.0
    clock[0] += 20
    assert watch.seconds == 2
    assert seconds_since(100.0) == 2
    busy[0] = 1.0
    clock[0] += 5  # it was busy when it was last looked at
    assert watch.seconds == 2.5
    clock[0] += 5
    assert watch.seconds == 7.5


def test_this_machine() -> None:
    assert 1 <= crowding() <= counted._LONGEST


def test_waiting_ends() -> None:
    began = time.monotonic()
    assert not wait_until(lambda: False, 0.05)
    assert time.monotonic() - began >= 0.05
    assert wait_until(lambda: True, 0)
