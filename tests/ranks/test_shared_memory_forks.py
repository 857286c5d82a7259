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
from tests.ranks.small import assert_gradients, backward, batch, build, make, mean_gradients, same_everywhere
from tests.support.children import FORKS_BESIDE_THREADS, in_child
from tests.support.outcome import End
from tests.support.patience import crowding
from tests.support.ranks import Ranks, on_ranks

pytestmark = FORKS_BESIDE_THREADS


class Parts(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return batch(dist.get_rank(), index)[0]


@on_ranks(2)
def test_a_data_loader_with_forked_workers() -> None:
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


def scribble(replica: nn.Module, wanted: list[Tensor]) -> None:
    for parameter, gradient in zip(replica.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)  # it sees what the rank had
        assert parameter.grad is not None
        assert parameter.grad.fill_(99).eq(99).all()


@on_ranks(2)
def test_what_a_child_writes_is_its_own() -> None:
    replica = make("replicate", build())
    for step in range(3):
        replica.zero_grad()
        wanted = mean_gradients(replica, step)
        backward(replica, step)
        in_child(partial(scribble, replica, wanted))
        dist.barrier()
        assert_gradients(replica, wanted)


@pytest.mark.parametrize("rounds", [0, 2])
@on_ranks(2)
def test_a_child_can_not_take_part_in_a_round(rounds: int) -> None:
    """Before there are buckets, and with them."""
    rank = dist.get_rank()
    replica = make("replicate", build())
    for step in range(rounds):
        backward(replica, step)
        replica.zero_grad()

    def attempt() -> None:
        with pytest.raises(ForkedError, match=f"forked from rank {rank}"):
            replica(batch(rank)).square().mean().backward()
        with torch.no_grad():
            assert replica(batch(rank)).isfinite().all()

    in_child(attempt)
    wanted = mean_gradients(replica)
    backward(replica)
    assert_gradients(replica, wanted)
    before = descriptors()
    in_child(lambda: None)
    assert descriptors() == before


def orphaned() -> None:
    replica = make("replicate", build())
    for step in range(5):
        if step == 3 and dist.get_rank() == 1:
            if os.fork() == 0:
                os.setsid()  # or the harness would end it with its rank
                time.sleep(5 * crowding())
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        backward(replica, step)


def test_a_rank_that_died_is_missed_although_its_child_lives(ranks: Ranks) -> None:
    survivor, killed = ranks.outcomes(orphaned, 2)
    assert killed.end is End.KILLED
    assert isinstance(survivor.exception, ReplicaLostError), survivor
    assert survivor.exception.ranks == [1]
    assert survivor.when - killed.when < 2 * crowding()  # the child lives for 5 s
