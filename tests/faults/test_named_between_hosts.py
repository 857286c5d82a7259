"""Ranks that are lost on another host, in network namespaces: by a kill, or because the network is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradsync.errors import ReplicaLostError
from tests.faults.test_named import tell_often
from tests.ranks.memory import transport_of
from tests.ranks.small import backward, build, make
from tests.support.hosts import Host, hosts_or_skip
from tests.support.outcome import Outcome
from tests.support.patience import crowding
from tests.support.ranks import Ranks

AFTER_A_DEATH, AFTER_SILENCE = 2.0, 10.0
Shape = tuple[int, ...]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(2) as made:
        yield made


def join(hosts: list[Host], shape: Shape, transport: str) -> Any:
    rank = int(os.environ["RANK"])
    hosts[shape[rank]].enter()
    store = TCPStore(hosts[0].address, 29511, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shape), timeout=timedelta(seconds=60))
    module = make("replicate", build(), transport=transport)
    assert transport_of(module).name == transport
    for step in range(3):
        backward(module, step)
    return module


def now() -> None:
    print("fault at", time.monotonic(), flush=True)  # noqa: T201


def killed(hosts: list[Host], shape: Shape, transport: str, doomed: int) -> None:
    tell_often()
    module = join(hosts, shape, transport)
    if dist.get_rank() == doomed:
        time.sleep(0.5)  # it has told by then
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    backward(module, 3)


def assert_named(outcomes: list[Outcome], rank: int, lost: list[int], began: float, seconds: float, text: str) -> None:
    outcome = outcomes[rank]
    assert isinstance(outcome.exception, ReplicaLostError), outcome
    assert outcome.exception.ranks == lost, outcome
    assert text in str(outcome.exception)
    took = outcome.when - began
    print(f"rank {rank} raised after {took:.3f} s")  # noqa: T201
    assert took < seconds * crowding(), outcome


CASES = [("process_group", (0, 1), 1), ("process_group", (0, 0, 1, 1), 3), ("hierarchical", (0, 0, 1, 1), 3)]


@pytest.mark.parametrize(("transport", "shape", "doomed"), [*CASES, ("hierarchical", (0, 0, 1, 1), 1)])
def test_a_rank_killed_on_another_host(
    ranks: Ranks, hosts: list[Host], transport: str, shape: Shape, doomed: int
) -> None:
    outcomes = ranks.outcomes(killed, len(shape), hosts, shape, transport, doomed, backend=None)
    began = float(outcomes[doomed].output.split("fault at ")[1].split()[0])
    for rank in range(len(shape)):
        if rank != doomed:
            text = "is gone: its process ended without a word"
            assert_named(outcomes, rank, [doomed], began, AFTER_A_DEATH, text)
            assert "It was last seen past the end of round 2 of Sequential" in str(outcomes[rank].exception)


def cut_off(hosts: list[Host], shape: Shape, transport: str) -> None:
    module = join(hosts, shape, transport)
    dist.barrier()
    if dist.get_rank() == len(shape) - 1:
        time.sleep(1.0)
        now()
        link = ["ip", "-n", hosts[1].namespace, "link", "set", "eth0"]
        subprocess.run([*link, "down"], check=True)
    for step in range(3, 1_000_000):
        backward(module, step)
        time.sleep(0.01)


@pytest.mark.parametrize(("transport", "shape"), [(transport, shape) for transport, shape, _ in CASES])
def test_a_host_that_vanishes(ranks: Ranks, hosts: list[Host], transport: str, shape: Shape) -> None:
    """Each side finds the other gone: nobody can know which one is right."""
    try:
        outcomes = ranks.outcomes(cut_off, len(shape), hosts, shape, transport, limit=40.0, backend=None)
    finally:
        subprocess.run(["ip", "-n", hosts[1].namespace, "link", "set", "eth0", "up"], check=True)
    began = float(outcomes[-1].output.split("fault at ")[1].split()[0])
    there = shape.index(1)
    for rank, host in enumerate(shape):
        text = "does not answer any more: its host is down, or the network is"
        assert_named(outcomes, rank, [there] if host == 0 else [0], began, AFTER_SILENCE, text)
