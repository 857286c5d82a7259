"""A host that vanishes while a replica is made: both sides say so within ten seconds, the one without the store too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradsync._torch import TCPStore
from gradsync.engine import engine
from gradsync.errors import ReplicaLostError
from gradsync.transport import checked_store
from gradsync.watch import watch
from tests.ranks.small import build, make
from tests.support.hosts import Host, hosts_or_skip
from tests.support.patience import crowding
from tests.support.ranks import Ranks

SECONDS = 10.0
# Far more than the test's own limit: whoever waits for it fails.
NEVER = timedelta(minutes=30)
Cut = Callable[[], None]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(2) as made:
        yield made


def before(owner: Any, name: str, cut: Cut) -> None:
    call = getattr(owner, name)

    def cut_and_call(*args: Any, **kwargs: Any) -> Any:
        cut()
        return call(*args, **kwargs)

    setattr(owner, name, cut_and_call)


def before_it_comes(cut: Cut) -> None:
    cut()


def before_the_watch(cut: Cut) -> None:
    before(watch, "connect", cut)


def while_gloo_connects(cut: Cut) -> None:
    """The others have this rank's address already, and gloo waits for it to connect, which nothing interrupts."""
    look = getattr(checked_store, "await_keys")  # noqa: B009

    def look_and_cut(store: Any, keys: Any, *args: Any) -> Any:
        found = look(store, keys, *args)
        if keys[0].endswith("/0"):  # rank 0 is there, and will find this one
            time.sleep(0.2)
            cut()
        return found

    setattr(checked_store, "await_keys", look_and_cut)  # noqa: B010


def before_models_are_compared(cut: Cut) -> None:
    before(engine, "check_same_model", cut)


def vanish(hosts: list[Host], shape: tuple[int, ...], transport: str, where: Callable[[Cut], None], port: int) -> None:
    rank = int(os.environ["RANK"])
    hosts[shape[rank]].enter()
    store = TCPStore(hosts[0].address, port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shape), timeout=NEVER)
    dist.barrier()
    is_cut: list[bool] = []

    def cut() -> None:
        if not is_cut:
            is_cut.append(True)
            print("cut at", time.monotonic(), flush=True)  # noqa: T201
            hosts[1].set_link(False)

    if rank == len(shape) - 1:
        where(cut)
    make("replicate", build(), transport=transport)


@pytest.mark.parametrize(
    ("where", "transport", "shape"),
    [
        (before_it_comes, "hierarchical", (0, 0, 1)),
        (before_the_watch, "process_group", (0, 1, 1)),
        (while_gloo_connects, "process_group", (0, 1)),
        (before_models_are_compared, "hierarchical", (0, 0, 1, 1)),
    ],
)
def test_both_sides_name_the_other(
    ranks: Ranks, hosts: list[Host], where: Callable[[Cut], None], transport: str, shape: tuple[int, ...]
) -> None:
    port = 29_520 + len(shape) + 10 * (where is before_the_watch)
    try:
        outcomes = ranks.outcomes(vanish, len(shape), hosts, shape, transport, where, port, limit=40.0, backend=None)
    finally:
        hosts[1].set_link(True)
    began = float(outcomes[-1].output.split("cut at ")[1].split()[0])
    for outcome, host in zip(outcomes, shape, strict=True):
        assert isinstance(outcome.exception, ReplicaLostError), outcome
        assert outcome.exception.ranks == ([0] if host else [shape.index(1)]), outcome
        assert "does not answer any more: its host is down, or the network is" in str(outcome.exception)
        print(f"rank {outcome.rank} raised after {outcome.when - began:.2f} s")  # noqa: T201
        assert outcome.when - began < SECONDS * crowding(), outcome
