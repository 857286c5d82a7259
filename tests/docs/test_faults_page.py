"""The messages in docs/faults.md are what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradsync.transport import start_watch
from gradsync.watch import patience
from gradsync.watch.explanation import explain
from gradsync.watch.notice import BY_EXIT, How, Notice
from gradsync.watch.position import Awaited, Position, here
from gradsync.watch.report import Row

PAGE = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "docs" / "faults.md").read_text())
PAST = Position("past the end", "Sequential", 0, 11, since=5.0)
WAITS = Position("at the end of backward", "Sequential", 0, 12, str(Awaited(0, 1, "2.bias", 4)), 5.0)
STACK = ("/home/me/train.py:30 in <module>", "/home/me/train.py:14 in load_batch")
RAISED = Notice(
    1, How.RAISED, "ValueError: shard-0012.bin is truncated", (STACK[0], STACK[1].replace("14", "13")), at=PAST
)
C10D = (
    ".../torch/distributed/c10d_logger.py:83 in wrapper",
    ".../torch/distributed/distributed_c10d.py:5356 in barrier",
)


def shows(text: object) -> bool:
    return re.sub(r"\s+", " ", str(text)) in PAGE


@pytest.mark.parametrize(
    "notice",
    [
        Notice(1, How.GONE, at=PAST._replace(since=1.0)),
        RAISED,
        Notice(1, How.UNREACHABLE, at=PAST._replace(round=2, since=8.1)),
    ],
)
def test_a_rank_is_lost(notice: Notice) -> None:
    assert shows(f"ReplicaLostError: {notice.error(0)} (...)"), notice.error(0)


@pytest.mark.parametrize("why", ["", BY_EXIT])
def test_a_rank_has_ended_early(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "now", WAITS)
    watch: Any = SimpleNamespace(rank=0)
    error = patience._error(watch, Notice(1, How.ENDED, why, rounds=((0, 12),)))
    assert shows(f"ReplicaLostError: {error} (...)"), error


@pytest.mark.parametrize(
    "rows",
    [
        [Row(1, PAST, "train.py:14 in load_batch", STACK), Row(0, WAITS)],
        [Row(1, None)],
        [
            Row(0, WAITS._replace(serial=1, round=3, awaits=str(Awaited(1, 2, "0.bias", 2)))),
            Row(1, WAITS._replace(serial=0, round=3, awaits=str(Awaited(1, 2, "0.bias", 2)))),
        ],
        [Row(0, WAITS), Row(1, PAST._replace(awaits="what each rank says of itself"), "train.py:14 in load_batch")],
    ],
)
def test_a_rank_does_not_come(rows: list[Row]) -> None:
    assert shows(explain(rows)), explain(rows)


def test_a_rank_in_another_collective() -> None:
    stack = (STACK[0], STACK[1].replace("14", "15"), *C10D)
    assert shows(explain([Row(1, PAST, "train.py:15 in load_batch", stack)]))


def test_while_a_replica_is_made() -> None:
    for at in (PAST, Position()):
        told = start_watch._Failure(1, RAISED._replace(at=at).told().rstrip()).error(0)
        assert shows(f"ReplicaLostError: {told}"), told
    why = (
        "could not replicate its module: UnsuitableModuleError: parameter 'bias' is on the meta device and has no "
        "values. Materialize the module first: module.to_empty(device=...), then initialize or load its parameters."
    )
    assert shows(f"ReplicaLostError: {start_watch._Failure(1, why).error(0)}")
