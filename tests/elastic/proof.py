"""Trainings that are disturbed, and end with the bits of one that is not: `python -m tests.elastic.proof --help`.

Each job has some faults, and is the same for the same seed and number. A line of JSON is kept for each fault; `--table`
makes the table of docs/elastic.md of such files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from gradsync.cli.chaos.hosts import Host, NotAllowed, make_hosts
from gradsync.cli.crowding import crowding
from tests.elastic.fault import Fault, Kind, draw
from tests.elastic.job import Plan, Result, run, truth

STEPS = 400
SETTINGS = (
    ("shared_memory", 1),
    ("process_group", 1),
    ("hierarchical", 1),
    ("process_group", 2),
    ("hierarchical", 2),
)
_FAULTS = (5, 8)  # a job
Line = dict[str, Any]


def plan(seed: int, number: int, hosts: Sequence[Host]) -> tuple[Plan, Random]:
    """Of the job with this number."""
    dice = Random(f"{seed}/{number}")
    transport, count = SETTINGS[number % len(SETTINGS)]
    faults = draw(dice, dice.randint(*_FAULTS), count, 4 // count)
    return Plan(transport, STEPS, faults=faults, hosts=hosts if count > 1 else ()), dice


def prove(seed: int, jobs: Iterable[int], faults: int, only: Sequence[str], keep: Path, failed: Path) -> bool:
    """Whether all that happened left no trace. Goes on behind what did."""
    say("training once on one rank, undisturbed")
    right, happened, good = truth(STEPS), 0, True
    with ExitStack() as stack, keep.open("a") as file:
        hosts: list[Host] = []
        try:
            hosts = stack.enter_context(make_hosts(2))
        except NotAllowed as reason:
            say(f"without hosts: {reason}")
        for number in jobs:
            if happened >= faults:
                break
            setting = SETTINGS[number % len(SETTINGS)]
            if (only and name(setting) not in only) or (setting[1] > 1 and not hosts):
                continue
            what, dice = plan(seed, number, hosts)
            busy = crowding()
            result = run(what, dice)
            wrong = result.wrong(right)
            for line in lines(seed, number, what, result, wrong, busy):
                file.write(json.dumps(line) + "\n")
                file.flush()
            happened += len(result.fired)
            say(
                f"job {number}: {name((what.transport, 2 if what.hosts else 1))}, {len(result.fired)} of "
                f"{len(what.faults)} faults in {result.seconds:.0f} s: {'; '.join(wrong[:3]) or 'equal bits'}"
            )
            if wrong:
                good = False
                failed.mkdir(exist_ok=True)
                planned = "\n".join(f"{one}: {result.fired.get(one.number, 'not yet')}" for one in what.faults)
                text = "\n".join([*wrong, "", planned, "", result.said])
                (failed / f"{seed}-{number}.txt").write_text(text)
    return good


def lines(seed: int, number: int, what: Plan, result: Result, wrong: list[str], busy: float) -> Iterator[Line]:
    """What is kept: of each fault that happened."""
    for fault in what.faults:
        if fault.number in result.fired:
            yield {
                "seed": seed,
                "job": number,
                "setting": name((what.transport, 2 if what.hosts else 1)),
                "fault": fault.to_json(),
                "equal": not wrong,
                "wrong": wrong[:5],
                "seconds_lost": result.seconds_lost(fault) if fault.kind.is_loss else None,
                "crowding": round(busy, 2),
                "ranks": result.fired[fault.number]["ranks"],
            }


def name(setting: tuple[str, int]) -> str:
    transport, hosts = setting
    return f"{transport}, {hosts} hosts" if hosts > 1 else transport


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# --- the table -----------------------------------------------------------------------------------------------


def table(kept: Sequence[Line]) -> str:
    """In Markdown: what happened where, how often, and how many trainings with it ended with other bits."""
    settings = [name(one) for one in SETTINGS if any(line["setting"] == name(one) for line in kept)]
    rows = defaultdict(list)
    for line in kept:
        rows[_row(line)].append(line)
    text = [f"| | {' | '.join(settings)} | all | equal bits | seconds lost: median | slowest |"]
    text.append("| --- |" + " --- |" * (len(settings) + 4))
    for row in [*sorted(rows), "all"]:
        lines = rows[row] if row != "all" else list(kept)
        counts = [sum(line["setting"] == one for line in lines) for one in settings]
        lost = sorted(line["seconds_lost"] for line in lines if line["seconds_lost"] is not None)
        times = [f"{statistics.median(lost):.2f}", f"{lost[-1]:.2f}"] if lost else ["", ""]
        cells = [row, *map(str, counts), str(len(lines)), str(sum(line["equal"] for line in lines)), *times]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _row(line: Line) -> str:
    fault = Fault.from_json(line["fault"])
    if fault.kind.is_of_host:
        return fault.kind.value
    return f"{'killed, raises or exits' if fault.kind is not Kind.STOP else fault.kind.value}, {fault.phase.value}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.elastic.proof", description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="so many, and those of the last job")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--job", type=int, help="this one only, again")
    parser.add_argument("--from-job", type=int, default=0, help="the first one")
    parser.add_argument("--only", action="append", default=[], help=", ".join(map(name, SETTINGS)))
    parser.add_argument("--json", type=Path, default=Path("elastic-proof.jsonl"), help="where lines are added")
    parser.add_argument("--failed", type=Path, default=Path("elastic-failed"), help="folder for what failed jobs said")
    parser.add_argument("--table", type=Path, nargs="+", help="only make a table, of such files")
    options = parser.parse_args(arguments)
    good = True
    if not options.table:
        jobs = range(options.from_job, 1 << 30) if options.job is None else [options.job]
        try:
            good = prove(options.seed, jobs, options.faults, options.only, options.json, options.failed)
        except KeyboardInterrupt:
            say("interrupted")
            good = False
    kept = [json.loads(line) for path in options.table or [options.json] for line in path.read_text().splitlines()]
    say(table(kept))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
