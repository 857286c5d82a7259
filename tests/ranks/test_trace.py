"""`gradsync.trace` on real ranks: what is written, and that training is the same with it, also when something fails."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.errors import InvalidOptionError, NotReplicatedError, ReplicaLostError, WrongTypeError
from gradsync.tracing import trace as tracing
from gradsync.tracing.planned import PlannedTrace, Rounds
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, assert_gradients, backward, build, make, mean_gradients, same_everywhere
from tests.support.patience import crowding
from tests.support.ranks import Ranks, on_ranks
from tests.unit.timeline import trace_format

FILES = ["report.html", "step.png", "step.svg", "trace.json"]


def train(model: Any, steps: int = 3, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def slices_in(folder: Path) -> dict[int, list[Any]]:
    """By rank. Of a trace that viewers show rightly."""
    found: dict[int, list[Any]] = {}
    for (rank, _), events in trace_format.check(json.loads((folder / "trace.json").read_text())).items():
        found.setdefault(rank, []).extend(events)
    return found


def count(slices: list[Any], name: str) -> int:
    return sum(one["name"] == name for one in slices)


def listeners(model: nn.Module) -> int:
    engine = gradsync.replica.engine_of(model)
    return len(engine._recorders) + len(engine.stopwatch._listeners)


def traced(front: str, transport: str, folder: Path) -> None:
    if transport == "hierarchical":
        be_on_host(0)
    model = make(front, build(), transport=transport)
    train(model, 2)
    before = listeners(model)
    with gradsync.trace(model, folder):
        train(model, 3)
    assert sorted(path.name for path in folder.iterdir()) == FILES  # on all ranks, as soon as they have left it
    assert listeners(model) == before
    train(model)
    same_everywhere(model)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
def test_all_ranks_are_in_it(ranks: Ranks, front: str, transport: str, tmp_path: Path) -> None:
    ranks(traced, 2, front, transport, tmp_path / "new" / "out", limit=60)
    slices = slices_in(tmp_path / "new" / "out")
    assert sorted(slices) == [0, 1]
    for of_rank in slices.values():
        for name in ("forward", "backward", "end of backward", "optimizer", "bucket 0", "deliver bucket 0"):
            assert count(of_rank, name) == 3, name
        assert {one["args"]["round"] for one in of_rank if "round" in one["args"]} == {2, 3, 4}
    report = (tmp_path / "new" / "out" / "report.html").read_text()
    assert "2 ranks on 1 host, rounds 3 to 4" in report  # nobody knows when the step of round 2 began
    assert f"transport {transport}" in report


def unusual(folder: Path) -> None:
    """Two replicas in one model, accumulation, an optimizer in backward for one of them."""
    torch.manual_seed(0)
    first, second = (gradsync.replicate(nn.Linear(4, 4), bucket_cap_mb=0.0001) for _ in range(2))
    model = nn.Sequential(first, nn.Tanh(), second)
    gradsync.overlap_optimizer(second, torch.optim.SGD(second.parameters(), lr=0.1))
    gradsync.replicate(model)  # what is left: nothing but the two
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with gradsync.trace(model, folder):
        for _ in range(3):
            with first.no_sync(), second.no_sync():
                model(torch.randn(2, 4)).sum().backward()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    same_everywhere(model)


def test_several_replicas_accumulation_and_optimizers_in_backward(ranks: Ranks, tmp_path: Path) -> None:
    ranks(unusual, 2, tmp_path, limit=60)
    for of_rank in slices_in(tmp_path).values():
        rounds = [one for one in of_rank if one["name"] == "end of backward"]
        assert len(rounds) == 6
        assert count(of_rank, "backward") >= 6 + 6
    assert "Linear" in (tmp_path / "report.html").read_text()


@on_ranks(1)
def test_a_world_of_one(tmp_path: Path) -> None:
    model = gradsync.replicate(build())
    with gradsync.trace(model, str(tmp_path)):
        train(model)
    assert count(slices_in(tmp_path)[0], "optimizer") == 3
    with gradsync.trace(model, tmp_path):  # nothing inside, and what was there is replaced
        pass
    assert slices_in(tmp_path) == {}


# --- what fails -------------------------------------------------------------------------------------------


def raises(folder: Path, on: tuple[int, ...]) -> None:
    model = make("replicate", build())
    rank = dist.get_rank()
    try:
        with gradsync.trace(model, folder):
            train(model)
            if rank in on:
                raise ZeroDivisionError("on purpose")
    except ZeroDivisionError:
        assert rank in on
    else:
        assert rank not in on
    backward(model)
    assert_gradients(model, mean_gradients(model))  # ours was matched with nothing of theirs
    same_everywhere(model)


@pytest.mark.parametrize("on", [(1,), (0,), (0, 1)])
def test_an_exception_inside_goes_on_and_what_was_recorded_is_written(
    ranks: Ranks, tmp_path: Path, on: tuple[int, ...]
) -> None:
    ranks(raises, 2, tmp_path, on, limit=60)
    report = (tmp_path / "report.html").read_text()
    for rank in range(2):
        assert (f"rank {rank} ended early: ZeroDivisionError: on purpose" in report) == (rank in on)
    assert sorted(slices_in(tmp_path)) == [0, 1]


def killed(folder: Path) -> None:
    model = make("replicate", build())
    train(model)
    with pytest.raises(ReplicaLostError, match="rank 1"), gradsync.trace(model, folder):
        _train_and_be_killed(model)


def _train_and_be_killed(model: Any) -> None:
    train(model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model)


def test_a_rank_that_is_lost_inside_is_named_as_ever(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.outcomes(killed, 2, tmp_path, limit=60)
    assert first.error is None
    report = (tmp_path / "report.html").read_text()
    assert "rank 0 ended early: ReplicaLostError: " in report
    assert "no word from rank 1" in report
    assert count(slices_in(tmp_path)[0], "end of backward") == 3


def said_by_gradsync() -> list[str]:
    """Its warnings from now on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradsync").addHandler(handler)
    return said


def alone(folder: Path, who: int) -> list[str]:
    """One rank traces, the other one does not."""
    said = said_by_gradsync()
    vars(tracing)["_TELL_SECONDS"] = 0.5
    model = make("replicate", build())
    if dist.get_rank() == who:
        with gradsync.trace(model, folder):
            train(model)
    else:
        train(model)
    train(model)
    vars(tracing)["_TELL_SECONDS"] = 30.0
    with gradsync.trace(model, folder / "all"):  # in step with the others nevertheless
        train(model)
    same_everywhere(model)
    return said


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_traces_alone_is_told_so_and_training_goes_on(ranks: Ranks, tmp_path: Path, who: int) -> None:
    said = ranks(alone, 2, tmp_path, who, limit=60)
    (line,) = said[who]
    wanted = [f"the trace in {tmp_path} is without rank 1: no word from there.", "no word from rank 0."]
    assert wanted[who] in line
    assert "Trace on all ranks, around the same steps." in line
    assert said[1 - who] == []
    assert sorted(slices_in(tmp_path / "all")) == [0, 1]
    assert (tmp_path / "report.html").exists() == (who == 0)


@on_ranks(1)
def test_what_can_not_be_written_is_told_and_not_raised(tmp_path: Path) -> None:
    said = said_by_gradsync()
    model = gradsync.replicate(build())
    folder = tmp_path / "out"
    with gradsync.trace(model, folder):
        train(model)
        folder.rmdir()
        folder.write_text("in the way")
    (line,) = said
    assert f"the trace could not be written to {folder}: FileExistsError" in line


@on_ranks(1)
def test_ctrl_c_inside_writes_nothing(tmp_path: Path) -> None:
    model = gradsync.replicate(build())
    before = listeners(model)
    with pytest.raises(KeyboardInterrupt), gradsync.trace(model, tmp_path):
        signal.raise_signal(signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
    assert listeners(model) == before


@on_ranks(1)
def test_bad_arguments(tmp_path: Path) -> None:
    model = gradsync.replicate(build())
    for folder in (None, 7, ""):
        wrong: Any = folder
        with pytest.raises(WrongTypeError, match="the folder must be a path"), gradsync.trace(model, wrong):
            pass
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOptionError, match="rank 0 can't write to"), gradsync.trace(model, tmp_path / "file"):
        pass
    with pytest.raises(NotReplicatedError), gradsync.trace(nn.Linear(1, 1), tmp_path):
        pass


# --- clocks -----------------------------------------------------------------------------------------------

APART = """
import os, sys, time, torch, torch.distributed as dist, gradsync
dist.init_process_group("gloo")
model = gradsync.replicate(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gradsync.trace(model, sys.argv[1]):
    for _ in range(5):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
dist.destroy_process_group()
"""
AHEAD = 5000


def test_ranks_with_clocks_that_differ_are_shown_on_one(tmp_path: Path) -> None:
    """In a time namespace, whose clock really is ahead."""
    ahead = ["unshare", "--time", f"--monotonic={AHEAD}"]
    if subprocess.run([*ahead, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no time namespaces here: they need root, and util-linux 2.36")
    store = tmp_path / "store"
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = APART.replace('"gloo"', f'"gloo", f"file://{store}", rank=int(os.environ["RANK"]), world_size=2')
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    ranks = [
        subprocess.Popen([*prefix, *command], env={**environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
        for rank, prefix in enumerate(([], ahead))
    ]
    assert [one.wait(60 * crowding()) for one in ranks] == [0, 0]
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    (clock,) = trace["otherData"]["clocks"]
    assert clock["ranks"] == [1]
    assert abs(clock["ahead of rank 0's, s"] - AHEAD) <= clock["error, s"] + 1e-6
    assert clock["error, s"] < 0.05  # of a machine that is busy with other tests
    slices = slices_in(tmp_path / "out")
    assert max(one["ts"] for one in slices[1]) < 60e6 * crowding()


# --- planned, for a script that knows nothing of it -------------------------------------------------------


def planned(folder: Path, rounds: str, steps: int, ends: bool) -> None:
    trace = PlannedTrace(folder, Rounds.read(rounds))
    models = [make("DistributedDataParallel", build()) for _ in range(2)]
    before = [listeners(model) for model in models]
    for model in models:
        trace.made(gradsync.replica.engine_of(model))
    for _ in range(steps):
        for model in models:
            train(model, 1)
    if ends:
        trace.script_ends()
    else:
        assert [listeners(model) for model in models] == [one + 1 for one in before]
    same_everywhere(models[1])


@pytest.mark.parametrize("rounds", ["0:2", "3:5"])
def test_a_planned_trace_has_these_rounds_and_their_optimizers(ranks: Ranks, tmp_path: Path, rounds: str) -> None:
    ranks(planned, 2, tmp_path, rounds, 8, False, limit=60)
    first, stop = map(int, rounds.split(":"))
    for of_rank in slices_in(tmp_path).values():
        own = [one for one in of_rank if "round" in one["args"] and one["name"] == "end of backward"]
        # It begins and ends with the first of the two: the second one closes round `first - 1` inside.
        wanted = [*range(first, stop), *range(max(first - 1, 0), stop - 1)]
        assert sorted(one["args"]["round"] for one in own) == sorted(wanted)
        # And what ended before it: that is where its first step begins.
        assert count(of_rank, "optimizer") == len(wanted) + (first > 0)


def test_a_planned_trace_of_a_script_that_ends_too_early(ranks: Ranks, tmp_path: Path) -> None:
    ranks(planned, 2, tmp_path, "3:50", 5, True, limit=60)
    assert "rank 0 ended early: the script ended before round 49 had closed" in (tmp_path / "report.html").read_text()
    ranks(planned, 2, tmp_path / "none", "30:50", 5, True, limit=60)
    assert not (tmp_path / "none").exists()
