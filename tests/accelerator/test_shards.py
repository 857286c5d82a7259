"""Steps by shards on an accelerator: results, and every access in order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.accelerator.test_features import close, device
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, batch, build, make, same_everywhere
from tests.support.accelerator.ranks import on_accelerator

SHARDS = 6


@pytest.mark.parametrize("size", [2, 3])
@FRONTS
@on_accelerator("size")  # type: ignore[arg-type]
def test_trains_as_one_process_does(front: str, size: int) -> None:
    be_on_host(dist.get_rank() // 2)  # there are two devices a host
    plain = build()
    module = copy.deepcopy(plain).to(device())
    replica = make(front, module)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, module)]
    shards = gradsync.Shards(replica, SHARDS)
    for step in range(3):
        for shard in range(SHARDS):
            (plain(batch(shard, step)).square().mean() / SHARDS).backward()
        for shard in shards.each(shards.mine):
            replica(batch(shard, step).to(device())).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        close(module, plain)
    same_everywhere(module)


@on_accelerator(2)
def test_each_shard_is_normalized_by_itself() -> None:
    """With `SyncBatchNorm`, which outside of shards sees all ranks."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    module = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).to(device())
    replica = make("replicate", module)
    shards = gradsync.Shards(replica, SHARDS)
    mean = torch.zeros(6)
    for shard in range(SHARDS):
        mean += plain[0](batch(shard)).mean(0).detach() * 0.1 / SHARDS
        (plain(batch(shard)).square().mean() / SHARDS).backward()
    for shard in shards.each(shards.mine):
        replica(batch(shard).to(device())).square().mean().backward()
    for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.cpu(), wanted.grad)
    torch.testing.assert_close(module[1].running_mean.cpu(), mean)
