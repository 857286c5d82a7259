"""A recording as one HTML page that needs nothing else: numbers, what to change, pictures, tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from gradsync._version import __version__
from gradsync.observe.timeline.advice import Advice, ms, size
from gradsync.observe.timeline.drawing import PALETTE
from gradsync.observe.timeline.measures import BucketMeans, Measures, RankMeans
from gradsync.observe.timeline.step import PHASES

MEANINGS = {
    "data": "from the end of the step before to the first forward: loading data, logging",
    "forward": "inside forward of the replicated module",
    "loss": "between forward and backward",
    "backward": "computing gradients; buckets travel meanwhile",
    "ranks": "standing still while another rank has yet to launch a bucket",
    "transfer": "standing still for sums, when all ranks have launched all buckets",
    "deliver": "after backward: scaling, handing gradients out, buffers, an optimizer in backward",
    "optimizer": "inside optimizer.step()",
    "other": "the rest: zero_grad(), clipping, metrics",
}
NAMES = {**{phase: phase for phase in PHASES}, "ranks": "waits for ranks", "transfer": "waits for transfer"}


class Figure(NamedTuple):
    caption: str
    svg: str


def html_report(measures: Measures, advice: Sequence[Advice], figures: Sequence[Figure]) -> str:
    name = measures.module.name if measures.module is not None else "no rounds"
    sections = [
        f"<header><h1>{escape(name)}</h1><p>{escape(describe(measures))}</p></header>",
        _faults(measures),
        _cards(measures),
        _section("What to change", _advice(advice)),
        *(_section(figure.caption, f'<div class="picture">{figure.svg}</div>') for figure in figures),
    ]
    if measures.steps:
        sections += [
            _section("Where a step goes, rank by rank", _ranks(measures)),
            _section("Phases", _phases(measures)),
            _section("Buckets", _buckets(measures.buckets)),
        ]
    sections += [_section("How to read this", _reading(measures))]
    body = "\n".join(part for part in sections if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n<title>gradsync: {escape(name)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body><main>\n{body}\n<footer>gradsync {__version__}</footer>\n</main></body></html>\n"
    )


def describe(measures: Measures) -> str:
    """Ranks, hosts, rounds, transport, in one line."""
    recording, module = measures.recording, measures.module
    hosts = len({one.machine for one in recording.ranks})
    told = f"{recording.size} rank{'s' * (recording.size > 1)} on {hosts} host{'s' * (hosts > 1)}"
    if not measures.steps or module is None:
        return told
    rounds = sorted(measures.steps)
    told += f", {_rounds(rounds)}, {size(measures.steps[rounds[0]][0].round.nbytes)} of gradients"
    if module.left_out:
        told += f"; {module.left_out} earlier rounds were recorded and not kept"
    hook = f", communication hook {module.hook}" if module.hook else ""
    reason = f" ({module.reason})" if module.reason else ""
    return f"{told}; transport {module.transport}{reason}{hook}"


def _rounds(rounds: Sequence[int]) -> str:
    return f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _faults(measures: Measures) -> str:
    """What was raised, and who has told nothing."""
    lines = [f"rank {one.rank} ended early: {one.fault}" for one in measures.recording.ranks if one.fault]
    if missing := measures.recording.missing:
        lines.append(f"no word from rank {', '.join(map(str, missing))}: nothing here is of them")
    return "".join(f'<p class="fault">{escape(line)}</p>' for line in lines)


def _cards(m: Measures) -> str:
    if not m.steps:
        return ""
    hidden = "–" if m.hidden is None else f"{m.hidden:.0%}"
    cards = [
        (ms(m.seconds), "a step, median"),
        (ms(m.spent.exposed), f"exposed: {m.exposed_share:.1%} of the step is waiting and delivering"),
        (hidden, f"of {ms(m.transferring)} of transfers a step hidden behind backward"),
        (ms(m.spent.ranks), "of that waiting for ranks that were behind"),
        (ms(m.spent.transfer), "of that waiting for transfers"),
    ]
    return (
        '<div class="cards">'
        + "".join(f"<div><b>{escape(figure)}</b><span>{escape(words)}</span></div>" for figure, words in cards)
        + "</div>"
    )


def _advice(advice: Sequence[Advice]) -> str:
    return "".join(
        f'<div class="advice"><h3>{escape(one.title)}</h3><p>{escape(one.reason)}</p>'
        f"<p><b>{escape(one.change)}</b></p></div>"
        for one in advice
    )


def _ranks(m: Measures) -> str:
    longest = max(one.spent.total for one in m.by_rank)
    rows = [_rank(one, longest) for one in m.by_rank]
    heads = ("rank", "host", "the mean step", "step", "exposed", "others waited for it")
    return _table("ranks", heads, rows, numbers=(3, 4, 5)) + _legend(m)


def _rank(one: RankMeans, longest: float) -> Sequence[str]:
    parts = "".join(
        f'<i class="{phase}" style="width:{100 * seconds / longest:.3f}%" title="{NAMES[phase]}: {ms(seconds)}"></i>'
        for phase, seconds in zip(PHASES, one.spent, strict=True)
        if seconds > 0
    )
    bar = f'<div class="bar">{parts}</div>'
    return str(one.rank), escape(one.host), bar, ms(one.spent.total), ms(one.spent.exposed), _or_none(one.caused)


def _legend(m: Measures) -> str:
    shown = [phase for phase, seconds in zip(PHASES, m.spent, strict=True) if seconds > 0]
    return '<p class="legend">' + "".join(f'<span><i class="{one}"></i>{NAMES[one]}</span>' for one in shown) + "</p>"


def _phases(m: Measures) -> str:
    rows = [
        (f'<i class="{phase}"></i>{NAMES[phase]}', _or_none(seconds), f"{seconds / m.spent.total:.1%}", MEANINGS[phase])
        for phase, seconds in zip(PHASES, m.spent, strict=True)
    ]
    return _table("phases", ("phase", "mean", "of the step", "what it is"), rows, numbers=(1, 2))


def _buckets(buckets: Sequence[BucketMeans]) -> str:
    heads = ("bucket", "size", "gradients", "ready", "in backward", "queued", "until all", "travels", "waited for")
    rows = [_bucket(one) for one in buckets]
    numbers = (1, 3, 5, 6, 7, 8, 10, 11)
    return _table("buckets", (*heads, "last rank", "sent", "between hosts"), rows, numbers=numbers)


def _bucket(one: BucketMeans) -> Sequence[str]:
    contents = one.contents
    share = min(1.0, one.ready / one.backward) if one.backward > 0 else 1.0
    place = f'<div class="bar"><i class="backward" style="width:{100 * share:.1f}%"></i></div>'
    names = ""
    if contents is not None:
        between = f" … {escape(contents.last)}" if contents.parameters > 1 else ""
        names = f"{contents.parameters}: <code>{escape(contents.first)}{between}</code>"
    return (
        str(one.number),
        size(contents.nbytes) if contents is not None else "",
        names,
        ms(one.ready),
        place,
        _or_none(one.queued),
        _or_none(one.skew),
        _or_none(one.transfer),
        _or_none(one.awaited),
        str(one.last_rank),
        size(one.sent) if one.sent else "–",
        size(one.crossed) if one.crossed else "–",
    )


def _or_none(seconds: float) -> str:
    return ms(seconds) if seconds >= 0.5e-6 else "–"


def _table(kind: str, heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """Cells are HTML already; those at `numbers` are aligned to the right."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="n">{cell}</{tag}>' if place in numbers else f"<{tag}>{cell}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{cells(heads, 'th')}</tr></thead>"
    return f'<div class="wide"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


def _reading(m: Measures) -> str:
    points = [
        "All times are means over ranks and steps, but for the median of a step. The very first round of a replica "
        "plans the buckets, and is left out; so is a first step of which the beginning was not recorded.",
        "<b>Exposed</b> is what data parallelism adds to a step: waits for other ranks, waits for transfers, and "
        "delivering gradients after backward. Everything else a single process would do, too.",
        "A bucket is <b>ready</b> when the last of its gradients is there, <b>queued</b> until those before it have "
        "left, and <b>travels</b> from the last rank's launch to its arrival. That it has arrived is noticed at the "
        "next launch or when it is waited for, and what counts is the first rank that notices: so traveling times, "
        "and the share of them that is hidden, are upper bounds.",
        "The last bucket leaves when backward is over, and can't be hidden.",
        "<code>trace.json</code> beside this page has every step of every rank: open it at ui.perfetto.dev, or at "
        "chrome://tracing.",
    ]
    for clock in m.recording.clocks:
        ranks = f"rank{'s' * (len(clock.ranks) > 1)} {', '.join(map(str, clock.ranks))}"
        error = "unknown: they did nothing together" if clock.error == float("inf") else ms(clock.error)
        points.append(f"The clock of {ranks} was aligned with rank 0's; the error is at most {error}.")
    if not m.recording.clocks and len(m.recording.ranks) > 1:
        points.append("All ranks read the same clock.")
    return "<ul>" + "".join(f"<li>{point}</li>" for point in points) + "</ul>"


def _colors(dark: bool) -> str:
    return "".join(f"i.{name}{{background:{PALETTE[name].dark if dark else PALETTE[name].light}}}" for name in PHASES)


_STYLE = (
    """
:root{--paper:#fff;--page:#f5f6f8;--ink:#1f2933;--quiet:#5b6774;--line:#e3e7eb;--warn:#fdecea;--warnink:#8f2320;--mark:#3f78b5}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
main{max-width:1280px;margin:0 auto;padding:32px 24px}
h1{font-size:28px;margin:0}header p{color:var(--quiet);margin:4px 0 20px}
h2{font-size:17px;margin:0 0 12px}h3{font-size:15px;margin:0 0 2px}
section,.cards>div{background:var(--paper);border:1px solid var(--line);border-radius:8px}
section{padding:18px 20px;margin:16px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px}
.cards>div{padding:14px 16px}.cards b{display:block;font-size:26px;font-weight:600;line-height:1.2}
.cards span{color:var(--quiet);font-size:13px}
.advice{border-left:3px solid var(--mark);padding:2px 0 2px 14px;margin:0 0 14px}.advice:last-child{margin:0}
.advice p{margin:2px 0}.fault{background:var(--warn);color:var(--warnink);border-radius:8px;padding:10px 14px}
.picture svg{max-width:100%;height:auto;display:block}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px}
th{color:var(--quiet);font-weight:500;text-align:left;white-space:nowrap}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);vertical-align:middle}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.bar{display:flex;min-width:120px;height:14px;background:var(--page);border-radius:3px;overflow:hidden}
.ranks td:nth-child(3){width:52%}.buckets td:nth-child(5){width:130px}.buckets td:nth-child(3){min-width:230px}
.bar i{display:block;height:100%}
td>i,.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
.legend{margin:10px 0 0;font-size:13px;color:var(--quiet)}.legend span{margin-right:16px;white-space:nowrap}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
ul{margin:0;padding-left:20px;color:var(--quiet);font-size:14px}li{margin:4px 0}
footer{color:var(--quiet);font-size:12px;margin-top:20px}
@media(prefers-color-scheme:dark){:root{--paper:#14181f;--page:#0d1014;--ink:#e6eaf0;--quiet:#98a4b3;--line:#2a313c;
--warn:#3a1f1e;--warnink:#f2b8b5;--mark:#6aa0d8}}
"""
    + _colors(False)
    + f"@media(prefers-color-scheme:dark){{{_colors(True)}}}"
)
