"""Ranks that leave a `Join` context by an exception: the others are told, within the time limit, and can go on."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from gradsync.errors import JoinError
from tests.ranks.small import FRONTS, batch, build, make, mean_gradients, same_everywhere
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks

LIMIT = 2.0  # seconds that a collective may take


def short_group() -> Any:
    return dist.new_group(timeout=timedelta(seconds=LIMIT))


def train(replica: Any, steps: int, raise_at: int | None = None) -> None:
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(steps):
        if step == raise_at:
            raise ValueError("a bad batch, say")
        optimizer.zero_grad()
        replica(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()


def train_joined(replica: Any, steps: int, raise_at: int | None = None, **options: Any) -> None:
    with Join([replica], **options):
        train(replica, steps, raise_at)


def raises_inside(front: str, throw: bool) -> float:
    """Rank 1 raises in its third step, where rank 0 goes on, and learns of it in its next forward."""
    module = build()
    replica = make(front, module, process_group=short_group())
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
    replica.change_process_group(short_group())
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
    assert isinstance(first.exception, Exception)
    assert "rank" in str(first.exception)
    assert seconds_since(began) < 15


def raises_while_another_waits() -> None:
    """Rank 0 has run out of data and is in the end of the context when rank 1 raises."""
    replica = make("DistributedDataParallel", build(), process_group=short_group())
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="a bad batch"), replica.join():
            train(replica, 3, raise_at=2)
    else:
        with pytest.raises(JoinError, match="rank 0: inside a Join context not every rank answered"), replica.join():
            train(replica, 1)


def test_a_rank_that_raises_while_another_has_run_out_of_data(ranks: Ranks) -> None:
    ranks(raises_while_another_waits, 2)


def never_enters(front: str) -> None:
    module = build()
    replica = make(front, module, process_group=short_group())
    if dist.get_rank() == 0:
        with pytest.raises(JoinError, match="rank 0: inside a Join context not every rank answered"):
            train_joined(replica, 2)
    else:
        with pytest.raises(RuntimeError):  # what it sent met what it was never meant for
            train(replica, 2)
    dist.barrier()
    replica.change_process_group(short_group())
    replica.zero_grad()
    replica(batch(dist.get_rank())).square().mean().backward()
    for parameter, gradient in zip(module.parameters(), mean_gradients(module), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@FRONTS
def test_a_rank_that_never_enters(ranks: Ranks, front: str) -> None:
    ranks(never_enters, 2, front)
