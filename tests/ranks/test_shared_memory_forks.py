"""Processes forked from a rank see its memory, but what they do stays their own."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradsync
from gradsync.errors import ForkedError, ReplicaLostError
from tests.ranks.memory import descriptors, transport_of
from tests.ranks.small import batch, build, make, mean_gradients, same_everywhere
from tests.support.children import in_child
from tests.support.outcome import End
from tests.support.patience import crowding
from tests.support.ranks import Ranks

# Python 3.12 and later warn of forks beside threads, which gloo has.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Parts(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return batch(dist.get_rank(), index)[0]


def with_a_data_loader() -> None:
    """Workers come and go while training; each holds, for a while, what the rank held when it was forked."""
    replica = make("replicate", build())
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for _ in range(3):
        for x in DataLoader(Parts(), batch_size=3, num_workers=2, multiprocessing_context="fork"):
            optimizer.zero_grad()
            replica(x).square().mean().backward()
            optimizer.step()
        same_everywhere(replica)
    assert gradsync.statistics(replica).rounds == 12
    assert transport_of(replica).name == "shared_memory"


def test_a_data_loader_with_forked_workers(ranks: Ranks) -> None:
    ranks(with_a_data_loader, 2)


def scribble(replica: nn.Module, wanted: list[Tensor]) -> None:
    for parameter, gradient in zip(replica.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)  # it sees what the rank had
        assert parameter.grad is not None
        assert parameter.grad.fill_(99).eq(99).all()


def a_child_that_writes() -> None:
    rank = dist.get_rank()
    replica = make("replicate", build())
    for step in range(3):
        replica.zero_grad()
        wanted = mean_gradients(replica, step)
        replica(batch(rank, step)).square().mean().backward()
        in_child(partial(scribble, replica, wanted))
        dist.barrier()
        for parameter, gradient in zip(replica.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_what_a_child_writes_is_its_own(ranks: Ranks) -> None:
    ranks(a_child_that_writes, 2)


def a_child_that_trains(rounds: int) -> None:
    """Before there are buckets, and with them."""
    rank = dist.get_rank()
    replica = make("replicate", build())
    for step in range(rounds):
        replica(batch(rank, step)).square().mean().backward()
        replica.zero_grad()

    def attempt() -> None:
        with pytest.raises(ForkedError, match=f"forked from rank {rank}"):
            replica(batch(rank)).square().mean().backward()
        with torch.no_grad():
            assert replica(batch(rank)).isfinite().all()

    in_child(attempt)
    wanted = mean_gradients(replica)
    replica(batch(rank)).square().mean().backward()
    for parameter, gradient in zip(replica.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    before = descriptors()
    in_child(lambda: None)
    assert descriptors() == before


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_child_can_not_take_part_in_a_round(ranks: Ranks, rounds: int) -> None:
    ranks(a_child_that_trains, 2, rounds)


def orphaned() -> None:
    replica = make("replicate", build())
    for step in range(5):
        if step == 3 and dist.get_rank() == 1:
            if os.fork() == 0:
                os.setsid()  # or the bench would end it with its rank
                time.sleep(5 * crowding())
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        replica(batch(dist.get_rank(), step)).square().mean().backward()


def test_a_rank_that_died_is_missed_although_its_child_lives(ranks: Ranks) -> None:
    survivor, killed = ranks.outcomes(orphaned, 2)
    assert killed.end is End.KILLED
    assert isinstance(survivor.exception, ReplicaLostError), survivor
    assert survivor.exception.ranks == [1]
    assert survivor.when - killed.when < 2 * crowding()  # the child lives for 5 s
