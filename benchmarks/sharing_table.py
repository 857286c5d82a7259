"""Steps with an optimizer as tables: to no communication, beside the targets, and what they keep in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.agreement import CHANGE_TOLERANCE
from benchmarks.models import model
from benchmarks.ratios import Spread, geometric_mean
from benchmarks.sharing_contenders import (
    ALL,
    IN_MEMORY,
    NO_COMMUNICATION,
    UNSHARED,
    Contender,
    contender,
    optimizer_kind,
    threads,
)
from benchmarks.sharing_result import Memory, SharingRace, SharingResult, better, memory_targets, targets_of
from benchmarks.tables import OURS_STYLE, QUIET_STYLE, make_table, target_table
from gradsync.cli.display import count


def parts(result: SharingResult) -> Iterator[RenderableType]:
    for ranks, optimizer in result.fields:
        races = result.of(ranks, optimizer)
        yield ratio_table(races)
        best = better(races)
        which = "" if best is None else f"; the better way: {contender(best).name.removeprefix('gradsync, ')}"
        yield target_table(targets_of(races), f"{_title(races)}: targets{which}")
    for ranks in result.ranks_weighed:
        weighed = result.weighed(ranks)
        yield memory_table(weighed, ranks)
        yield target_table(memory_targets(weighed, ranks), f"{count(ranks, 'rank')}: targets for memory")
    yield notes(result)


def _title(races: Sequence[SharingRace]) -> str:
    return f"{count(races[0].ranks, 'rank')}, {optimizer_kind(races[0].optimizer).name}"


def ratio_table(races: Sequence[SharingRace]) -> Table:
    """Medians of ratios within a repetition, ± half of the inter-quartile range."""
    headings = [
        f"{model(race.model).name.replace(' ', chr(10))}\n{1e3 * race.seconds(NO_COMMUNICATION.key).median:.0f} ms"
        for race in races
    ]
    table = make_table(f"{_title(races)}: time of a step, to no communication", *headings, "geometric\nmean")
    for one in ALL:
        if one is not NO_COMMUNICATION and any(one.key in (*r.measured, *r.absent, *r.wrong) for r in races):
            table.add_row(f"  {one.name}", *_row(one, races), style=OURS_STYLE if one.is_ours else "")
    return table


def _row(one: Contender, races: Sequence[SharingRace]) -> Iterator[str]:
    ratios = [race.ratio(one.key, NO_COMMUNICATION.key) for race in races]
    for race, ratio in zip(races, ratios, strict=True):
        yield _cell(ratio) if ratio else "WRONG" if one.key in race.wrong else "absent"
    known = [ratio.median for ratio in ratios if ratio]
    yield f"{geometric_mean(known):.2f}" if len(known) == len(races) else ""


def _cell(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ±{50 * (ratio.high - ratio.low) / ratio.median:.0f}%"


def memory_table(weighed: dict[str, Memory], ranks: int) -> Table:
    table = make_table(f"{count(ranks, 'rank')}: memory of the host, MLP, AdamW", "MiB", f"to {UNSHARED.name}")
    today = weighed.get(UNSHARED.key)
    for one in IN_MEMORY:
        if found := weighed.get(one.key):
            ratio = f"{found.bytes / today.bytes:.2f}" if today else ""
            table.add_row(f"  {one.name}", f"{found.mib:.0f}", ratio, style=OURS_STYLE if one.is_ours else "")
    return table


def notes(result: SharingResult) -> Text:
    lines = []
    if result.races:
        repetitions = len(result.races[0].repetitions)
        lines += [
            f"Medians of ratios within a repetition, of {repetitions}; ± half of the inter-quartile range.",
            "A step: zero_grad, forward, backward and synchronization, the optimizer; the slowest rank counts.",
            f"One process: the batches of all ranks as one, {_threads(result)}.",
            "Parameters of all were compared with torch DDP's: what the first steps have changed, within "
            f"{CHANGE_TOLERANCE:g} of its norm, or WRONG.",
        ]
    if result.memories:
        lines.append("Memory: what training takes beyond what was there before the model; shared pages count once.")
    lines += [f"{result.machine}; load {result.load[0]:.1f} at the beginning, {result.load[1]:.1f} at the end"]
    for race in result.races:
        where = f"{model(race.model).name}, {_title([race])}"
        lines += [f"WRONG   {contender(key).name} ({where}): {why}" for key, why in race.wrong.items()]
    return Text("\n".join([*lines, *_absences(result)]), style=QUIET_STYLE)


def _threads(result: SharingResult) -> str:
    numbers = sorted({race.ranks for race in result.races})
    return ", ".join(f"{count(threads(ranks), 'thread')} for {ranks} ranks" for ranks in numbers)


def _absences(result: SharingResult) -> Iterator[str]:
    """Each reason once."""
    reasons = dict.fromkeys((key, why) for race in result.races for key, why in race.absent.items())
    yield from (f"absent  {contender(key).name}: {why}" for key, why in reasons)
