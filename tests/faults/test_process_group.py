"""A replica that is moved to a process group that lacks this rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.errors import NoProcessGroupError, WrongTypeError
from gradsync.options import TransportChoice
from tests.ranks.small import (
    FRONTS,
    TRANSPORTS,
    Fails,
    assert_gradients,
    backward,
    batch,
    build,
    make,
    mean_gradients,
    same_everywhere,
)
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks, on_ranks


@FRONTS
@on_ranks(2)
def test_refused(front: str) -> None:
    """Refused there, with nothing changed; where all refuse it, training goes on over the old group."""
    module = build()
    replica = make(front, module)
    rank = dist.get_rank()
    backward(replica)
    transport = replica._engine.transport
    others = [dist.new_group([1]), dist.new_group([0])]
    with pytest.raises(NoProcessGroupError, match=rf"rank {rank} .*is not a member of.*nothing was changed"):
        replica.change_process_group(others[rank])
    for wrong in (None, "the world"):
        with pytest.raises(WrongTypeError, match=r"must be a ProcessGroup.*dist\.group\.WORLD"):
            replica.change_process_group(wrong)
    assert replica._engine.transport is transport
    replica.zero_grad()
    backward(replica)
    assert_gradients(module, mean_gradients(module))


@on_ranks(3)
def test_a_rank_that_was_left_out() -> None:
    """torch's name is called on all ranks; on one that was left out a backward would wait for ever."""
    module = build()
    ddp = gradsync.DistributedDataParallel(module)
    rank = dist.get_rank()
    ddp._update_process_group(dist.new_group([0, 1]))
    if rank == 2:
        ddp(batch(rank))  # to look at the model is no mistake
        with pytest.raises(NoProcessGroupError, match="rank 2: Sequential was moved to a process group that this rank"):
            backward(ddp)
    else:
        backward(ddp)
    ddp._update_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    module.zero_grad()
    backward(ddp)
    assert_gradients(module, mean_gradients(module, parts=range(3)))
    same_everywhere(module)


def after_a_failure(transport: TransportChoice) -> float:
    """A backward raises on all ranks, when some buckets have left; two of the three ranks go on by themselves."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 512))
    ddp = gradsync.DistributedDataParallel(module, bucket_cap_mb=0.0001, transport=transport)
    rank = dist.get_rank()
    backward(ddp)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        module[3](module[2](Fails.apply(module[0](batch(rank))))).sum().backward()
    pair = dist.new_group([0, 1])
    dist.barrier()
    began = time.monotonic()
    ddp._update_process_group(pair)
    module.zero_grad()
    if rank < 2:
        backward(ddp)
        assert_gradients(module, mean_gradients(module))
    took = seconds_since(began)
    dist.barrier()  # nobody ends, which the others would notice
    return took


@TRANSPORTS
def test_after_a_backward_that_raised(ranks: Ranks, transport: TransportChoice) -> None:
    assert max(ranks(after_a_failure, 3, transport)) < 3  # none waits for the one that has left
