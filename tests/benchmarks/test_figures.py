"""The arithmetic of `python -m benchmarks`: orders, ratios, targets, agreement of gradients, lists of names."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.agreement import TOLERANCE, Difference, difference, worst
from benchmarks.bandwidth_result import BandwidthResult, Track
from benchmarks.footprint_result import FootprintResult, Making, Peak
from benchmarks.names import read_names, read_numbers
from benchmarks.orders import balanced_orders
from benchmarks.ratios import Spread, fastest, geometric_mean, ratio, slowest, spread
from benchmarks.step_result import Race, StepResult, judged, targets_of
from benchmarks.targets import Target
from gradsync.cli.style import write_json

# --- orders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 13])
def test_each_contender_is_in_each_place_and_after_each_other_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    places = Counter((place, who) for order in orders for place, who in enumerate(order))
    assert set(places.values()) == {len(orders) // count}
    assert len(places) == count * count
    neighbors = Counter(pair for order in orders for pair in pairwise(order))
    assert len(neighbors) == count * (count - 1)
    assert len(set(neighbors.values())) <= 1


# --- ratios ----------------------------------------------------------------------------------------------


def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    assert slowest([{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 4.0}]) == {"a": 2.0, "b": 5.0}


def test_ratios_are_taken_within_a_repetition() -> None:
    """The machine gets ten times slower: the ratio of the medians, 2.2, would say nothing."""
    repetitions = [{"a": 2.0, "b": 1.0}, {"a": 11.0, "b": 5.0}, {"a": 20.0, "b": 10.0}]
    assert ratio(repetitions, "a", "b").median == 2.0


def test_a_spread_has_the_middle_half_of_the_values() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_the_fastest_is_found_by_ratio_and_only_among_the_measured() -> None:
    repetitions = [{"plain": 1.0, "a": 3.0, "b": 2.0}, {"plain": 10.0, "a": 11.0, "b": 30.0}]
    assert fastest(repetitions, ["a", "b", "absent"], "plain") == "a"  # 2.05 and 2.5
    assert fastest(repetitions, ["absent"], "plain") is None


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([0.5, 0.5, 4.0]) == pytest.approx(1.0)


# --- step results ----------------------------------------------------------------------------------------


def race(model: str, ours: float, ranks: int = 2, **others: float) -> Race:
    times = {"plain": 1.0, "torch": 2.0, "torch_best_25": 1.6, "shared_memory": ours, **others}
    repetitions = [{key: seconds * slow for key, seconds in times.items()} for slow in (1.0, 3.0)]
    return Race(ranks=ranks, model=model, parameters=5, repetitions=repetitions, absent={}, wrong={})


def test_all_of_torchs_ways_count_as_its_best() -> None:
    assert race("gpt", 1.0).best("torch") == "torch_best_25"
    assert race("gpt", 1.0, torch_replicate=1.5).best("torch") == "torch_replicate"
    assert race("gpt", 1.0).best("mpi") is None


def verdicts(races: list[Race]) -> list[tuple[float | None, bool | None]]:
    return [(target.value and round(target.value, 3), target.met) for target in targets_of(races)]


def test_targets_of_two_ranks() -> None:
    races = [race("gpt", 0.8, mpi_1=1.0, wrapper=0.8), race("embedding", 1.8, mpi_1=1.0, wrapper=1.89)]
    assert verdicts(races) == [
        (0.75, True),  # to torch's best: 0.8 / 1.6 and 1.8 / 1.6
        (1.125, False),  # the worst of them
        (1.125, False),  # embedding
        (1.2, False),  # to no communication
        (1.8, False),  # to MPI
        (1.05, False),  # the wrapper to replicate: 1.89 / 1.8
    ]


def test_four_ranks_have_a_target_of_their_own() -> None:
    assert verdicts([race("gpt", 0.8, ranks=4)]) == [(0.5, True)]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert verdicts([race("gpt", 0.8)])[2:] == [(None, None), (0.8, True), (None, None), (None, None)]


def test_a_transport_that_is_missing_on_one_model_is_not_judged() -> None:
    without = race("mlp", 1.0, process_group=1.5)
    for times in without.repetitions:
        del times["shared_memory"]
    both = [race("gpt", 1.0, process_group=1.5), without]
    assert judged(both[:1]) == "shared_memory"
    assert judged(both) == "process_group"
    assert targets_of(both)[0].value == pytest.approx(1.5 / 1.6)


def test_a_result_keeps_all_times_and_figures(tmp_path: Path) -> None:
    write_json(tmp_path / "step.json", StepResult(races=[race("gpt", 1.2)], seconds=1.0).to_dict())
    kept = json.loads((tmp_path / "step.json").read_text())
    assert kept["races"][0]["repetitions"][1]["shared_memory"] == pytest.approx(3.6)
    assert kept["races"][0]["figures"]["shared_memory"]["to_torch_best"]["median"] == pytest.approx(0.75)
    assert kept["races"][0]["torch_best"] == "torch_best_25"
    assert kept["targets"]["2"][0]["met"] is True


# --- other results ---------------------------------------------------------------------------------------


def test_bandwidth_is_judged_at_32_mb() -> None:
    repetitions = [{"copy": 0.004, "gloo": 0.06, "shared_memory": 0.010}]
    tracks = [Track(size_mb=size, repetitions=repetitions) for size in (1, 32)]
    assert tracks[1].bandwidth("shared_memory") == pytest.approx(3.355, abs=1e-3)
    assert tracks[1].bandwidth("mpi") is None
    targets = BandwidthResult(ranks=2, tracks=tracks, absent={}).targets()
    assert [target.value for target in targets] == pytest.approx([6.0, 0.4])
    assert [target.met for target in targets] == [True, False]
    small = BandwidthResult(ranks=2, tracks=tracks[:1], absent={}).targets()
    assert [target.met for target in small] == [None, None]


def test_footprint_targets() -> None:
    sizes = {"torch_views": (100, 100), "shared_memory": (110, 95)}
    peaks = [
        Peak(contender=key, parameters=5, start_mib=0, steady_mib=peak, proportional_mib=divided)
        for key, (peak, divided) in sizes.items()
    ]
    making = Making(contender="replicate", first=spread([0.05, 0.06]), later=None)
    result = FootprintResult(ranks=2, importing=spread([0.06]), makings=[making], peaks=peaks, absent={})
    found = [(target.figure, target.met) for target in result.targets()]
    assert found == [("1.10", False), ("0.95", True), ("55 ms", True), ("60 ms", False)]


def test_a_target_in_words() -> None:
    target = Target(name="speed", value=4.0, limit=5, at_least=True, unit=" GB/s")
    assert (target.figure, target.limit_text, target.met) == ("4.00 GB/s", "≥ 5.00 GB/s", False)
    assert Target(name="speed", value=None, limit=5).figure == ""


# --- agreement -------------------------------------------------------------------------------------------


def test_rounding_agrees_and_a_gradient_of_one_rank_does_not() -> None:
    expected = {"weight": torch.ones(100), "bias": torch.zeros(3)}
    assert not difference(expected, {"weight": torch.full((100,), 1 + 1e-6), "bias": torch.zeros(3)}).wrong
    found = difference(expected, {"weight": torch.full((100,), 1.5), "bias": torch.zeros(3)})
    assert found.parameter == "weight"
    assert found.relative == pytest.approx(0.5)
    assert found.wrong
    assert "gradient of weight is off by 0.5 of its norm" in str(found)


@pytest.mark.parametrize("bias", [torch.zeros(0), torch.full((3,), math.nan), torch.ones(3)])
def test_missing_nan_and_unexpected_gradients_are_wrong(bias: torch.Tensor) -> None:
    found = difference({"weight": torch.ones(2), "bias": torch.zeros(3)}, {"weight": torch.ones(2), "bias": bias})
    assert found.parameter == "bias"
    assert found.wrong


def test_nan_is_worse_than_any_number() -> None:
    assert worst([Difference("a", math.nan), Difference("b", 1e9), Difference("c", TOLERANCE)]).parameter == "a"


# --- names on the command line ---------------------------------------------------------------------------


def test_names_are_lists_in_any_form() -> None:
    allowed = ["gpt", "mlp", "small"]
    assert read_names(["small,gpt", "gpt"], allowed, "--models") == ["gpt", "small"]
    assert read_names([], allowed, "--models") == allowed
    with pytest.raises(typer.BadParameter, match="bert: not one of gpt, mlp, small"):
        read_names(["gpt,bert"], allowed, "--models")


def test_numbers() -> None:
    assert read_numbers(["4,2", "2"], "--ranks") == [2, 4]
    for wrong in ("0", "x", "", "2.5"):
        with pytest.raises(typer.BadParameter, match="not a list of numbers from 1"):
            read_numbers([wrong], "--ranks")
