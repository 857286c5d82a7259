"""What goes beyond a plain step, on an accelerator: results, and everything in order."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

import gradsync
from tests.ranks.small import FRONTS, batch, build, make, same_everywhere
from tests.support import accelerator
from tests.support.accelerator.ranks import on_accelerator


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def stepped(plain: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One process, on the batches of both ranks."""
    optimizer.zero_grad()
    for part in range(2):
        (plain(batch(part, step)).square().mean() / 2).backward()
    optimizer.step()


def close(module: nn.Module, plain: nn.Module) -> None:
    for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(whole.detach().cpu(), wanted.detach())


@FRONTS
@on_accelerator(2)
def test_an_optimizer_in_backward(front: str) -> None:
    plain = build()
    replica = make(front, copy.deepcopy(plain).to(device()))
    gradsync.overlap_optimizer(replica, torch.optim.SGD(replica.parameters(), lr=0.1))
    others = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        replica.zero_grad()
        replica(batch(dist.get_rank(), step).to(device())).square().mean().backward()
        stepped(plain, others, step)
        close(replica, plain)


@on_accelerator(2)
def test_over_a_mesh() -> None:
    plain = build()
    module = copy.deepcopy(plain).to(device())
    replica = gradsync.replicate(module, mesh=init_device_mesh(accelerator.NAME, (2,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    others = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        replica(batch(dist.get_rank(), step).to(device())).square().mean().backward()
        optimizer.step()
        stepped(plain, others, step)
        close(replica, plain)


@FRONTS
@on_accelerator(2)
def test_ranks_that_run_out_of_data(front: str) -> None:
    replica: Any = make(front, build().to(device()))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in gradsync.uneven(range(2 + dist.get_rank()), replica):
        optimizer.zero_grad()
        replica(batch(dist.get_rank(), step).to(device())).square().mean().backward()
        optimizer.step()


@FRONTS
@on_accelerator(2)
def test_joins_of_torchs(front: str) -> None:
    replica: Any = make(front, build().to(device()))
    with Join([replica]):
        for step in range(2 + dist.get_rank()):
            replica.zero_grad()
            replica(batch(dist.get_rank(), step).to(device())).square().mean().backward()
    same_everywhere(replica)
