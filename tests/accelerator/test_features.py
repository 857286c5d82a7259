"""What goes beyond a plain step, on an accelerator: results, and everything in order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

import gradsync
from tests.ranks.small import FRONTS, batch, build, full, make, same_everywhere
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


@pytest.mark.parametrize("how", ["mesh", "device", "in low precision"])
@on_accelerator(2)
def test_parameters_that_are_offloaded(how: str) -> None:
    """They, their gradients and their optimizer's state lie on the host; forward and backward are the device's."""
    plain = build()
    module = copy.deepcopy(plain)
    options: dict[str, Any] = {"device_id": device()}
    if how != "device":
        options = {"mesh": init_device_mesh(accelerator.NAME, (2,))}
    if how == "in low precision":
        options["mp_policy"] = gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    replica = gradsync.replicate(module, offload_policy=gradsync.CPUOffloadPolicy(), **options)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    others = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    tolerance: dict[str, Any] = {"rtol": 0.05, "atol": 0.02} if how == "in low precision" else {}
    assert gradsync.statistics(replica).transport.startswith("process_group")  # as buckets are the device's
    for step in range(3):
        for part in range(2):
            (plain(batch(part, step)).square().mean() / 2).backward()
        if step == 1:  # accumulated
            with replica.no_sync():
                replica(batch(dist.get_rank(), step).to(device())).float().square().mean().backward()
            continue
        output = replica(batch(dist.get_rank(), step).to(device()))
        assert output.device == device()
        output.float().square().mean().backward()
        for found, wanted in zip(replica.parameters(), plain.parameters(), strict=True):
            assert found.grad is not None
            assert [found.device.type, found.grad.device.type] == ["cpu", "cpu"]
            torch.testing.assert_close(full(found.grad), wanted.grad, **tolerance)
        for one in (optimizer, others):
            one.step()
            one.zero_grad()
    assert all(state["momentum_buffer"].device.type == "cpu" for state in optimizer.state.values())
    same_everywhere(module)
