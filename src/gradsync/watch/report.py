"""Where all ranks are, as rank 0 collects it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gradsync.watch.position import STACK_LINES, Position
from gradsync.watch.wire import Message

# How long ranks have to say where they are, before those that did not are taken for stopped.
ANSWER_SECONDS = 2.0
_MOST_ROWS = 16


class Row(NamedTuple):
    """Where one rank says it is. No position: it did not answer, though its process is there."""

    rank: int
    at: Position | None
    line: str = ""
    stack: tuple[str, ...] = ()


class Survey:
    """Rank 0 has asked all ranks where they are, and collects their answers."""

    def __init__(self, ranks: Iterable[int], above_of: Callable[[int], int | None]) -> None:
        """`above_of`: over which rank another one is heard."""
        self._ranks, self._above_of = frozenset(ranks), above_of
        self._until = time.monotonic() + ANSWER_SECONDS
        self._answers: dict[int, Row] = {}

    def take(self, message: Message) -> None:
        """One rank's answer."""
        rank, stack = int(message["rank"]), tuple(map(str, message["stack"]))
        self._answers[rank] = Row(rank, Position.unpack(message["at"]), str(message["line"]), stack)

    def is_over(self, now: float) -> bool:
        return now > self._until or self._answers.keys() >= self._ranks

    def report(self, gone: Iterable[int]) -> Message:
        """Who did not answer, then who waits for nobody, then the others. `gone`: from whom nobody expects an answer.

        Of those who are heard over one that does not answer, nothing is known.
        """
        silent = self._ranks - self._answers.keys() - set(gone)
        rows = [
            *(Row(rank, None) for rank in sorted(silent) if self._above_of(rank) not in silent),
            *sorted(self._answers.values(), key=lambda row: (bool(row.at and row.at.awaits), row.rank)),
        ]
        return {"is": "report", "rows": [_pack_row(row) for row in rows[:_MOST_ROWS]]}


def rows_in(message: Message) -> tuple[Row, ...]:
    return tuple(map(_unpack_row, message["rows"]))


def _pack_row(row: Row) -> list[Any]:
    at = None if row.at is None else row.at.pack()
    return [row.rank, at, row.line, [*row.stack[-STACK_LINES:]]]


def _unpack_row(packed: Any) -> Row:
    rank, at, line, stack = packed
    return Row(int(rank), None if at is None else Position.unpack(at), str(line), tuple(map(str, stack)))
