"""Gradients so large that they are brought into their buckets at once."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync.engine import bucket
from tests.ranks.small import assert_gradients, gradients_of
from tests.support.ranks import on_ranks

WIDTH = 300  # 360 kB a weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return self.last(x)


def batch(step: int, part: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step * 8 + part)).requires_grad_()


@on_ranks(2)
def test_large_gradients() -> None:
    torch.manual_seed(0)
    module = Model()
    assert module.first.weight.nbytes >= bucket.LARGE
    oracle = copy.deepcopy(module)
    replica = gradsync.replicate(module, bucket_cap_mb=0.1)
    times = [1, 1, 2, 3, 1]
    for step in range(5):
        if step % 2 == 0:
            module.zero_grad(set_to_none=step < 3)
            oracle.zero_grad(set_to_none=step < 3)
        with replica.no_sync():
            replica(batch(step, dist.get_rank()), times[step]).square().mean().backward()
        replica(batch(step + 50, dist.get_rank()), times[step]).square().mean().backward()
        for part in range(2):
            for each in (step, step + 50):
                (oracle(batch(each, part), times[step]).square().mean() / 2).backward()
        assert_gradients(module, gradients_of(oracle), rtol=1e-5, atol=1e-5)
