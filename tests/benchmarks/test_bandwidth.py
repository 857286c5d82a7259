"""`python -m benchmarks bandwidth` and `footprint`: tiny runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import bandwidth_rank
from benchmarks.app import app
from benchmarks.bandwidth_rank import Lane, Load, lanes
from benchmarks.memory_rank import MIB, Job, Peaks, forget_peak, peak_bytes, weigh
from tests.support.ranks import Ranks


def test_a_bandwidth_run(tmp_path: Path) -> None:
    file = tmp_path / "bandwidth.json"
    done = CliRunner().invoke(app, ["bandwidth", "--sizes", "1", "--repetitions", "2", "--json", str(file)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    (track,) = result["tracks"]
    assert {"copy", "gloo", "process_group"} <= set(track["figures"])
    assert not {"copy", "gloo", "process_group"} & set(result["absent"])
    assert all(figures["gb_per_second"] > 0 for figures in track["figures"].values())
    assert f"wrote {file}" in done.output
    assert "times gloo's bandwidth" in done.output
    for key in result["absent"]:
        assert key not in track["figures"]


def forget_a_rank() -> tuple[list[str], dict[str, str]]:
    """A carrier that leaves out the last number."""
    honest = bandwidth_rank.load

    def load(carrier: str, numel: int) -> Load:
        made = honest("gloo", numel)
        return made if carrier == "gloo" else Load(made.buffer, lambda: dist.all_reduce(made.buffer[:-1]))

    bandwidth_rank.load = load
    torch.set_num_threads(1)
    there, absent = lanes(["gloo", "lazy"], 1000)
    return [lane.key for lane in there], absent


def test_a_carrier_with_wrong_sums_is_not_measured(ranks: Ranks) -> None:
    for there, absent in ranks(forget_a_rank, 2):
        assert there == ["gloo"]
        assert absent == {"lazy": "ArithmeticError: lazy: numbers from 1.0 to 3.0 instead of 3"}


def one_lane() -> float:
    return Lane("process_group", 1000).measure()


def test_a_transport_carries(ranks: Ranks) -> None:
    assert all(seconds > 0 for seconds in ranks(one_lane, 2))


def test_a_footprint_run(tmp_path: Path) -> None:
    file = tmp_path / "footprint.json"
    words = ["footprint", "--width", "0", "--repetitions", "1", "--json", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert 0 < result["importing"]["median"] < 30
    assert [making["contender"] for making in result["makings"]] == ["replicate", "torch"]
    assert [target["met"] for target in result["targets"][:2]] == [None, None]  # memory was left out
    assert "replicate(GPT) beyond the broadcast" in done.output


def test_a_peak_can_be_forgotten() -> None:
    large = bytearray(os.urandom(64 * MIB))  # written to, so it is resident
    high = peak_bytes()
    del large
    forget_peak()
    assert high - peak_bytes() > 32 * MIB


def weigh_tiny() -> Peaks:
    return weigh(Job(contender="torch_views", width=512, layers=4, steps=2))


def test_a_rank_is_weighed(ranks: Ranks) -> None:
    for peaks in ranks(weigh_tiny, 2):
        assert peaks.parameters == 4 * 512 * 512
        assert peaks.steady > 8  # at least its parameters and gradients, 4 MiB each
        assert 8 < peaks.proportional < peaks.steady  # libraries are shared with everybody
