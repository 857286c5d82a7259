"""Ranks that leave a `Join` context by an exception: the others are told, within the time limit, and can go on."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from gradsync.errors import JoinError, ReplicaLostError
from tests.ranks.small import (
    FRONTS,
    assert_gradients,
    backward,
    build,
    make,
    mean_gradients,
    same_everywhere,
    short_group,
)
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks, on_ranks

LIMIT = 2.0  # seconds that a collective may take


def train(replica: Any, steps: int, raise_at: int | None = None) -> None:
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(steps):
        if step == raise_at:
            raise ValueError("a bad batch, say")
        optimizer.zero_grad()
        backward(replica, step)
        optimizer.step()


def train_joined(replica: Any, steps: int, raise_at: int | None = None, **options: Any) -> None:
    with Join([replica], **options):
        train(replica, steps, raise_at)


def raises_inside(front: str, throw: bool) -> float:
    """Rank 1 raises in its third step, where rank 0 goes on, and learns of it in its next forward."""
    module = build()
    replica = make(front, module, process_group=short_group(LIMIT))
    rank = dist.get_rank()
    began = time.monotonic()
    if rank == 1:
        with pytest.raises(ValueError, match="a bad batch"):
            train_joined(replica, 5, raise_at=2, throw_on_early_termination=throw)
    else:
        with pytest.raises(
            JoinError, match=r"rank 0: inside a Join context not every rank answered.*look at its error"
        ):
            train_joined(replica, 5, throw_on_early_termination=throw)
    took = seconds_since(began)

    dist.barrier()
    replica.change_process_group(short_group(LIMIT))
    same_everywhere(module)  # nobody has taken a step alone
    replica.zero_grad()
    train_joined(replica, 1 + rank)  # and once more, from the beginning
    same_everywhere(module)
    return took


@FRONTS
@pytest.mark.parametrize("throw", [False, True])
def test_a_rank_that_raises_inside(ranks: Ranks, front: str, throw: bool) -> None:
    assert max(ranks(raises_inside, 2, front, throw)) < 3 * LIMIT


def ends_inside(front: str) -> None:
    replica = make(front, build())
    if dist.get_rank() == 1:
        with Join([replica]):
            train(replica, 2)
            os._exit(7)
    train_joined(replica, 5)


@FRONTS
def test_a_rank_that_ends_inside(ranks: Ranks, front: str) -> None:
    began = time.monotonic()
    first, second = ranks.outcomes(ends_inside, 2, front)
    assert second.exit_code == 7
    assert isinstance(first.exception, ReplicaLostError)
    assert first.exception.ranks == [1]
    assert "rank 0: rank 1 is gone: its process ended without a word" in str(first.exception)
    assert seconds_since(began) < 15


def ends_while_others_wait() -> None:
    replica = make("DistributedDataParallel", build())
    with replica.join():
        train(replica, 1)
        if dist.get_rank() == 1:
            train(replica, 1)
            os._exit(7)


def test_a_rank_that_ends_while_another_has_run_out_of_data(ranks: Ranks) -> None:
    first, _ = ranks.outcomes(ends_while_others_wait, 2)
    assert isinstance(first.exception, ReplicaLostError)
    assert first.exception.ranks == [1]


@on_ranks(2)
def test_a_rank_that_raises_while_another_has_run_out_of_data() -> None:
    """Rank 0 has run out of data and is in the end of the context when rank 1 raises."""
    replica = make("DistributedDataParallel", build(), process_group=short_group(LIMIT))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="a bad batch"), replica.join():
            train(replica, 3, raise_at=2)
    else:
        with pytest.raises(JoinError, match="rank 0: inside a Join context not every rank answered"), replica.join():
            train(replica, 1)


@FRONTS
@on_ranks(2)
def test_a_rank_that_never_enters(front: str) -> None:
    module = build()
    replica = make(front, module, process_group=short_group(LIMIT))
    if dist.get_rank() == 0:
        with pytest.raises(JoinError, match="rank 0: inside a Join context not every rank answered"):
            train_joined(replica, 2)
    else:
        with pytest.raises(RuntimeError):  # what it sent met what it was never meant for
            train(replica, 2)
    dist.barrier()
    replica.change_process_group(short_group(LIMIT))
    replica.zero_grad()
    backward(replica)
    assert_gradients(module, mean_gradients(module))
