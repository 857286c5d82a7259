"""One watch for all replicas over the same ranks, and none where none can be."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import gradsync
from gradsync.errors import InvalidOptionError, ReplicaLostError
from tests.ranks.memory import transport_of
from tests.ranks.small import backward, build, make
from tests.support.children import FORKS_BESIDE_THREADS
from tests.support.outcome import assert_raised
from tests.support.patience import wait_until
from tests.support.ranks import Ranks, on_ranks

pytestmark = FORKS_BESIDE_THREADS
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])


def threads() -> int:
    gc.collect()
    return sum(one.name == "gradsync-watch" for one in threading.enumerate())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@TRANSPORTS
@on_ranks(2, limit=60.0)
def test_many_replicas_have_one(transport: str) -> None:
    modules: list[Any] = [make("replicate", build(), transport=transport) for _ in range(64)]
    assert threads() == 1
    for module in modules[::16]:
        backward(module)
    dist.barrier()
    del module
    while len(modules) > 1:
        modules.pop()
    assert threads() == 1
    modules.clear()
    assert wait_until(lambda: threads() == 0, 5)
    dist.barrier()


@on_ranks(2)
def test_what_it_holds() -> None:
    """A thread; a selector, two ends of a pair that wakes it, and a connection."""
    os.environ["GRADSYNC_WATCH"] = "0"
    module: Any = make("replicate", build(), transport="process_group")
    backward(module)
    del module
    gc.collect()
    held = []
    for flag in ("0", "1"):
        os.environ["GRADSYNC_WATCH"] = flag
        module = make("replicate", build(), transport="process_group")
        backward(module)
        dist.barrier()
        wait_until(lambda: not [one for one in threading.enumerate() if one.name == "gradsync-start"], 5)
        held.append((threads(), descriptors()))
        del module
        gc.collect()
        dist.barrier()
    (no_threads, before), (one_thread, after) = held
    assert (no_threads, one_thread) == (0, 1)
    assert after - before == 4
    assert wait_until(lambda: threads() == 0, 5)


@on_ranks(3)
def test_groups_have_one_each() -> None:
    """Over other ranks it is another one; over the same ranks it is not."""
    world: Any = make("replicate", build())
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        some: Any = make("replicate", build(), process_group=pair)
        again: Any = make("replicate", build(), process_group=pair)
        assert threads() == 2
        backward(some)
        backward(again)
    else:
        assert threads() == 1
    backward(world)
    dist.barrier()


@on_ranks(1)
def test_one_rank_needs_none() -> None:
    module: Any = make("replicate", build())
    backward(module)
    assert threads() == 0
    transport_of(module).check_alive()


@on_ranks(2)
def test_nothing_is_communicated_without_init_sync() -> None:
    """While it is made: the watch begins in the first round, and is one for all replicas, too."""
    modules: list[Any] = [gradsync.DistributedDataParallel(build(), init_sync=False) for _ in range(3)]
    assert threads() == 0
    for module in modules:
        backward(module)
        assert wait_until(lambda one=module: transport_of(one).watch is not None, 10)  # type: ignore[misc]
    assert threads() == 1
    assert len({id(transport_of(module).watch) for module in modules}) == 1
    transport_of(module).check_alive()
    dist.barrier()


@on_ranks(2)
def test_one_that_wants_none_has_it_for_all() -> None:
    if dist.get_rank() == 1:
        os.environ["GRADSYNC_WATCH"] = "0"
    module: Any = make("replicate", build())
    backward(module)
    assert threads() == 0
    dist.barrier()


@on_ranks(2)
def test_a_number_that_is_none() -> None:
    os.environ["GRADSYNC_EXPLAIN_AFTER"] = "soon"
    with pytest.raises(InvalidOptionError, match="GRADSYNC_EXPLAIN_AFTER must be a number of seconds, not 'soon'"):
        make("replicate", build())
    dist.barrier()


def dies_beside_a_child(transport: str) -> None:
    module: Any = make("replicate", build(), transport=transport)
    backward(module)
    if dist.get_rank() == 1:
        if os.fork() == 0:  # as a data loader's worker: it outlives the rank
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            transport_of(module).check_alive()
            time.sleep(0.01)
    finally:
        assert time.monotonic() - began < 2.5, "it was noticed only when the child ended"


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_child_does_not_hide_the_death_of_its_rank(ranks: Ranks, transport: str) -> None:
    assert_raised(ranks.outcomes(dies_beside_a_child, 2, transport)[:1], ReplicaLostError, "rank 1 is gone")


@on_ranks(2)
def test_a_child_says_nothing_at_its_end() -> None:
    module: Any = make("replicate", build())
    backward(module)
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        del module
        gc.collect()
        os._exit(0 if time.monotonic() - began < 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    time.sleep(0.3)
    transport_of(module).check_alive()
    backward(module)
    assert not transport_of(module).watch.notices
    dist.barrier()
