"""A rank that is slow is named once, with where it loses the time; ranks that take turns are not."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.watch import lost_time
from tests.ranks.memory import be_on_host, transport_of
from tests.ranks.small import backward, build, make
from tests.support.patience import wait_until
from tests.support.ranks import Ranks, on_ranks

ROUNDS = 70  # a block, and a few more
SLEEP = 0.03  # seconds: next to nothing for a real step, and much more than these steps take
LIMIT = 60.0


def judge_soon() -> None:
    """As after more rounds and seconds than a test has."""
    lost_time.MIN_ROUNDS, lost_time.MIN_SECONDS = 32, 0.5


class Log(logging.Handler):
    """What gradsync says on this rank of slow ones."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logging.getLogger("gradsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "is slow" in record.getMessage():
            self.said.append(record.getMessage())


class Slow(nn.Module):
    """Sleeps in forward, or in backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.layers = where, build()

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            time.sleep(SLEEP)
        inside: Tensor = self.layers[0](x)
        if self.where == "backward":
            inside.register_hook(lambda gradient: time.sleep(SLEEP))
        out: Tensor = self.layers[1:](inside)
        return out


def train(model: Any, where: str, rounds: int = ROUNDS) -> None:
    for step in range(rounds):
        if where == "data":
            time.sleep(SLEEP)
        model.zero_grad()
        backward(model, step)


def one_is_slow(transport: str, where: str, slow: int) -> list[str]:
    judge_soon()
    log, rank = Log(), dist.get_rank()
    if transport == "hierarchical":
        be_on_host(rank % 2)
    mine = where if rank == slow else ""
    model = make("replicate", Slow(mine), transport=transport)
    train(model, mine)
    statistics = gradsync.statistics(model)
    assert wait_until(lambda: statistics.waited_for_rounds >= 63, LIMIT / 2)
    assert wait_until(lambda: rank != 0 or bool(log.said), LIMIT / 2)
    dist.barrier()  # nobody leaves before all have heard
    worst = next(iter(statistics.waited_for))
    assert worst == slow
    assert statistics.waited_for[slow] > 0.5 * SLEEP * statistics.waited_for_rounds
    assert [one.round for one in statistics.latest_waits] == list(range(1, 64))
    assert sum(one.rank == slow for one in statistics.latest_waits) > 48
    return log.said


CURES = {
    "data": "Look at its data loader",
    "forward": "fewer threads (torch.get_num_threads()).",
    "backward": "hooks of its own.",
}


@pytest.mark.parametrize("where", CURES)
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_slow_rank_is_named(ranks: Ranks, transport: str, where: str) -> None:
    said, *others = ranks(one_is_slow, 3, transport, where, 1, limit=LIMIT)
    assert len(said) == 1, said
    assert said[0].startswith("rank 1 is slow: in "), said
    assert "rounds of Slow the others waited for it" in said[0]
    assert CURES[where] in said[0], said
    assert others == [[], []]  # rank 0 says it


@pytest.mark.parametrize(("transport", "slow"), [("shared_memory", 0), ("hierarchical", 2)])
def test_any_rank_may_be_the_slow_one(ranks: Ranks, transport: str, slow: int) -> None:
    (said,), *_ = ranks(one_is_slow, 3, transport, "data", slow, limit=LIMIT)
    assert said.startswith(f"rank {slow} is slow")


def in_turns(transport: str) -> list[str]:
    judge_soon()
    log, rank, size = Log(), dist.get_rank(), dist.get_world_size()
    model = make("replicate", build(), transport=transport)
    for step in range(2 * ROUNDS):
        if step % size == rank:
            time.sleep(SLEEP)
        model.zero_grad()
        backward(model, step)
    statistics = gradsync.statistics(model)
    assert wait_until(lambda: statistics.waited_for_rounds >= 127, LIMIT / 2)
    dist.barrier()
    assert set(statistics.waited_for) == set(range(size))
    assert sum(one.rank == one.round % size for one in statistics.latest_waits) > 32
    return log.said


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_ranks_that_take_turns_are_not(ranks: Ranks, transport: str) -> None:
    assert ranks(in_turns, 3, transport, limit=LIMIT) == [[], [], []]


# --- nothing is left, nothing is done in vain ----------------------------------------------------------------


def watch_threads() -> int:
    gc.collect()
    return sum(one.name == "gradsync-watch" for one in threading.enumerate())


@on_ranks(2, limit=LIMIT)
def test_statistics_that_are_kept_keep_nothing_alive() -> None:
    model = make("replicate", build())
    twin = copy.deepcopy(model)
    train(model, "")
    train(twin, "")
    kept = [gradsync.statistics(one) for one in (model, twin)]
    assert wait_until(lambda: all(one.waited_for_rounds >= 63 for one in kept), LIMIT / 2)
    assert kept[0].waited_for != kept[1].waited_for  # each has its own
    dist.barrier()
    engines = [weakref.ref(transport_of(one)) for one in (model, twin)]
    model.zero_grad()  # gradients lie in buckets
    gradsync.unreplicate(model)
    del twin
    assert wait_until(lambda: watch_threads() == 0, LIMIT / 2)
    assert [one() for one in engines] == [None, None]
    assert all(one.waited_for_rounds >= 63 for one in kept)  # what they knew, they know
    dist.barrier()


@on_ranks(2)
def test_without_a_watch_nothing_is_recorded() -> None:
    os.environ["GRADSYNC_WATCH"] = "0"
    model = make("replicate", build())
    train(model, "")
    statistics = gradsync.statistics(model)
    assert (statistics.waited_for, statistics.waited_for_rounds, statistics.latest_waits) == ({}, 0, ())
    assert len(gradsync.replica.engine_of(model)._recorders) == 1  # statistics
    dist.barrier()


@on_ranks(1)
def test_alone_nothing_is_recorded() -> None:
    model = make("replicate", build())
    train(model, "")
    assert gradsync.statistics(model).waited_for == {}
    assert len(gradsync.replica.engine_of(model)._recorders) == 1


@on_ranks(2, limit=LIMIT)
def test_over_another_group_it_goes_on() -> None:
    model = make("replicate", build())
    train(model, "")
    model.change_process_group(dist.new_group([0, 1]))
    train(model, "", 2 * ROUNDS)
    statistics = gradsync.statistics(model)
    assert wait_until(lambda: statistics.waited_for_rounds >= 63, LIMIT / 2)
    assert len(gradsync.replica.engine_of(model)._recorders) == 2
    dist.barrier()


@on_ranks(2, limit=LIMIT)
def test_a_module_that_moves_to_another_type_goes_on() -> None:
    model = make("replicate", build())
    train(model, "", 40)
    model.double()
    for step in range(30):
        model(torch.ones(1, 4, dtype=torch.float64) * step).sum().backward()
        model.zero_grad()
    assert wait_until(lambda: gradsync.statistics(model).waited_for_rounds >= 60, LIMIT / 2)
    dist.barrier()
