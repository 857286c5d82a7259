"""`python -m benchmarks elastic`: its arithmetic, when it kills, and a tiny run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from benchmarks import torchft_lighthouse
from benchmarks.app import app
from benchmarks.elastic_result import make_track
from benchmarks.kills import CALM, Killer
from benchmarks.recovery import Kill, Lost, Ready, Step, recoveries
from gradsync.cli import kernel
from gradsync.cli.launch import Ranks
from tests.support.patience import wait_until

ALL = [(10, 0), (11, 1), (12, 2)]
"""Process and rank."""


def steps(numbers: range, first: float, seconds: float, ranks: list[tuple[int, int]]) -> list[Step]:
    """One after the other; each rank a little later than the one before."""
    return [
        Step(
            began=first + n * seconds,
            at=first + (n + 1) * seconds + rank * 0.01,
            pid=pid,
            rank=rank,
            ranks=len(ranks),
            step=number,
            loss=3.0,
        )
        for n, number in enumerate(numbers)
        for pid, rank in ranks
    ]


def seen(new_is_whole: bool = True) -> tuple[list[Step], list[Ready], list[Lost], list[Kill]]:
    """Steps of 1 s; rank 1 is killed in step 5; steps of 2 s; process 13 comes, and is in step from 10 on."""
    kill = Kill(at=105.5, pid=11, rank=1)
    lost = [Lost(at=105.7, pid=10), Lost(at=105.8, pid=12)]
    found = steps(range(5), 100.0, 1.0, ALL)
    found += steps(range(5, 10), 106.0, 2.0, [(10, 0), (12, 1)])  # finished at 108, 110, ..., 116
    if new_is_whole:
        found += steps(range(10, 15), 116.5, 1.0, [(10, 0), (12, 1), (13, 2)])  # half a second was lost
    return found, [Ready(at=113.0, pid=13)], lost, [kill]


def test_what_a_kill_has_cost() -> None:
    (one,) = recoveries(*seen(), ranks=3)
    assert one.rank == 1
    assert one.noticed == pytest.approx(0.3)
    assert one.began == pytest.approx(0.5)
    assert one.went_on == pytest.approx(2.51)  # the slower of the two
    assert one.beyond == pytest.approx(0.51)
    assert one.ready == pytest.approx(7.5)
    assert one.joined == pytest.approx(4.52)
    assert one.lost == pytest.approx(0.5, abs=0.02)


def test_a_kill_from_which_nobody_has_come_back_does_not_count() -> None:
    assert recoveries(*seen(new_is_whole=False), ranks=3) == []


def test_what_is_drawn_begins_with_the_first_step() -> None:
    found, ready, lost, kills = seen()
    track = make_track("hosts", "two hosts", 3, found, kills, recoveries(found, ready, lost, kills, 3))
    assert track.name == "two hosts, 3 ranks"
    assert track.kills == [pytest.approx(4.5)]
    assert [point.step for point in track.points] == list(range(15))
    assert [point.ranks for point in track.points] == [3] * 5 + [2] * 5 + [3] * 5
    assert median(track.seconds) == pytest.approx(1.0)


def test_a_rank_is_killed_when_all_are_in_step() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        killer = Killer(ranks=1, kills=1, seed=0)

        def take(step: int, ranks: int) -> bool:
            (one,) = steps(range(step, step + 1), 1e-3 * step, 1e-3, [(victim.pid, 0)])
            return killer.take({"event": "step", **vars(one), "ranks": ranks})

        assert not any(take(step, ranks=0) for step in range(20))
        assert [take(step, ranks=1) for step in range(20, 20 + CALM)] == [False] * (CALM - 1) + [True]
        assert victim.wait(10) == -9
    assert not killer.is_done
    assert killer.seen.kills[0].pid == victim.pid


def test_torchft_is_there_or_told_as_absent() -> None:
    with Ranks(torchft_lighthouse.MODULE, [torchft_lighthouse.Job(least=1).to_json()], ranks=1) as ranks:
        _, told = next(ranks.reports())
    assert told.get("value", "").startswith("http") or "torchft" in told["why"]


def test_a_run(tmp_path: Path) -> None:
    file, picture, before = tmp_path / "elastic.json", tmp_path / "elastic.png", kernel.children(os.getpid())
    words = ["elastic", "--tracks", "shared_memory", "--kills", "1", "--layers", "1"]
    done = CliRunner().invoke(app, [*words, "--json", str(file), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["complete"]
    assert not result["absent"]
    (track,) = result["tracks"]
    (one,) = track["recoveries"]
    assert 0 < one["went_on"] < one["ready"]
    assert one["joined"] > 0
    assert {point["ranks"] for point in track["points"]} == {2, 3}
    assert [point["step"] for point in track["points"]] == list(range(len(track["points"])))
    assert track["points"][-1]["loss"] < track["points"][0]["loss"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    figures = r"\d\.\d\d +\d\.\d\d \(\d\.\d\d\) +-?\d+\.\d\d \(-?\d"
    assert re.search(rf"shared memory, 3 ranks +1 +{figures}", done.output), done.output
    assert "…" not in done.output
    assert wait_until(lambda: not any(map(kernel.is_running, kernel.children(os.getpid()) - before)), 5)
