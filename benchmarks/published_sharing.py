"""The picture in docs/one_model_a_host.md and the tables of docs/performance.md, from published_sharing.json.

`python -m benchmarks.published_sharing` draws it again, and writes the tables into that page. With the file of a run of
`python -m benchmarks sharing`, and a sentence on where and when it was, it takes over the figures first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import sharing_picture
from benchmarks.models import model
from benchmarks.ratios import geometric_mean
from benchmarks.sharing_contenders import (
    ALL,
    IN_BACKWARD,
    MPI_REDUCER,
    NO_COMMUNICATION,
    ONE_PROCESS,
    SHARED,
    TORCH,
    UNSHARED,
    ZERO,
    contender,
    optimizer_kind,
)
from benchmarks.sharing_picture import Panel
from benchmarks.sharing_result import Memory, SharingRace, SharingResult
from gradsync.cli.display import count

FIGURES = Path(__file__).with_name("published_sharing.json")
PICTURE = Path(__file__).parents[1] / "docs" / "sharing.svg"
PAGE = PICTURE.with_name("performance.md")
BEGIN, END = "<!-- tables of published_sharing.json -->", "<!-- end of them -->"  # in the page
TITLE = "Time of a training step with its optimizer; 1 = without communication. Lower is better."
COLORS = {
    TORCH.name: "#9aa5b1",
    ZERO.name: "#ea580c",
    MPI_REDUCER.name: "#7c3aed",
    ONE_PROCESS.name: "#b45309",
    UNSHARED.name: "#60a5fa",
    SHARED.name: "#2563eb",
    IN_BACKWARD.name: "#0d9488",
}


@dataclass(frozen=True)
class Published:
    where: str
    panels: list[Panel]
    memory: dict[str, dict[str, int]]
    """MiB by the number of ranks and contender."""


def read(file: Path = FIGURES) -> Published:
    data = json.loads(file.read_text(encoding="utf-8"))
    return Published(data["where"], [Panel(**panel) for panel in data["panels"]], data["memory"])


def write(published: Published, file: Path = FIGURES) -> None:
    file.write_text(json.dumps(asdict(published), indent=1) + "\n", encoding="utf-8")


def panels_of(result: SharingResult) -> list[Panel]:
    return [_panel(result.of(*which)) for which in result.fields]


def _panel(races: Sequence[SharingRace]) -> Panel:
    plain = NO_COMMUNICATION.key
    keys = [one.key for one in ALL if one.key != plain and any(one.key in race.measured for race in races)]
    found = {key: [race.ratio(key, plain) for race in races] for key in keys}
    return Panel(
        title=f"{optimizer_kind(races[0].optimizer).name}, {count(races[0].ranks, 'rank')}",
        models=[f"{model(race.model).name}\n{1e3 * race.seconds(plain).median:.0f} ms" for race in races],
        ratios={
            contender(key).name: [None if one is None else round(one.median, 3) for one in of]
            for key, of in found.items()
        },
    )


def from_result(data: Mapping[str, Any], where: str) -> Published:
    """From the file of a run."""
    known = SharingRace.__dataclass_fields__
    races = [SharingRace(**{key: race[key] for key in known}) for race in data["races"]]
    memories = [Memory(**memory) for memory in data["memories"]]
    result = SharingResult(races=races, memories=memories, seconds=data["seconds"], load=tuple(data["load"]))
    memory = {
        str(ranks): {contender(key).name: round(one.mib) for key, one in result.weighed(ranks).items()}
        for ranks in result.ranks_weighed
    }
    return Published(where, panels_of(result), memory)


def draw(published: Published, path: Path) -> None:
    sharing_picture.draw(published.panels, COLORS, f"{TITLE}\n{published.where}", path)


def tables(published: Published) -> Iterator[str]:
    """As they stand in docs/performance.md."""
    for panel in published.panels:
        models = [one.partition("\n") for one in panel.models]
        yield _table(
            [f"{panel.title}", *(name for name, _, _ in models), "geometric mean"],
            [
                [NO_COMMUNICATION.name, *(time for _, _, time in models), ""],
                *([name, *map(_figure, [*ratios, _mean(ratios)])] for name, ratios in panel.ratios.items()),
            ],
        )
    ranks = list(published.memory)
    names = dict.fromkeys(name for of_ranks in published.memory.values() for name in of_ranks)
    if ranks:
        yield _table(
            ["memory of the host, MLP, AdamW", *(f"{number} ranks" for number in ranks)],
            [[name, *(_memory(published.memory[number], name) for number in ranks)] for name in names],
        )


def with_tables(page: str, published: Published) -> str:
    """With those of these figures in the place of others."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n\n".join([f"{before}{BEGIN}", *tables(published), f"{END}{after}"])


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if len(known) == len(ratios) else None


def _figure(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _memory(of_ranks: Mapping[str, int], name: str) -> str:
    today = of_ranks.get(UNSHARED.name)
    ratio = f" ({of_ranks[name] / today:.2f})" if today else ""
    return f"{of_ranks[name]} MiB{ratio}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:]:
        file, where = sys.argv[1:]
        write(from_result(json.loads(Path(file).read_text(encoding="utf-8")), where))
    draw(read(), PICTURE)
    page = with_tables(PAGE.read_text(encoding="utf-8"), read())
    PAGE.write_text(page, encoding="utf-8")
