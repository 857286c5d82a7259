"""Sixty faults, of all kinds, on all transports, as `gradsync chaos` runs them: every promise is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

from gradsync.cli.chaos.fault import FRONTS, TRANSPORTS, Kind, Phase
from gradsync.cli.chaos.plan import Choices, faults

SEED, FAULTS = 7, 60


def test_the_sample_has_everything_in_it() -> None:
    drawn = list(islice(faults(SEED, Choices()), FAULTS))
    assert {fault.kind for fault in drawn} == set(Kind)
    assert {fault.phase for fault in drawn} == set(Phase)
    assert {fault.front for fault in drawn} == set(FRONTS)
    assert {fault.ranks for fault in drawn} == {2, 3, 4}
    lossy = {(fault.transport, fault.hosts) for fault in drawn if fault.kind.is_loss}
    assert lossy == {*((transport, 1) for transport in TRANSPORTS), ("process_group", 2), ("hierarchical", 2)}


def test_all_promises_are_kept(tmp_path: Path) -> None:
    """Two at a time: a cut is mostly waiting. Without network namespaces the sample has no faults between hosts."""
    file = tmp_path / "seen.jsonl"
    options = ["--seed", str(SEED), "--faults", str(FAULTS), "--jobs", "2", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "gradsync.cli", "chaos", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(one["number"] for one in seen) == list(range(FAULTS))
    assert {one["verdict"] for one in seen} == {"went on", "named"}
