"""Ranks with different numbers of inputs; other groups between rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import gradsync
from tests.ranks.small import FRONTS, batch, build, make, mean_gradients, same_everywhere
from tests.support.ranks import Ranks

# --- uneven inputs -----------------------------------------------------------------------------------


def joined(initial: bool, hook: bool, with_zero: bool) -> None:
    module: Any = nn.Sequential(build(), nn.BatchNorm1d(2))
    ddp = make("DistributedDataParallel", module)
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    joinables: list[Any] = [ddp]
    if with_zero:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        joinables.append(optimizer)
    inputs = 3 + 2 * dist.get_rank()
    with Join(joinables, divide_by_initial_world_size=initial):
        for step in range(inputs):
            optimizer.zero_grad()
            ddp(batch(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
    same_everywhere(module)
    # The next context starts afresh.
    with ddp.join():
        ddp(batch(dist.get_rank())).square().mean().backward()
    same_everywhere(module)


@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("initial", [True, False])
def test_join(ranks: Ranks, initial: bool, hook: bool, with_zero: bool) -> None:
    ranks(joined, 2, initial, hook, with_zero)


def divided(initial: bool) -> list[float]:
    module = nn.Linear(1, 1, bias=False)
    ddp = gradsync.DistributedDataParallel(module)
    seen = []
    with ddp.join(divide_by_initial_world_size=initial):
        for _ in range(1 + dist.get_rank()):
            ddp.zero_grad()
            ddp(torch.full((1, 1), 6.0)).sum().backward()
            assert module.weight.grad is not None
            seen.append(module.weight.grad.item())
    return seen


def test_what_a_joined_ranks_gradient_is_divided_by(ranks: Ranks) -> None:
    assert ranks(divided, 3, True) == [[6], [6, 4], [6, 4, 2]]
    assert ranks(divided, 3, False) == [[6], [6, 6], [6, 6, 6]]


def thrown() -> str:
    ddp = gradsync.DistributedDataParallel(nn.Linear(1, 1))
    try:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2 + dist.get_rank()):
                ddp(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_early_termination(ranks: Ranks) -> None:
    first, second = ranks(thrown, 2)
    assert "Rank 0 exhausted all inputs." in first
    assert "Detected at least one rank that exhausted inputs." in second


def without_context(front: str) -> list[float]:
    module = nn.Linear(1, 1, bias=False)
    replica = make(front, module)
    optimizer = torch.optim.Adam(module.parameters())
    seen = []
    batches = [torch.full((1, 1), float(dist.get_rank() + 1))] * (1 + 2 * dist.get_rank())
    for x in gradsync.uneven(batches, replica):
        optimizer.zero_grad()
        for _ in range(2):  # any number of backwards a batch
            replica(x).sum().backward()
        assert module.weight.grad is not None
        seen.append(module.weight.grad.item())
        optimizer.step()
        same_everywhere(module)
    optimizer.zero_grad()
    replica(torch.full((1, 1), dist.get_rank() * 2.0)).sum().backward()  # both count again
    assert module.weight.grad is not None
    seen.append(module.weight.grad.item())
    optimizer.step()
    same_everywhere(module)  # the optimizers' states are the same too
    return seen


@FRONTS
def test_uneven_loaders_without_a_context(ranks: Ranks, front: str) -> None:
    assert ranks(without_context, 2, front) == [[3.0, 4.0, 4.0, 1.0]] * 2


def no_batch_at_all() -> None:
    replica = gradsync.replicate(nn.Linear(1, 1))
    for x in gradsync.uneven([torch.ones(1, 1)] * dist.get_rank(), replica):
        replica(x).sum().backward()


def test_a_rank_without_a_single_batch(ranks: Ranks) -> None:
    first, _ = ranks.outcomes(no_batch_at_all, 2)
    assert isinstance(first.exception, gradsync.errors.InvalidOptionError)
    assert "rank 0" in str(first.exception)


# --- other groups ------------------------------------------------------------------------------------


def another_group() -> None:
    module = build()
    ddp = gradsync.DistributedDataParallel(module)
    ddp(batch(dist.get_rank())).square().mean().backward()
    pair = dist.new_group([0, 1])
    ddp._update_process_group(pair)
    module.zero_grad()
    if dist.get_rank() < 2:
        for _ in range(2):
            module.zero_grad()
            ddp(batch(dist.get_rank())).square().mean().backward()
        for parameter, gradient in zip(module.parameters(), mean_gradients(module), strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    ddp._update_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    module.zero_grad()
    ddp(batch(dist.get_rank())).square().mean().backward()
    for parameter, gradient in zip(module.parameters(), mean_gradients(module, parts=3), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_changing_groups_between_rounds(ranks: Ranks) -> None:
    ranks(another_group, 3)
