"""A replica that is moved to a process group that lacks this rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.errors import NoProcessGroupError, WrongTypeError
from gradsync.options import Transport
from tests.ranks.small import FRONTS, TRANSPORTS, batch, build, make, mean_gradients, same_everywhere
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks


def lacks_this_rank(front: str) -> None:
    """Refused there, with nothing changed; where all refuse it, training goes on over the old group."""
    module = build()
    replica = make(front, module)
    rank = dist.get_rank()
    replica(batch(rank)).square().mean().backward()
    transport = replica._engine.transport
    others = [dist.new_group([1]), dist.new_group([0])]
    with pytest.raises(NoProcessGroupError, match=rf"rank {rank} .*is not a member of.*nothing was changed"):
        replica.change_process_group(others[rank])
    for wrong in (None, "the world"):
        with pytest.raises(WrongTypeError, match=r"must be a ProcessGroup.*dist\.group\.WORLD"):
            replica.change_process_group(wrong)
    assert replica._engine.transport is transport
    replica.zero_grad()
    replica(batch(rank)).square().mean().backward()
    for parameter, gradient in zip(module.parameters(), mean_gradients(module), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@FRONTS
def test_refused(ranks: Ranks, front: str) -> None:
    ranks(lacks_this_rank, 2, front)


def left_out() -> None:
    """torch's name is called on all ranks; on one that was left out a backward would wait for ever."""
    module = build()
    ddp = gradsync.DistributedDataParallel(module)
    rank = dist.get_rank()
    ddp._update_process_group(dist.new_group([0, 1]))
    if rank == 2:
        ddp(batch(rank))  # to look at the model is no mistake
        with pytest.raises(NoProcessGroupError, match="rank 2: Sequential was moved to a process group that this rank"):
            ddp(batch(rank)).square().mean().backward()
    else:
        ddp(batch(rank)).square().mean().backward()
    ddp._update_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    module.zero_grad()
    ddp(batch(rank)).square().mean().backward()
    for parameter, gradient in zip(module.parameters(), mean_gradients(module, parts=range(3)), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    same_everywhere(module)


def test_a_rank_that_was_left_out(ranks: Ranks) -> None:
    ranks(left_out, 3)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("out of memory, say")


def after_a_failure(transport: Transport) -> float:
    """A backward raises on all ranks, when some buckets have left; two of the three ranks go on by themselves."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 512))
    ddp = gradsync.DistributedDataParallel(module, bucket_cap_mb=0.0001, transport=transport)
    rank = dist.get_rank()
    ddp(batch(rank)).square().mean().backward()
    with pytest.raises(ValueError, match="out of memory"):
        module[3](module[2](Fails.apply(module[0](batch(rank))))).sum().backward()
    pair = dist.new_group([0, 1])
    dist.barrier()
    began = time.monotonic()
    ddp._update_process_group(pair)
    module.zero_grad()
    if rank < 2:
        ddp(batch(rank)).square().mean().backward()
        for parameter, gradient in zip(module.parameters(), mean_gradients(module), strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    took = seconds_since(began)
    dist.barrier()  # nobody ends, which the others would notice
    return took


@TRANSPORTS
def test_after_a_backward_that_raised(ranks: Ranks, transport: Transport) -> None:
    assert max(ranks(after_a_failure, 3, transport)) < 3  # none waits for the one that has left
