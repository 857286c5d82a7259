"""`dp_mesh_dims`: parameters, inputs and outputs are DTensors over one mesh, parts of which are replicated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torchs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor

import gradsync
from tests.ranks.small import full
from tests.support.ranks import Ranks, on_ranks

PLACED: dict[str, Placement] = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def spread(module: nn.Module, mesh: DeviceMesh) -> Any:
    """Over the mesh: whole over "dp", and parts of a layer each over "tp" if there is one."""

    def place(prefix: str, part: nn.Module, over: DeviceMesh) -> None:
        for key, parameter in list(part._parameters.items()):
            assert parameter is not None
            inner = [PLACED.get(f"{prefix}.{key}", Replicate())] * (over.ndim - 1)
            distributed = distribute_tensor(parameter.detach(), over, [Replicate(), *inner])
            part._parameters[key] = nn.Parameter(distributed)

    return distribute_module(module, mesh, place)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def made(mesh: DeviceMesh, api: Any = gradsync.replicate, **options: Any) -> Any:
    return api(spread(build(), mesh), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"), **options)


def trained(shape: tuple[int, ...], accumulated: bool) -> None:
    """A batch that is sharded over "dp", and a loss of each rank's own part: the mean is that of one process."""
    mesh = mesh_of(*shape)
    replica = made(mesh)
    plain = build()
    rest = [Replicate()] * (mesh.ndim - 1)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for part in range(2 if accumulated else 1):
            x = batch(2 * step + part)
            if accumulated:
                replica.set_requires_gradient_sync(part == 1)
            output = replica(distribute_tensor(x, mesh, [Shard(0), *rest]))
            assert isinstance(output, DTensor)
            assert output.device_mesh == mesh
            assert output.shape == (8, 2)  # of the whole batch
            output.redistribute(placements=[Shard(0), *rest]).to_local().square().mean().backward()
            plain(x).square().mean().backward()
        for (name, found), wanted in zip(replica.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(found.grad, DTensor)
            assert found.grad.placements == found.placements
            torch.testing.assert_close(full(found.grad), wanted.grad, msg=name)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    gradsync.verify(replica, optimizer)
    again = copy.deepcopy(replica)
    x = distribute_tensor(batch(0), mesh, [Shard(0), *rest])
    torch.testing.assert_close(full(again(x)), plain(batch(0)))


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_sharded_batches(ranks: Ranks, shape: tuple[int, ...], accumulated: bool) -> None:
    ranks(trained, 4 if len(shape) == 2 else 2, shape, accumulated)


def gradients(mesh: DeviceMesh, api: Any, placement: Placement, loss: str, **options: Any) -> list[Tensor]:
    replica = made(mesh, api, **options)
    x = distribute_tensor(batch(0), mesh, [placement, Replicate()])
    output = replica(x)
    if loss == "of all":  # a DTensor over the mesh, too
        output.square().mean().backward()
    else:
        output.redistribute(placements=[placement, Replicate()]).to_local().square().mean().backward()
    return [full(parameter.grad) for parameter in replica.parameters()]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("loss", ["of all", "of each"])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@on_ranks(4)
def test_gradients_are_torchs(placement: Placement, loss: str, low: bool) -> None:
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)} if low else {}
    mesh = mesh_of(2, 2)  # one for both: torch compares them by identity
    found, wanted = (gradients(mesh, api, placement, loss, **options) for api in (gradsync.replicate, torchs))
    torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_plain_inputs_too() -> None:
    """Over replicated dimensions only, plain inputs work too, in turn with DTensors."""
    mesh = mesh_of(2)
    replica, plain = made(mesh), build()
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        x = batch(step)
        if step in (0, 3):
            output = replica(x.chunk(2)[dist.get_rank()])
        else:
            output = replica(distribute_tensor(x, mesh, [Shard(0)])).to_local()
        output.square().mean().backward()
        plain(x).square().mean().backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
        for found, wanted in zip(replica.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(found.detach()), wanted.detach())


@on_ranks(4)
def test_which_mesh() -> None:
    """DTensors over the whole mesh, inside of a step and outside."""
    mesh = mesh_of(2, 2)
    replica = made(mesh)
    output = replica(distribute_tensor(batch(0), mesh, [Shard(0), Replicate()]))
    for parameter in replica.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh == mesh
    assert isinstance(output.placements[1], (Partial, Replicate))
    output.redistribute(placements=[Shard(0), Replicate()]).to_local().sum().backward()
    assert dist.get_world_size() == mesh.size()
    assert all(isinstance(parameter.grad, DTensor) for parameter in replica.parameters())
