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
from tests.ranks.small import FRONTS, batch, build, make, same_everywhere
from tests.support.ranks import Ranks

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


def train(module: Any, rounds: int = 2) -> None:
    for step in range(rounds):
        module(batch(dist.get_rank(), step)).square().mean().backward()


def come_and_go(front: str, transport: str) -> None:
    train(make(front, build(), transport=transport))  # what torch itself makes at first sight
    before = held()
    for cycle in range(4):
        module: Any = make(front, build(), transport=transport)
        train(module)
        if cycle % 2 and front == "replicate":
            gradsync.unreplicate(module)
        del module
        assert settles(before) == before, cycle
        dist.barrier()


@FRONTS
@TRANSPORTS
def test_replicas_that_are_gone_leave_nothing(ranks: Ranks, front: str, transport: str) -> None:
    ranks(come_and_go, 2, front, transport)


def many(transport: str, most: tuple[int, int]) -> None:
    before = held()
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


# Descriptors and threads for each replica: a file of memory; a connection with the other rank, and gloo's two threads.
@pytest.mark.parametrize(("transport", "most"), [("shared_memory", (1, 0)), ("process_group", (1, 2))])
def test_many_replicas_share_what_they_can(ranks: Ranks, transport: str, most: tuple[int, int]) -> None:
    ranks(many, 2, transport, most, limit=40.0)


def released_by_failure() -> None:
    """A replica that never came to be leaves nothing either."""
    before = held()
    for _ in range(3):
        module = build() if dist.get_rank() else build().double()
        with pytest.raises(gradsync.errors.ModelMismatchError):
            make("replicate", module)
        assert settles(before) == before
        dist.barrier()


def test_one_that_could_not_be_made_leaves_nothing(ranks: Ranks) -> None:
    ranks(released_by_failure, 2)


def of_another_kind() -> None:
    """Groups that only c10d can make, as for GPUs: they can't be freed, but the next replica takes them."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # gloo behind a wrapper of c10d's: no gloo to us
    dist.init_process_group("gloo")
    train(make("replicate", build(), transport="process_group"))
    before = held()
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


def test_groups_that_can_t_be_freed_are_used_again(ranks: Ranks) -> None:
    ranks(of_another_kind, 2, backend=None)
