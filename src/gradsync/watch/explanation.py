"""Why ranks wait, in words: made of where each of them says it is, so that all ranks say the same."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.watch.notice import How, Notice
from gradsync.watch.report import Row

_C10D = "distributed_c10d.py"
_SHOWN = 6  # ranks


def culprits(rows: Sequence[Row]) -> list[int]:
    """The ranks that the others wait for: those that don't answer, or wait for nobody; else those of another bucket."""
    idle = [row.rank for row in rows if row.at is None or not row.at.awaits]
    if idle:
        return sorted(idle)
    by_place: dict[str, list[int]] = {}
    for row in rows:
        by_place.setdefault(str(row.at), []).append(row.rank)
    fewest = min(by_place.values(), key=len, default=[])
    return sorted(fewest) if len(by_place) > 1 else []


def explain(rows: Sequence[Row], ended: Sequence[Notice] = ()) -> str:
    """A line for each rank that keeps others waiting, with its stack, and what to make of it."""
    lines = []
    blamed = set(culprits(rows))
    for row in [row for row in rows if row.rank in blamed][:_SHOWN]:
        lines.append(f"rank {row.rank} {_doing(row)}")
        if row.at is not None and not row.at.awaits:
            lines += [f"    {line}" for line in row.stack]
    for notice in ended:
        how = "ended its script" if notice.how is How.ENDED else "gave up its replicas"
        lines.append(f"rank {notice.rank} {how} after {_rounds(notice)} rounds")
    waiting = [row for row in rows if row.at is not None and row.at.awaits and row.rank not in blamed]
    for row in waiting[: _SHOWN - len(blamed)]:
        lines.append(f"rank {row.rank} is {row.at}")
    if waiting and blamed and all(row.at is not None and row.at.awaits for row in rows):
        lines.append(
            "The ranks wait for different buckets: their backwards took different ways, or came in another order."
        )
    return "\n".join(lines)


def _doing(row: Row) -> str:
    if row.at is None:
        return (
            "does not answer, though its process is there: it was stopped (by a debugger, SIGSTOP), or is inside code "
            "that keeps Python's lock."
        )
    where = f" ({row.line})" if row.line else ""
    if row.at.awaits:
        return f"is {row.at}"
    for line in reversed(row.stack):
        if _C10D in line:
            return f"has been in another collective, {line.rpartition(' in ')[2]}(), for {row.at.since:.0f} s{where}:"
    return f"has been {row.at} for {row.at.since:.0f} s{where}:"


def _rounds(notice: Notice) -> int:
    return max((number for _, number in notice.rounds), default=0)
