"""Several replicas in one backward, of which a rank does not reach all: it takes part in the others' rounds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.errors import GradsyncError
from tests.ranks.small import (
    TRANSPORTS,
    Fails,
    assert_gradients,
    batch,
    gradients_of,
    same_everywhere,
    short_group,
)
from tests.support.ranks import on_ranks


class Tower(nn.Module):
    """Two inner parts, each of which a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.third = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = self.first(x)
        if "2" in use:
            x = x + self.second(x)
        if "3" in use:
            x = x + self.third(x)
        found: Tensor = self.out(x).square().mean()
        return found


def nested(**options: Any) -> tuple[Any, Tower]:
    """The outer one with both inner parts replicated before it, each over connections of its own."""
    options = {"bucket_cap_mb": 0.0001, **options}
    tower = Tower()
    for inner in (tower.second, tower.third):
        gradsync.replicate(inner, buffers="never", **options)
    return gradsync.replicate(tower, buffers="never", **options), tower


# What each of two ranks uses, step by step.
USES = [
    [("23", ""), ("23", "23"), ("2", "3"), ("", "23"), ("3", "2")],
    [("2", "3"), ("23", "2"), ("", "3")],
    [("", ""), ("3", ""), ("", "2"), ("23", "")],
    [("23", "23"), ("23", "23"), ("23", ""), ("", "2")],
]


@TRANSPORTS
@pytest.mark.parametrize("uses", USES)
@on_ranks(2)
def test_equals_one_process(transport: str, uses: list[tuple[str, str]]) -> None:
    model, tower = nested(transport=transport)
    plain = Tower()
    plain.train()
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, use in enumerate(uses):
        optimizer.zero_grad()
        own.zero_grad()
        model(batch(dist.get_rank(), step), use[dist.get_rank()]).backward()
        for rank, one in enumerate(use):
            (plain(batch(rank, step), one) / 2).backward()
        assert_gradients(tower, gradients_of(plain))
        optimizer.step()
        own.step()
    same_everywhere(nn.ModuleList([tower.first, tower.out]))


@TRANSPORTS
@on_ranks(3)
def test_side_by_side(transport: str) -> None:
    """A generator and a discriminator: one rank's loss reaches only one of them."""
    torch.manual_seed(0)
    makes, judges = nn.Linear(4, 4), nn.Linear(4, 1)
    module: nn.Module
    plain = copy.deepcopy(nn.ModuleList([makes, judges]))
    for module in (makes, judges):
        gradsync.replicate(module, transport=transport)
    for step in range(4):
        for module in (makes, judges, plain):
            module.zero_grad()
        for parts, rank in ((nn.ModuleList([makes, judges]), dist.get_rank()), *((plain, rank) for rank in range(3))):
            x = batch(rank, step)
            made = parts[0](x) if (rank + step) % 3 or not step else x  # in the first round all ranks reach both
            loss = parts[1](made).square().mean() / (3 if parts is plain else 1)
            loss.backward()
        for parameter, wanted in zip([*makes.parameters(), *judges.parameters()], plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad)


@TRANSPORTS
@on_ranks(2)
def test_with_accumulation(transport: str) -> None:
    model, tower = nested(transport=transport)
    plain, rank = Tower(), dist.get_rank()
    for step in range(2):
        tower.zero_grad()
        plain.zero_grad()
        for at, use in enumerate([("2", "3"), ("3", "2")]):
            tower.second.set_requires_gradient_sync(at == 1)  # type: ignore[operator]
            tower.third.set_requires_gradient_sync(at == 1)  # type: ignore[operator]
            model.set_requires_gradient_sync(at == 1)
            model(batch(rank, 2 * step + at), use[rank]).backward()
            for other, one in enumerate(use):
                (plain(batch(other, 2 * step + at), one) / 2).backward()
        assert_gradients(tower, gradients_of(plain))


@TRANSPORTS
@on_ranks(2)
def test_a_backward_that_raises_before_it_reaches_the_second(transport: str) -> None:
    """The others have a round of it open: it is abandoned with the one that was begun, and nobody waits for long."""
    group = short_group(8)
    torch.manual_seed(0)
    late, early = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for module in (late, early):
        gradsync.replicate(module, process_group=group, transport=transport, bucket_cap_mb=0.00001)
    parameters = [*late.parameters(), *early.parameters()]
    for step in range(5):
        for parameter in parameters:
            parameter.grad = None
        x = late(batch(dist.get_rank(), step))
        fails = step in (1, 3) and dist.get_rank() == 1
        loss = early(Fails.apply(x) if fails else x).square().mean()
        if step not in (1, 3):
            loss.backward()
            torch.optim.SGD(parameters, lr=0.1).step()
            continue
        with pytest.raises((GradsyncError, ZeroDivisionError)) as caught:
            loss.backward()
        if fails:
            assert caught.type is ZeroDivisionError
            with pytest.raises(GradsyncError, match="whose backward had raised"):
                early(late(batch(1)))
        else:
            assert "whose backward had raised" in str(caught.value)
    same_everywhere(nn.ModuleList([*early]))
