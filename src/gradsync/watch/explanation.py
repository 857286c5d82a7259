"""Why ranks wait, in words: made of where each of them says it is, so that all ranks say the same."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.watch.notice import How, Notice
from gradsync.watch.position import Position
from gradsync.watch.report import Row

_C10D, _NO_COLLECTIVE = "distributed_c10d.py", "_distributed_excepthook"  # shows an exception
_SHOWN = 6  # ranks


def culprits(rows: Sequence[Row]) -> list[int]:
    """The ranks that the others wait for: those that don't answer, or wait for nobody; else those of another bucket,
    if they are fewer than others.
    """
    idle = [row.rank for row in rows if row.at is None or not row.at.awaits]
    if idle:
        return sorted(idle)
    by_place: dict[object, list[int]] = {}
    for row in rows:
        if row.at is not None:
            line = "" if _is_bucket(row.at) else row.line
            by_place.setdefault((row.at.phase, row.at.serial, row.at.round, row.at.awaits, line), []).append(row.rank)
    fewest = min(map(len, by_place.values()), default=0)
    return sorted(r for ranks in by_place.values() if len(ranks) == fewest for r in ranks) if len(by_place) > 1 else []


def explain(rows: Sequence[Row], ended: Sequence[Notice] = ()) -> str:
    """A line for each rank that keeps others waiting, with its stack, and what to make of it."""
    lines = []
    rows = _tell_modules_apart(rows)
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
        lines.append(f"rank {row.rank} {_doing(row)}")
    places = [row.at for row in rows if row.at is not None and row.at.awaits]
    if blamed and len(places) == len(rows):
        lines.append(_different(places))
    return "\n".join(lines)


def _different(places: Sequence[Position]) -> str:
    """All ranks wait, and not for the same."""
    if not all(map(_is_bucket, places)):
        return (
            "The ranks wait for each other in different calls: some train, for example, while others compare, load, "
            "save or make a replica. Let all ranks make the same calls, in the same order."
        )
    if len({at.serial for at in places}) == 1:
        return "The ranks wait for different buckets: their backwards took different ways, or came in another order."
    return (
        "The ranks are in rounds of different replicated modules: the backwards of some reached one, those of others "
        "another one, or both in another order. Let the loss of each rank reach all of them (add what a rank leaves "
        "out, times 0), or replicate one module that contains them."
    )


def _tell_modules_apart(rows: Sequence[Row]) -> Sequence[Row]:
    """Several of one name get a number."""
    serials = {(row.at.module, row.at.serial) for row in rows if row.at is not None}
    names = [name for name, _ in serials]
    return [
        row._replace(at=row.at._replace(module=f"{row.at.module} (replicated module {row.at.serial})"))
        if row.at is not None and row.at.module and names.count(row.at.module) > 1
        else row
        for row in rows
    ]


def _doing(row: Row) -> str:
    if row.at is None:
        return (
            "does not answer, though its process is there: it was stopped (by a debugger, SIGSTOP), or is inside code "
            "that keeps Python's lock."
        )
    where = f" ({row.line})" if row.line else ""
    if row.at.awaits:
        return f"is {row.at}{'' if _is_bucket(row.at) else where}"
    for line in reversed(row.stack):
        if _C10D in line and not line.endswith(_NO_COLLECTIVE):
            return f"has been in another collective, {line.rpartition(' in ')[2]}(), for {row.at.since:.0f} s{where}:"
    return f"has been {row.at} for {row.at.since:.0f} s{where}:"


def _is_bucket(at: Position) -> bool:
    """Whether it waits in a backward; else in another call, of which the line says which."""
    return str(at.awaits).startswith("bucket ")


def _rounds(notice: Notice) -> int:
    return max((number for _, number in notice.rounds), default=0)
