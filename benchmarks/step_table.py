"""Step times as tables: to no communication, to torch's best, and beside the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.agreement import TOLERANCE
from benchmarks.contenders import IN_STEP, PLAIN, TRANSPORTS, WRAPPER, Contender, contender
from benchmarks.models import model
from benchmarks.ratios import Spread, geometric_mean
from benchmarks.step_result import Race, StepResult, judged, targets_of
from benchmarks.tables import OURS_STYLE, QUIET_STYLE, make_table, target_table
from gradsync.cli.display import count

Base = Callable[[Race], str | None]
REPLICATED = TRANSPORTS[0].key
SHORT = {"torch": "defaults", "torch_replicate": "replicate", "torch_replicate_fsdp": "fsdp"}  # others: by bucket size


def parts(result: StepResult) -> Iterator[RenderableType]:
    for ranks in result.ranks:
        races = result.of(ranks)
        yield ratio_table(races, "no communication", lambda race: PLAIN.key, with_time=True)
        yield ratio_table(races, "torch's best", lambda race: race.best("torch"))
        if all(race.ratio(WRAPPER.key, REPLICATED) for race in races):
            yield fronts_table(races)
        yield target_table(targets_of(races), f"{count(ranks, 'rank')}: targets for {contender(judged(races)).name}")
    yield notes(result)


def ratio_table(races: Sequence[Race], base_name: str, base: Base, with_time: bool = False) -> Table:
    """Medians of ratios within a repetition, ± half of the inter-quartile range."""
    headings = [_heading(race, base(race), with_time) for race in races]
    title = f"{count(races[0].ranks, 'rank')}: time of a step, to {base_name}"
    table = make_table(title, *headings, "geometric\nmean")
    for one in IN_STEP:
        if any(one.key in (*race.measured, *race.absent, *race.wrong) for race in races) and one is not PLAIN:
            table.add_row(f"  {one.name}", *_row(one, races, base), style=_style(one))
    return table


def fronts_table(races: Sequence[Race]) -> Table:
    """The wrapper beside `replicate`, both in shared memory, within a repetition."""
    title = f"{count(races[0].ranks, 'rank')}: time of a step, to gradsync.replicate"
    table = make_table(title, *(_heading(race, None, False) for race in races), "geometric\nmean")
    table.add_row(f"  {WRAPPER.name}", *_row(WRAPPER, races, lambda race: REPLICATED), style=OURS_STYLE)
    return table


def _heading(race: Race, base: str | None, with_time: bool) -> str:
    """The model, and below it the time or the name of what the column is relative to."""
    name = model(race.model).name.replace(" ", "\n")
    if base is None:
        return name
    if with_time:
        return f"{name}\n{1e3 * race.seconds(base).median:.0f} ms"
    return f"{name}\n{SHORT.get(base, base.rpartition('_')[-1] + ' MB')}"


def _row(one: Contender, races: Sequence[Race], base: Base) -> Iterator[str]:
    ratios = [race.ratio(one.key, base(race)) for race in races]
    for race, ratio in zip(races, ratios, strict=True):
        yield _cell(ratio) if ratio else "WRONG" if one.key in race.wrong else "absent"
    known = [ratio.median for ratio in ratios if ratio]
    yield f"{geometric_mean(known):.2f}" if len(known) == len(races) else ""


def _cell(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ±{50 * (ratio.high - ratio.low) / ratio.median:.0f}%"


def _style(one: Contender) -> str:
    return OURS_STYLE if one.family == "gradsync" else "" if one.family == "mpi" or "best" in one.key else QUIET_STYLE


def notes(result: StepResult) -> Text:
    repetitions = len(result.races[0].repetitions)
    lines = [
        f"Medians of ratios within a repetition, of {repetitions}; ± half of the inter-quartile range.",
        "A step: zero_grad, forward, backward and synchronization, SGD; the slowest rank counts.",
        "gradsync, by transport: replicate; gradsync DDP: the wrapper, which chooses its transport.",
        "torch's best: the fastest of all of torch's ways on a model, named above the column.",
        f"Gradients of all were compared with torch DDP's: within {TOLERANCE:g} of their norm, or WRONG.",
        str(result.machine),
    ]
    for race in result.races:
        where = f"{model(race.model).name}, {count(race.ranks, 'rank')}"
        lines += [f"WRONG   {contender(key).name} ({where}): {why}" for key, why in race.wrong.items()]
    return Text("\n".join([*lines, *_absences(result)]), style=QUIET_STYLE)


def _absences(result: StepResult) -> Iterator[str]:
    """Each reason once, however many models it is the same for."""
    found: dict[tuple[str, str], list[str]] = {}
    for race in result.races:
        for key, why in race.absent.items():
            found.setdefault((key, why), []).append(f"{race.model} x {race.ranks}")
    for (key, why), where in found.items():
        everywhere = "" if len(where) == len(result.races) else f" ({', '.join(where)})"
        yield f"absent  {contender(key).name}{everywhere}: {why}"
