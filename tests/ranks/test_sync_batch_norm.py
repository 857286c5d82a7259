"""`nn.SyncBatchNorm` under both fronts. torch computes it on GPUs only, so what can be tested here is the refusal,
and a layer of the same kind that computes on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import gradsync
from gradsync.errors import InvalidOptionError, UnsuitableModuleError
from tests.ranks.small import FRONTS, assert_gradients, batch, gradients_of, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks


@FRONTS
@on_ranks(2)
def test_refused_on_the_cpu(front: str) -> None:
    module: Any = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        converted(batch(0))  # torch's own refusal, in forward: that is why ours comes earlier
    with pytest.raises(
        UnsuitableModuleError, match=r"SyncBatchNorm layers only work with GPU modules, and '1' of .*buffers='average'"
    ):
        make(front, converted)
    replica = make(front, module, buffers="average")  # the cure
    replica(batch(dist.get_rank())).sum().backward()
    same_everywhere(module)


class Summed(torch.autograd.Function):
    """The sum over the ranks; backward is one as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class OnCpu(nn.SyncBatchNorm):
    """Normalizes by the statistics of all ranks, on the CPU; its forward and its backward communicate."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        sums: Any = Summed.apply(torch.stack([input.sum(0), input.square().sum(0)]))
        total = sums / (len(input) * dist.get_world_size())
        mean, variance = total[0], total[1] - total[0].square()
        return (input - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Alone(nn.BatchNorm1d):
    """The same in one process, without running statistics, which the one above leaves alone."""

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(input, 0, correction=0)
        return (input - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def model(norm: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), norm(3), nn.Tanh(), nn.Linear(3, 3), norm(3), nn.Linear(3, 2)).double()


@FRONTS
@on_ranks(2)
def test_a_layer_that_communicates_in_forward_and_backward(front: str) -> None:
    """Its collectives in backward don't get mixed up with ours, which are under way at the same time."""
    module, alone = model(OnCpu), model(Alone)
    replica = make(front, module, bucket_cap_mb=0.00001)
    for step in range(4):
        module.zero_grad()
        alone.zero_grad()
        replica(batch(dist.get_rank(), step).double()).square().sum().backward()
        (alone(torch.cat([batch(0, step), batch(1, step)]).double()).square().sum() / 2).backward()
        assert_gradients(module, gradients_of(alone))
        with torch.no_grad():
            for parameter in (*module.parameters(), *alone.parameters()):
                parameter -= 0.01 * parameter.grad
    same_everywhere(module)


def to_the_end(replica: Any, batches: list[Tensor]) -> None:
    with Join([replica], throw_on_early_termination=True):
        for x in batches:
            replica(x).sum().backward()


@FRONTS
@on_ranks(2)
def test_uneven_inputs(front: str) -> None:
    module = model(OnCpu)
    replica = make(front, module)
    with pytest.raises(InvalidOptionError, match=r"SyncBatchNorm.*throw_on_early_termination=True.*gradsync\.uneven"):
        Join([replica])
    batches = [batch(dist.get_rank(), step).double() for step in range(1 + dist.get_rank())]
    with pytest.raises(RuntimeError, match="exhausted"):
        to_the_end(replica, batches)
    replica.zero_grad()
    for x in gradsync.uneven(batches, replica):
        replica(x).sum().backward()
    same_everywhere(module)


def logged() -> list[int]:
    wrappers = (gradsync.DistributedDataParallel(model(norm)) for norm in (OnCpu, nn.BatchNorm1d))
    return [ddp._get_ddp_logging_data()["has_sync_bn"] for ddp in wrappers]


def test_logging_data_tell_of_it(ranks: Ranks) -> None:
    assert ranks(logged, 1) == [[1, 0]]
