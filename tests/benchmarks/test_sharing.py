"""`python -m benchmarks sharing`: who is admitted, what is judged, and a quick run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from benchmarks import sharing, sharing_rank
from benchmarks.agreement import CHANGE_TOLERANCE, Changes
from benchmarks.app import app
from benchmarks.published_sharing import from_result, tables
from benchmarks.sharing_contenders import (
    ALL,
    IN_BACKWARD,
    MPI_REDUCER,
    NO_COMMUNICATION,
    OPTIMIZERS,
    UNSHARED,
    Contender,
    OptimizerKind,
    Training,
)
from benchmarks.sharing_rank import Field
from benchmarks.sharing_result import Memory, SharingRace, better, memory_targets, targets_of
from tests.benchmarks.test_step import TINY
from tests.support.ranks import Ranks

OURS_AND_TORCHS = [one for one in ALL if one is not MPI_REDUCER]


class LeavesOneOut(torch.optim.SGD):
    """Steps all but the last parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(list(parameters)[:-1], lr=lr)


def leave_one_out(module: nn.Module, kind: OptimizerKind) -> Training:
    wrapped = nn.parallel.DistributedDataParallel(module)
    optimizer = LeavesOneOut(wrapped.parameters(), 1e-3)
    return Training(wrapped, optimizer.zero_grad, optimizer.step)


def refuse_on_rank_1(module: nn.Module, kind: OptimizerKind) -> Training:
    if dist.get_rank() == 1:
        raise ValueError("not here")
    return NO_COMMUNICATION.prepare(module, kind)


def admit(optimizer: str) -> Any:
    torch.set_num_threads(1)
    batch = TINY.batch(torch.Generator().manual_seed(dist.get_rank()))
    kind = next(one for one in OPTIMIZERS if one.key == optimizer)
    field = Field([*OURS_AND_TORCHS, *others(optimizer)], TINY, kind, batch)
    times = [entrant.measure() for entrant in field.entrants]
    return [entrant.key for entrant in field.entrants], field.absent, field.wrong, field.parameters, times


def others(optimizer: str) -> list[Contender]:
    local = Contender("local", "every rank for itself", NO_COMMUNICATION.prepare)
    refused = Contender("refused", "refused", refuse_on_rank_1)
    left_out = [Contender("left_out", "a parameter is not stepped", leave_one_out)] if optimizer == "sgd" else []
    return [local, refused, *left_out]


@pytest.mark.parametrize("optimizer", [one.key for one in OPTIMIZERS])
def test_all_come_to_torchs_parameters_and_who_does_not_is_not_measured(ranks: Ranks, optimizer: str) -> None:
    for rank, (entrants, absent, wrong, parameters, times) in enumerate(ranks(admit, 2, optimizer)):
        assert entrants == [one.key for one in OURS_AND_TORCHS]
        assert absent == {"refused": "ValueError: not here"}
        assert list(wrong) == (["local", "left_out"] if optimizer == "sgd" else ["local"])
        assert all(re.match(r"change of [\w.]+ is off by .* more than 0.01", why) for why in wrong.values())
        assert parameters == 4 * 8 + 8 + 8 + 8 + 8 * 3 + 3
        assert [key for key, time in zip(entrants, times, strict=True) if not time] == ["one_process"] * rank


def admit_slow() -> Any:
    sharing_rank.LONGEST = 0.0
    return admit("sgd")


def test_a_single_process_whose_threads_get_no_cores_is_absent(ranks: Ranks) -> None:
    for entrants, absent, *_ in ranks(admit_slow, 2):
        assert "one_process" not in entrants
        assert "other work has the cores for which its threads wait" in absent["one_process"]


def test_elements_with_next_to_no_gradient_do_not_decide() -> None:
    before, gradient = {"w": torch.zeros(4)}, torch.tensor([1.0, -1.0, 1e-9, 0.0])
    changes = Changes(before, {"w": torch.tensor([-1e-3, 1e-3, -1e-3, 0.0])}, {"w": gradient})
    assert not changes.difference({"w": torch.tensor([-1e-3, 1e-3, 1e-3, 0.0])}).wrong
    assert changes.difference({"w": torch.tensor([-1e-3, 1.1e-3, -1e-3, 0.0])}).relative > CHANGE_TOLERANCE
    assert changes.difference({"w": torch.tensor([-1e-3, 1e-3, -1e-3, 1e-3])}).wrong  # without any, it must stay


def race(model: str, optimizer: str = "adamw", ranks: int = 2, **times: float) -> SharingRace:
    known = {"plain": 1.0, "one_process": 1.2, "zero": 1.5, "mpi_1": 1.0, **times}
    repetitions = [{key: seconds * slow for key, seconds in known.items()} for slow in (1.0, 3.0)]
    return SharingRace(
        ranks=ranks, model=model, optimizer=optimizer, parameters=5, repetitions=repetitions, absent={}, wrong={}
    )


def test_both_ways_are_judged_and_the_better_one_is_named() -> None:
    races = [race("gpt", shared=0.8, in_backward=0.6), race("mlp", shared=1.25, in_backward=1.0)]
    found = {target.name: (target.value and round(target.value, 3), target.met) for target in targets_of(races)}
    assert found == {
        "shared, geometric mean of 2 models": (1.0, False),
        "shared, worst model": (1.25, False),
        "shared, to one process, GPT": (0.667, True),
        "shared, to torch DDP + ZeRO, worst model": (0.833, True),
        "shared, to MPI, worst model": (1.25, False),
        "in backward, geometric mean of 2 models": (0.775, True),
        "in backward, worst model": (1.0, True),
        "in backward, to one process, GPT": (0.5, True),
        "in backward, to torch DDP + ZeRO, worst model": (0.667, True),
        "in backward, to MPI, worst model": (1.0, True),
    }
    assert better(races) == "in_backward"


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = targets_of([race("mlp", "fused", 4, shared=0.8)])
    assert [target.met for target in found] == [True, None, True, True, None, None, None, None]
    assert better([race("mlp")]) is None


def test_memory_is_judged_to_a_copy_a_rank() -> None:
    sizes = {"shared_memory": 100, "shared": 55, "in_backward": 60}
    weighed = {key: Memory(ranks=2, contender=key, bytes=size) for key, size in sizes.items()}
    assert [(target.figure, target.met) for target in memory_targets(weighed, 2)] == [("0.55", True), ("0.60", False)]
    assert [target.met for target in memory_targets({}, 4)] == [None, None]
    assert memory_targets(weighed, 3) == []


def test_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "IN_MEMORY", [UNSHARED, IN_BACKWARD])  # each is two processes
    files = {"--json": tmp_path / "deep" / "sharing.json", "--picture": tmp_path / "sharing.png"}
    options = ["--optimizers", "adamw", "--models", "small", "--contenders", "shared_memory,in_backward"]
    small = ["--quick", "--ranks", "2", "--repetitions", "2", "--width", "256"]
    done = CliRunner().invoke(
        app, ["sharing", *options, *small, *(str(word) for pair in files.items() for word in pair)]
    )
    assert done.exit_code == 0, done.output
    assert files["--picture"].read_bytes().startswith(b"\x89PNG")
    assert re.search(r"gradsync, in backward +\d+\.\d\d ±", done.output)
    assert re.search(r"memory, in backward, to a copy a rank +-?\d+\.\d\d +≤ 0.55", done.output)
    result = json.loads(files["--json"].read_text())
    (of_small,) = result["races"]
    assert [set(times) for times in of_small["repetitions"]] == [
        {"plain", "torch_best", "shared_memory", "in_backward"}
    ] * 2
    assert of_small["absent"] == of_small["wrong"] == {}
    assert [one["contender"] for one in result["memories"]] == ["shared_memory", "in_backward"]
    of_race, of_memory = tables(from_result(result, "here"))
    assert re.search(r"^\| gradsync, in backward \| \d+\.\d\d \| \d+\.\d\d \|$", of_race, re.MULTILINE)
    assert re.search(r"^\| gradsync, a copy a rank \| -?\d+ MiB \(1.00\) \|$", of_memory, re.MULTILINE)
