"""Several replicated modules in one backward, and collectives of the model's own beside them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.errors import InvalidOptionError
from tests.ranks.small import FRONTS, TRANSPORTS, assert_gradients, batch, build, gradients_of, make
from tests.support.ranks import on_ranks


class Residual(nn.Module):
    """Layers of which one may be left out; all buckets have the same size, so that mixing them up goes unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, skip: int | None = None, center: bool = False) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = x + torch.tanh(layer(x))
            if center and number == 1:
                x = x - MeanOverRanks.apply(x.mean(0))
        return x


class MeanOverRanks(torch.autograd.Function):
    """A collective in forward and in backward, as batch normalization over all ranks has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _mean(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _mean(gradients[0])


def _mean(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def skipped(step: int, rank: int) -> int | None:
    return 3 if step >= 2 and rank == 1 else None


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world")
def test_buckets_of_two_replicas_are_not_mixed_up(front: str, side_by_side: bool, transport: str, world: int) -> None:
    group = dist.new_group([0, 1])  # of two ranks, or of three
    if dist.get_rank() > 1:
        return
    torch.manual_seed(0)
    modules = [Residual().double(), Residual().double()]
    oracles = copy.deepcopy(modules)
    first, second = (make(front, module, process_group=group, transport=transport) for module in modules)

    def loss(a: Any, b: Any, step: int, rank: int) -> Tensor:
        x, skip = batch(rank, step).double(), skipped(step, rank)
        if side_by_side:
            out = a(x) + b(x, skip=skip) if rank == 0 else b(x, skip=skip) + a(x)
        else:
            out = b(a(x), skip=skip)
        return out.square().mean()

    for step in range(4):
        for module in (*modules, *oracles):
            module.zero_grad()
        loss(first, second, step, dist.get_rank()).backward()
        for rank in range(2):
            (loss(oracles[0], oracles[1], step, rank) / 2).backward()
        for module, oracle in zip(modules, oracles, strict=True):
            assert_gradients(module, gradients_of(oracle), rtol=1e-12, atol=1e-12)


@FRONTS
@on_ranks(2)
def test_collectives_of_the_model_itself(front: str) -> None:
    torch.manual_seed(0)
    module = Residual().double()
    replica = make(front, module)
    for step in range(4):
        module.zero_grad()
        replica(
            batch(dist.get_rank(), step).double(), skip=skipped(step, dist.get_rank()), center=True
        ).square().mean().backward()
        gradients: list[Any] = [None] * 2
        dist.all_gather_object(gradients, [p.grad for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@on_ranks(2)
def test_large_gradients_and_a_change_past_the_front() -> None:
    """Past the front, so that the change is noticed by the first arrival and not before."""
    module: Any = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(3)))
    gradsync.replicate(module, bucket_cap_mb=0.1)
    for step in range(4):
        module.zero_grad()
        module[0].requires_grad_(step < 2)
        x = torch.full((1, 300), dist.get_rank() + 1.0)
        module[2](module[1](module[0](x))).sum().backward()
        gradients: list[Any] = [None] * 2
        dist.all_gather_object(gradients, module[2].weight.grad)
        assert torch.equal(*gradients)


@on_ranks(2)
def test_many_tokens_do_not_overflow_float16() -> None:
    module = nn.Linear(4, 2).half()
    replica = gradsync.replicate(module)
    assert isinstance(replica, gradsync.ReplicateModule)
    replica.set_round_weight([40000, 30000][dist.get_rank()])
    replica(torch.ones(1, 4).half()).sum().backward()
    assert torch.equal(module.bias.grad, torch.ones(2).half())  # type: ignore[arg-type]


@on_ranks(2)
def test_a_checkpoint_loaded_after_a_forward_without_backward() -> None:
    policy = gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    module = build()
    replica = gradsync.replicate(module, mp_policy=policy)
    wanted = {name: torch.full_like(value, 3.0) for name, value in module.state_dict().items()}
    replica(torch.ones(1, 4))  # and no backward
    replica.load_state_dict(wanted)
    replica(torch.ones(1, 4)).float().sum().backward()
    assert all(torch.equal(value, wanted[name]) for name, value in replica.state_dict().items())


@on_ranks(2)
def test_hooks_and_weights_are_refused_together() -> None:
    replica = gradsync.replicate(build())
    assert isinstance(replica, gradsync.ReplicateModule)
    replica.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(InvalidOptionError, match="the hook alone decides"):
        replica.set_round_weight(3)
    with pytest.raises(InvalidOptionError, match="the hook alone decides"):
        next(iter(gradsync.uneven([1], replica)))
