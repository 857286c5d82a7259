"""`python -m benchmarks engine`: its arithmetic, and one tiny run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import engine_table
from benchmarks.app import app
from benchmarks.chain import chain_input, make_chain
from benchmarks.contenders import IN_ENGINE
from benchmarks.engine_rank import Job
from benchmarks.engine_result import Cost, Growth, Result, Times, costs_of, growths_of


def rounds_with(overhead: float) -> list[Times]:
    """Three rounds on a machine that gets slower; torch's best costs half of `overhead` seconds, plain nothing."""
    shares = {"plain": 0.0, "torch_best": 0.5, "replicate": 1.0}
    return [{key: (2 * slow, slow + share * overhead) for key, share in shares.items()} for slow in (1.0, 5.0, 9.0)]


def cost(parameters: int, overhead_ms: float) -> Cost:
    return next(c for c in costs_of(2, parameters, rounds_with(overhead_ms / 1e3)) if c.contender == "replicate")


def test_overheads_are_medians_of_differences_within_a_round() -> None:
    found = cost(1000, overhead_ms=3.0)
    assert found.host_overhead_ms == pytest.approx(3.0)
    assert found.us_per_parameter == pytest.approx(3.0)
    assert found.host_ratio_to_best == pytest.approx(2.0)
    assert math.isnan(found.clock_ratio_to_best)  # by the clock nobody cost anything
    assert found.clock_ms == pytest.approx(10_000)


@pytest.mark.parametrize(("last", "exponent", "linear"), [(8.0, 0.90, True), (40.0, 1.60, False)])
def test_growth_is_judged_where_it_is_steepest(last: float, exponent: float, linear: bool) -> None:
    (growth,) = growths_of([cost(1000, last), cost(10, 0.5), cost(100, 1.0)])
    assert growth.exponent == pytest.approx(exponent, abs=0.01)
    assert growth.linear is linear


def test_short_rounds_are_repeated_more_often() -> None:
    job = Job(rounds=30, parameters=[100, 1000, 10_000])
    assert [job.rounds_of(n) for n in job.parameters] == [300, 60, 10]
    assert Job.from_json(job.to_json()) == job


def test_every_parameter_of_the_chain_gets_a_gradient() -> None:
    module = make_chain(30)
    module(chain_input()).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    assert len(gradients) == 30
    assert all(g is not None and torch.equal(g, torch.ones(8)) for g in gradients)


def test_growth_is_put_in_words() -> None:
    result = Result(costs=[], growths=[Growth(ranks=2, contender="torch", exponent=0.9)], seconds=1.0)
    assert "0.90  at most linear" in list(engine_table.growth_table(result).columns[1].cells)


@pytest.mark.parametrize("numbers", ["", "x", "15", "0", "100,-10"])
def test_numbers_that_make_no_chain_are_refused(numbers: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["engine", "--parameters", numbers, "--json", str(tmp_path / "out" / "e.json")])
    assert refused.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_tiny_run(tmp_path: Path) -> None:
    files = {"--json": str(tmp_path / "engine.json"), "--picture": str(tmp_path / "engine.png")}
    options = {"--ranks": "1", "--rounds": "1", "--parameters": "20,10", **files}
    done = CliRunner().invoke(app, ["engine", *(word for pair in options.items() for word in pair)])
    assert done.exit_code == 0, done.output
    assert "measuring rounds of 1 rank" in done.output
    assert "\x1b" not in done.output
    result = json.loads((tmp_path / "engine.json").read_text())
    found = [(c["parameters"], c["contender"]) for c in result["costs"]]
    assert found == [(n, contender.key) for n in (10, 20) for contender in IN_ENGINE]
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")
    for name in ("engine.png", "engine.json"):
        assert f"wrote {tmp_path / name}" in done.output
