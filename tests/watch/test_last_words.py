"""What ranks hear of one whose script ends: real scripts, as Python, `mp.spawn` and torchrun run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import Stopwatch
from tests.support.ranks import _free_port

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        **more,
    }


def run(*command: str, **more: str) -> str:
    """What it says."""
    with subprocess.Popen(
        [sys.executable, *command], env=environment(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        return output_of(process)


def output_of(process: subprocess.Popen[str]) -> str:
    watch = Stopwatch()
    while (left := watch.slice(SECONDS)) > 0:
        try:
            return process.communicate(timeout=left)[0]
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    raise AssertionError(f"it hangs: {process.communicate()[0]}")


def train(transport: str, fault: str, doomed: int, world: int, tmp_path: Path) -> list[str]:
    """What each rank says."""
    started = start(transport, fault, doomed, world, tmp_path)
    return [re.sub(r"^\[rank\d\]: ?", "", output_of(process), flags=re.M) for process in started]


def start(transport: str, fault: str, doomed: int, world: int, tmp_path: Path) -> list[subprocess.Popen[str]]:
    common = environment()
    started = []
    for rank in range(world):
        more = {"RANK": str(rank), "WORLD_SIZE": str(world), "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error{rank}")}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.watch.trainer", transport, fault, str(doomed)],
                env={**common, **more},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return started


@pytest.mark.parametrize(
    ("transport", "doomed", "world"), [("process_group", 1, 2), ("shared_memory", 0, 2), ("hierarchical", 2, 3)]
)
def test_one_that_raises(transport: str, doomed: int, world: int, tmp_path: Path) -> None:
    outputs = train(transport, "raise", doomed, world, tmp_path)
    for rank, output in enumerate(outputs):
        told = json.loads((tmp_path / f"error{rank}").read_text())["message"]
        if rank == doomed:
            assert told["message"] == "ValueError: the file is truncated"
            assert "in fail" in told["extraInfo"]["py_callstack"]
            assert output.rstrip().endswith("ValueError: the file is truncated"), output
            continue
        assert f"ReplicaLostError: rank {rank}: rank {doomed} raised ValueError: the file is truncated." in output
        assert re.search(r"Its traceback ends:(\n  .*)*\n  .*trainer.py:\d+ in fail\nCure that, then start", output), (
            output
        )
        assert "It was past the end of round 3 of Sequential." in output
        assert "ReplicaLostError" in told["message"]


def test_one_that_raises_and_waits_for_a_thread_of_its_own(tmp_path: Path) -> None:
    """For ever: Python says that it ends before that."""
    survivor, doomed = start("process_group", "raise beside a thread", 1, 2, tmp_path)
    try:
        assert "ReplicaLostError: rank 0: rank 1 raised ValueError: the file is truncated." in output_of(survivor)
        assert doomed.poll() is None
    finally:
        doomed.kill()
        doomed.communicate()


@pytest.mark.parametrize(
    ("transport", "doomed", "fault"),
    [("process_group", 0, "end"), ("process_group", 1, "exit"), ("shared_memory", 1, "end")],
)
def test_one_that_ends_early(transport: str, doomed: int, fault: str, tmp_path: Path) -> None:
    output = train(transport, fault, doomed, 2, tmp_path)[1 - doomed]
    own = f"If that was because of an error, rank {doomed}'s own output says so: Python does not tell with which code. "
    how, give = (", by sys.exit", f"{own}If not, give") if fault == "exit" else ("", "Give")
    assert (
        f"ReplicaLostError: rank {1 - doomed}: rank {doomed} ended its training after round 3{how}; rank {1 - doomed} "
        f"is in round 4 of Sequential. {give} all ranks equally many batches, or use gradsync.uneven"
    ) in output
    assert not (tmp_path / f"error{doomed}").exists()


def test_nothing_is_said_when_all_end_well(tmp_path: Path) -> None:
    assert train("process_group", "none", -1, 2, tmp_path) == ["trained\n", "trained\n"]


SPAWN = """
import torch.multiprocessing as mp
from tests.watch import trainer
if __name__ == "__main__":
    mp.spawn(trainer.in_child, ("process_group", "raise", 1), nprocs=2)
"""


def test_children_of_multiprocessing(tmp_path: Path) -> None:
    """`mp.spawn` kills the others as soon as one has failed: what they hear, they may not get to say."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWN)
    output = run(str(script), TORCHELASTIC_ERROR_FILE=str(tmp_path / "error"))
    assert "ValueError: the file is truncated" in output
    assert "the file is truncated" in (tmp_path / "error").read_text()


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1")


def test_torchrun_names_the_first_cause() -> None:
    """Of one that was killed; for one that raised see tests/faults/test_restarts.py."""
    port = f"--master-port={_free_port()}"
    output = run(*TORCHRUN, port, "-m", "tests.watch.trainer", "process_group", "kill", "1")
    root = output.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank +: 1 ", root), output
    assert "Signal 9 (SIGKILL)" in root
