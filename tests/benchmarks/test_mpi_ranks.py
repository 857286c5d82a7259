"""Ranks under `mpiexec`, with ranks that need no torch: how they start, fail and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.mpi_ranks import MpiRanks, missing
from gradsync.cli.launch import RankFailed
from tests.support.patience import wait_until

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

HEAD = """
import json, os, sys, time
rank = int(os.environ["RANK"])
pipe = os.fdopen(int(os.environ["GRADSYNC_REPORT_FD"]), "w", buffering=1)
def send(event, **fields):
    pipe.write(json.dumps({"event": event, **fields}) + "\\n")
"""
COMMAND = """
import sys
from benchmarks.mpi_ranks import MpiRanks
with MpiRanks("mpi_fake_rank", [], ranks=2) as running:
    for _, record in running.reports():
        print(record["pid"], flush=True)
"""
SLEEP = "send('here', pid=os.getpid()); time.sleep(60)"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module of ranks with this body, on the import path the ranks are given."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> str:
        (tmp_path / "mpi_fake_rank.py").write_text(HEAD + textwrap.dedent(body))
        return "mpi_fake_rank"

    return write


def are_gone(pids: list[int], seconds: float = 3) -> bool:
    return wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds)


def test_ranks_are_one_mpi_world_with_the_usual_environment(module: Callable[[str], str]) -> None:
    name = module("""
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        send("world", mpi=[world.Get_rank(), world.Get_size()], size=os.environ["WORLD_SIZE"], argument=sys.argv[1])
    """)
    with MpiRanks(name, ["hello"], ranks=2) as ranks:
        reports = dict(ranks.reports())
    assert {rank: record["mpi"] for rank, record in reports.items()} == {0: [0, 2], 1: [1, 2]}
    assert all((record["size"], record["argument"]) == ("2", "hello") for record in reports.values())


def test_the_rank_that_failed_first_is_named_with_its_words(module: Callable[[str], str]) -> None:
    name = module("""
        if rank == 1:
            send("failed", at=1.0, error="the cause")
            sys.exit("no luck")
        time.sleep(60)
    """)
    with MpiRanks(name, [], ranks=2) as ranks, pytest.raises(RankFailed, match="rank 1 ended") as caught:
        list(ranks.reports())
    assert "no luck" in caught.value.words


def test_all_ranks_end_with_the_context(module: Callable[[str], str]) -> None:
    with MpiRanks(module(SLEEP), [], ranks=2) as ranks:
        reports = ranks.reports()
        pids = [next(reports).record["pid"] for _ in range(2)]
    assert are_gone(pids)


def test_all_ranks_end_with_the_command_however_it_ends(module: Callable[[str], str]) -> None:
    module(SLEEP)
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    assert command.stdout is not None
    pids = [int(command.stdout.readline()) for _ in range(2)]
    command.send_signal(signal.SIGKILL)
    command.communicate()
    assert are_gone(pids)
