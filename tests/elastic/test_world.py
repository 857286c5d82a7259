"""The process group of an epoch."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradsync import _torch
from gradsync._torch import TCPStore
from gradsync.elastic import world
from gradsync.errors import ReplicaLostError
from tests.support.ranks import on_ranks

LIMIT = timedelta(seconds=60)


@on_ranks(2, backend=None)
def test_one_that_could_not_be_made_on_one_rank_leaves_nothing() -> None:
    """They would wait for each other under different names."""
    rank = int(os.environ["RANK"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, rank == 0, LIMIT, False)

    def lost() -> None:
        raise ReplicaLostError("rank 1 is lost", [1])

    if rank == 0:
        with pytest.raises(ReplicaLostError, match="rank 1 is lost"):
            world.begin(1, 0, 2, store, lost, "cpu", LIMIT)
    made = world.begin(2, rank, 2, store, lambda: None, "cpu", LIMIT)
    assert _torch.timeout_of(made) == LIMIT  # though connecting has a limit of its own
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.barrier()
    world.begin(3, 1 - rank, 2, store, lambda: None, "cpu", LIMIT)
    assert dist.get_rank() == 1 - rank
    dist.barrier()
    dist.destroy_process_group()
