"""Ctrl-C on a rank that waits for another one: it is heard at once, and the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, batch, build, make
from tests.support.ranks import Ranks

LIMIT = 60.0  # of the group: who has not heard a signal waits that long
Wait = Callable[[Any], None]


def first_round(replica: Any) -> None:
    replica(batch(0)).square().mean().backward()


def later_round(replica: Any) -> None:
    replica(batch(0)).square().mean().backward()


def at_once(replica: Any) -> None:
    gradsync.verify(replica)


def sparse_round(replica: Any) -> None:
    replica(torch.tensor([1, 2])).sum().backward()


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def interrupted(front: str, transport: str, wait: Wait) -> float:
    """Rank 0 waits for the others, of which rank 1 interrupts it; when that was heard, and when it was sent."""
    folder, rank = Path(tempfile.gettempdir()), dist.get_rank()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if transport == "hierarchical":  # the last rank is on another host
        be_on_host(rank // 2)
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    module = nn.Embedding(4, 2, sparse=True) if wait is sparse_round else build()
    replica = make(front, module, transport=transport, process_group=group)
    if wait is not first_round:
        (sparse_round if wait is sparse_round else later_round)(replica)
    if rank == 0:
        (folder / "waiting").touch()
        try:
            wait(replica)
        except KeyboardInterrupt:
            heard = time.monotonic()
        (folder / "heard").touch()
    elif rank == 1:
        until((folder / "waiting").exists)
        time.sleep(0.3)  # until it really waits
        sent = time.monotonic()
        os.kill(pids[0], signal.SIGINT)
    until((folder / "heard").exists)
    dist.barrier()
    if rank == 0:
        (folder / "waiting").unlink()
        (folder / "heard").unlink()
    return heard if rank == 0 else sent if rank == 1 else 0.0


@FRONTS
@pytest.mark.parametrize("wait", [first_round, later_round, at_once, sparse_round])
def test_a_rank_that_waits_hears_it(ranks: Ranks, front: str, wait: Wait) -> None:
    heard, sent = ranks(interrupted, 2, front, "process_group", wait)
    assert 0 < heard - sent < LIMIT / 4  # half a second, on an idle machine


@pytest.mark.parametrize(("transport", "size"), [("shared_memory", 2), ("hierarchical", 3)])
def test_so_does_one_on_another_transport(ranks: Ranks, transport: str, size: int) -> None:
    heard, sent, *_ = ranks(interrupted, size, "replicate", transport, later_round)
    assert 0 < heard - sent < LIMIT / 4


PROGRAM = """
import sys, time, datetime, torch, torch.distributed as dist, gradsync
rank = int(sys.argv[1])
limit = datetime.timedelta(seconds=600)
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2, timeout=limit)
model = gradsync.replicate(torch.nn.Linear(2, 2), transport="process_group")
model(torch.ones(1, 2)).sum().backward()
print("waiting", flush=True)
if rank == 1:
    sys.stdin.read()
model(torch.ones(1, 2)).sum().backward()
"""


def test_the_process_ends(tmp_path: Path) -> None:
    """With all that c10d has under way, whose threads still wait for the other rank."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    commands = ([sys.executable, "-c", PROGRAM, str(rank), (tmp_path / "store").as_uri()] for rank in range(2))
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(one, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for one in commands
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        processes[0].send_signal(signal.SIGINT)
        _, error = processes[0].communicate(timeout=60)
        assert processes[0].returncode == -signal.SIGINT
        assert error.rstrip().endswith("KeyboardInterrupt")
        assert "timed out" not in error
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
