"""What ranks hear of one that raises before its first replica, or does not come to make one: from real scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.errors import ReplicaLostError, RoundTimeoutError
from tests.ranks.small import backward, build, make
from tests.support.patience import crowding
from tests.support.ranks import Ranks, _free_port
from tests.watch.test_last_words import TORCHRUN, environment, output_of, run

SCRIPT = """
import multiprocessing, os, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
import gradsync

how, doomed = sys.argv[1], int(sys.argv[2])

def load():
    raise ValueError("the file is truncated")

def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    model = torch.nn.Linear(4, 4)
    dist.barrier()
    if dist.get_rank() == doomed:
        if how == "child":
            child = multiprocessing.get_context("fork").Process(target=load)
            child.start()
            child.join()
        elif how == "option":
            gradsync.replicate(model, bucket_cap_mb=-1)
        else:
            load()
    gradsync.replicate(model)
    print("replicated", flush=True)

if __name__ == "__main__":
    main()
"""


def in_scripts(how: str, doomed: int, world: int, tmp_path: Path) -> list[str]:
    """What each rank says."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    common, started = environment(), []
    for rank in range(world):
        more = {"RANK": str(rank), "WORLD_SIZE": str(world), "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error{rank}")}
        started.append(
            subprocess.Popen(
                [sys.executable, str(script), how, str(doomed)],
                env={**common, **more},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return [re.sub(r"^\[rank\d\]: ?", "", output_of(process), flags=re.M) for process in started]


@pytest.mark.parametrize("doomed", [0, 1])
def test_one_that_raises_before_its_first_replica(doomed: int, tmp_path: Path) -> None:
    """Also rank 0, with the store in its process."""
    outputs = in_scripts("raise", doomed, 3, tmp_path)
    for rank, output in enumerate(outputs):
        told = json.loads((tmp_path / f"error{rank}").read_text())["message"]["message"]
        if rank == doomed:
            assert told == "ValueError: the file is truncated"
            assert output.rstrip().endswith("ValueError: the file is truncated"), output
            continue
        said = f"rank {rank}: while the ranks were making a replica, rank {doomed} raised ValueError: the file is"
        assert f"ReplicaLostError: {said} truncated." in output, output
        assert re.search(r"Its traceback ends:(\n  .*)*\n  .*script.py:\d+ in load\nStart the job again", output), (
            output
        )


def test_one_whose_options_are_refused(tmp_path: Path) -> None:
    survivor, _ = in_scripts("option", 1, 2, tmp_path)
    assert "rank 1 raised InvalidOptionError: bucket_cap_mb must be finite and greater than 0, but is -1." in survivor


def test_a_child_is_not_the_rank(tmp_path: Path) -> None:
    """It raises, has the rank's group, and says nothing in its name."""
    for output in in_scripts("child", 1, 2, tmp_path):
        assert "replicated" in output
        assert "ReplicaLostError" not in output


def test_torchrun_tells_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output = run(*TORCHRUN, f"--master-port={_free_port()}", str(script), "raise", "1", TORCHELASTIC_ERROR_FILE="")
    root = output.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank +: 1 ", root), output
    assert "ValueError: the file is truncated" in root, output
    assert "rank 1 raised ValueError: the file is truncated." in output.partition("Root Cause")[0]


SPAWN = """
import os, sys, time
import torch.multiprocessing as mp
sys.argv[1:3] = ["raise", "1"]
import script

def rank(number):
    os.environ.update(RANK=str(number), WORLD_SIZE="2")
    try:
        script.main()
    finally:
        if number == 0:
            print(sys.exc_info()[1], flush=True)

if __name__ == "__main__":
    context = mp.start_processes(rank, nprocs=2, join=False, start_method=sys.argv[3])
    for process in context.processes:  # not by `join`, which kills the others
        process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_of_multiprocessing_tell_it(method: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "spawns.py").write_text(SPAWN)
    assert "rank 1 raised ValueError: the file is truncated." in run(str(tmp_path / "spawns.py"), "", "", method)


# --- one that does not come ---------------------------------------------------------------------------------------

LIMIT = 3.0  # of the group, on an idle machine


def late_for(what: str, limit: float) -> None:
    """Rank 2 sleeps until the others have given up."""
    os.environ["GRADSYNC_EXPLAIN_AFTER"] = "0.3"
    group = dist.new_group(timeout=timedelta(seconds=limit))
    dist.barrier()
    model: Any = None
    if what != "the first":
        model = make("replicate", build(), process_group=group)
        backward(model)
    if dist.get_rank() == 2:
        time.sleep(limit + 3)
    if what == "another group":
        model.change_process_group(group)
    else:
        make("replicate", build(), process_group=group)


def test_one_that_does_not_come_to_make_the_first_replica(ranks: Ranks) -> None:
    """No watch says where it is; that it is waited for, the log says."""
    for outcome in ranks.outcomes(late_for, 3, "the first", LIMIT * crowding(), limit=40.0)[:2]:
        assert isinstance(outcome.exception, ReplicaLostError), outcome
        assert outcome.exception.ranks == [2]
        assert "no word from rank 2" in str(outcome.exception)
        waited = rf"rank {outcome.rank} has waited \d+ s for rank 2 to make a replica too"
        assert len(re.findall(waited, outcome.output)) == 1, outcome.output


@pytest.mark.parametrize("what", ["the second", "another group"])
def test_one_that_does_not_come_to_make_another_one(ranks: Ranks, what: str) -> None:
    """There is a watch by then: all say where it is, and raise the same."""
    outcomes = ranks.outcomes(late_for, 3, what, LIMIT * crowding(), limit=40.0)
    told = set()
    for outcome in outcomes:
        assert isinstance(outcome.exception, (RoundTimeoutError, ReplicaLostError)), outcome
        assert outcome.exception.ranks == [2], outcome
        text = str(outcome.exception)
        where = (
            r"rank 2 has been past the end of round 0 of Sequential for \d+ s \(test_told_early.py:\d+ in late_for\)"
        )
        assert re.search(where, text), text
        if outcome.rank != 2:
            assert isinstance(outcome.exception, RoundTimeoutError), outcome
            assert re.search(where, outcome.output.partition("The time limit")[0]), outcome.output
            assert outcome.output.count("has waited") == 1, outcome.output
            told.add(re.sub(r"^rank \d: (?=rank \d has waited)", "", text))
    assert len(told) == 1, told
