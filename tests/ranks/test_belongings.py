"""What replicas hold of the process: descriptors, threads, memory. They share what can be shared, and leave nothing."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import gradsync
from tests.ranks.small import FRONTS, backward, build, make, same_everywhere
from tests.support.ranks import on_ranks

TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])


class Held(NamedTuple):
    descriptors: int
    threads: int


def held() -> Held:
    gc.collect()
    return Held(len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir())))


def settles(at: Held) -> Held:
    """What is held, once threads that are about to end have done so."""
    for _ in range(200):
        if (now := held()) == at:
            break
        time.sleep(0.02)
    return now


def held_at_rest() -> Held:
    """What is held, when that has not changed for a while."""
    now, since = held(), time.monotonic()
    while time.monotonic() - since < 0.3:
        time.sleep(0.02)
        if (later := held()) != now:
            now, since = later, time.monotonic()
    return now


def train(module: Any, rounds: int = 2) -> None:
    for step in range(rounds):
        backward(module, step)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_replicas_that_are_gone_leave_nothing(front: str, transport: str) -> None:
    train(make(front, build(), transport=transport))  # what torch itself makes at first sight
    before = held_at_rest()
    for cycle in range(4):
        module: Any = make(front, build(), transport=transport)
        train(module)
        if cycle % 2 and front == "replicate":
            gradsync.unreplicate(module)
        del module
        assert settles(before) == before, cycle
        dist.barrier()


# Descriptors and threads for each replica: a file of memory; a connection with the other rank, and gloo's two threads.
@pytest.mark.parametrize(("transport", "most"), [("shared_memory", (1, 0)), ("process_group", (1, 2))])
@on_ranks(2, limit=40.0)
def test_many_replicas_share_what_they_can(transport: str, most: tuple[int, int]) -> None:
    before = held_at_rest()
    modules: list[Any] = [make("replicate", build(), transport=transport) for _ in range(24)]
    for module in modules:
        train(module)
    dist.barrier()
    now = settles(held())
    each = [(now[at] - before[at]) / len(modules) for at in (0, 1)]
    assert each[0] <= most[0] + 0.5, (before, now)
    assert each[1] <= most[1] + 0.1, (before, now)
    for module in modules:
        same_everywhere(module)
    modules.clear()
    del module
    assert settles(before) == before


@on_ranks(2)
def test_one_that_could_not_be_made_leaves_nothing() -> None:
    """A replica that never came to be leaves nothing either."""
    before = held_at_rest()
    for _ in range(3):
        module = build() if dist.get_rank() else build().double()
        with pytest.raises(gradsync.errors.ModelMismatchError):
            make("replicate", module)
        assert settles(before) == before
        dist.barrier()


@on_ranks(2, backend=None)
def test_groups_that_can_t_be_freed_are_used_again() -> None:
    """Groups that only c10d can make, as for GPUs: they can't be freed, but the next replica takes them."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # gloo behind a wrapper of c10d's: no gloo to us
    dist.init_process_group("gloo")
    train(make("replicate", build(), transport="process_group"))
    before = held_at_rest()
    for _ in range(3):
        module: Any = make("replicate", build(), transport="process_group")
        train(module)
        same_everywhere(module)
        del module
        assert settles(before) == before
    first: Any = make("replicate", build(), transport="process_group")
    second: Any = make("replicate", build(), transport="process_group")
    train(first)
    train(second)
    assert held().threads > before.threads, "each has its own"
