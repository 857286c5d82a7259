"""Statistics for people: as plain text for a terminal, and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from gradsync.observe import units
from gradsync.observe.costs import Costs
from gradsync.observe.memory import Memory
from gradsync.observe.round_statistics import BucketStatistics, RoundStatistics

_MOST_BUCKETS = 32  # shown; all of them are in `latest.buckets`
_MOST_NAMES = 8
_MOST_RANKS = 4
_WIDEST_NAME = 40
_NOTHING = "–"
_CELL = "padding:.1em .7em"
_FRAME = "border-collapse:collapse;margin:0 0 1em 0"
# Parts of a step, in its order.
_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "exposed": "communication, exposed",
    "finishing": "end of round",
    "optimizer": "optimizer",
    "outside": "outside",
}


class Report(NamedTuple):
    """What is shown."""

    module: str
    rank: int
    size: int
    transport: str
    hook: str
    latest: RoundStatistics | None
    total: Costs
    memory: Memory
    waited_for: Mapping[int, float]
    waited_for_rounds: int
    corrected_rounds: int
    repaired_rounds: int
    optimizer_in_backward: bool
    on_host_only: bool
    sparse: int = 0


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: frozenset[int]  # columns of words, not of numbers


def as_text(report: Report) -> str:
    lines = [_title(report)]
    for table in _tables(report):
        lines += ["", *_aligned(table)]
    facts = list(_facts(report))
    widest = max(len(name) for name, _ in facts)
    return "\n".join([*lines, "", *(f"  {name:{widest}}  {text}" for name, text in facts)])


def as_html(report: Report) -> str:
    """By itself: no style sheet, no script, nothing fetched."""
    tables = "".join(map(_html_table, _tables(report)))
    facts = "".join(
        f'<tr><th style="text-align:left;vertical-align:top;{_CELL}">{escape(name)}</th>'
        f'<td style="text-align:left;{_CELL}">{escape(text)}</td></tr>'
        for name, text in _facts(report)
    )
    title = f"<p><b>{escape(_title(report))}</b></p>"
    return f'<div style="overflow-x:auto">{title}{tables}<table style="{_FRAME}">{facts}</table></div>'


def _html_table(table: Table) -> str:
    aligned = ["left" if at in table.words else "right" for at in range(len(table.head))]
    styles = [f"text-align:{side};{_CELL};white-space:pre" for side in aligned]

    def cells(tag: str, row: Sequence[str]) -> str:
        both = zip(row, styles, strict=True)
        return "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in both)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    head = f'<tr style="border-bottom:1px solid">{cells("th", table.head)}</tr>'
    return f'<table style="{_FRAME}"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _aligned(table: Table) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    for row in (table.head, *table.rows):
        cells = (
            cell.ljust(width) if at in table.words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "   ".join(cells).rstrip()


# --- what is in them -----------------------------------------------------------------------------


def _title(report: Report) -> str:
    told = units.count(report.total.rounds, "round") if report.total.rounds else "no round yet"
    return f"{report.module}, rank {report.rank} of {report.size}: {told}"


def _tables(report: Report) -> Iterator[Table]:
    if report.latest is not None:
        yield _costs(report.latest, report.total)
        yield _buckets(report.latest)


def _costs(latest: RoundStatistics, total: Costs) -> Table:
    mean = total.mean()
    columns: tuple[Costs, ...] = (latest, mean, total)
    rows = [("step", *(units.seconds(one.seconds) for one in columns), "100 %")]
    for name, words in _PHASES.items():
        times = [getattr(one, name) for one in columns]
        rows.append((f"  {words}", *map(units.seconds, times), units.share(times[1], mean.seconds)))
    for name, words in (("communication", "communication"), ("waited", "  waited for peers")):
        times = [getattr(one, name) for one in columns]
        rows.append((words, *map(units.seconds, times), units.share(times[1], mean.seconds)))
    rows.append(("  hidden by backward", *(units.share(one.overlap, 1) for one in columns), ""))
    rows.append(("sent", *(_sent(one, one.sent) for one in columns), ""))
    if total.crossed:
        rows.append(("  to other hosts", *(_sent(one, one.crossed) for one in columns), ""))
    rows.append(
        ("bandwidth", *(_NOTHING if one.bandwidth is None else units.rate(one.bandwidth) for one in columns), "")
    )
    head = ("", f"round {latest.number}", "mean", "total", "of a step")
    return Table(head, rows, frozenset({0}))


def _sent(costs: Costs, nbytes: int) -> str:
    return units.size(nbytes) if costs.is_counted else _NOTHING


def _buckets(latest: RoundStatistics) -> Table:
    head = ("bucket", "parameters", "size", "ready", "start", "end", "waited")
    flat = [moment for one in latest.buckets for moment in (one.ready, one.start, one.end)]
    *told, backward_ended = units.moments([*flat, latest.backward_ended])
    rows = [_bucket(one, told[3 * at : 3 * at + 3]) for at, one in enumerate(latest.buckets)]
    if len(rows) > _MOST_BUCKETS:
        half = _MOST_BUCKETS // 2
        left_out = f"({len(rows) - 2 * half} more)"
        rows = [*rows[:half], ("…", left_out, *[""] * (len(head) - 2)), *rows[-half:]]
    ended = ("", "(backward has ended)", "", "", "", backward_ended, "")
    return Table(head, [*rows, ended], frozenset({1}))


def _bucket(one: BucketStatistics, moments: Sequence[str]) -> tuple[str, ...]:
    return str(one.number), _from_to(one.parameters), units.size(one.nbytes), *moments, units.seconds(one.waited)


def _from_to(names: Sequence[str]) -> str:
    if not names:
        return _NOTHING
    if len(names) == 1:
        return _shortened(names[0])
    return f"{_shortened(names[0])} … {_shortened(names[-1])} ({len(names)})"


def _shortened(name: str) -> str:
    half = _WIDEST_NAME // 2
    return name if len(name) <= _WIDEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    latest, memory = report.latest, report.memory
    yield "transport", report.transport or _NOTHING
    if report.hook:
        yield "hook", f"{report.hook}; how many bytes it has sent, only it knows"
    if latest is not None:
        yield "unused", _listed(latest.unused)
        if latest.idle_buckets:
            yield "left out", f"{units.count(latest.idle_buckets, 'bucket')} that no rank had anything for"
    if report.sparse:
        travel = "gradient travels by itself" if report.sparse == 1 else "gradients travel by themselves"
        yield "sparse", f"{report.sparse} {travel} at the end of the round; those bytes are not counted"
    if report.waited_for:
        yield "waited for", _waits(report.waited_for, report.waited_for_rounds)
    yield "memory", _memory(memory)
    if report.optimizer_in_backward:
        yield "optimizer", "steps in backward, and is counted there and at the end of the round"
    if report.on_host_only:
        yield "times", "of the host, which queues work for the accelerator and does not wait for it"
    if report.corrected_rounds:
        yield (
            "corrected",
            f"{units.count(report.corrected_rounds, 'round')} with a second pass for gradients that came late",
        )
    if report.repaired_rounds:
        yield (
            "repaired",
            f"{units.count(report.repaired_rounds, 'round')} in which replicas were given the same parameters",
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more if names else "no parameter"


def _waits(waited_for: Mapping[int, float], rounds: int) -> str:
    worst = list(waited_for.items())[:_MOST_RANKS]
    told = ", ".join(f"rank {rank} {units.seconds(seconds)}" for rank, seconds in worst)
    return f"{told} by the others in the mean, in {units.count(rounds, 'round')}"


def _memory(memory: Memory) -> str:
    where = (
        "in shared memory" if memory.shared == memory.buckets else f"{units.size(memory.shared)} of it in shared memory"
    )
    buckets = f"{units.size(memory.buckets)} of buckets" + (f", {where}" if memory.shared else "")
    gradients = "gradients lie in them" if memory.gradients_in_buckets else "gradients lie elsewhere"
    process = f"the process took {units.size(memory.process_peak)} at most"
    return f"{buckets}; {gradients}; {process}" if memory.buckets else process
