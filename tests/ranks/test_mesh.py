"""replicate() over device meshes: DTensors outside of a step, plain tensors inside, tensor parallelism underneath."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradsync
from tests.ranks.small import assert_gradients, backward, batch, full, gradients_of, mean_backward
from tests.support.ranks import on_ranks


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()


def check_training(
    replica: Any, oracle: nn.Module, parts: list[int], part: int, optimizer: Any, zero: bool = True
) -> None:
    """Three steps next to an oracle that sees all parts of the data."""
    expected = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        replica(batch(part, step).double()).square().mean().backward()
        mean_backward(oracle, step, parts)
        assert_gradients(replica, gradients_of(oracle))
        optimizer.step()
        expected.step()
        if zero:
            optimizer.zero_grad()
            expected.zero_grad()
    for found, wanted in zip(replica.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(full(found.detach()), wanted.detach())


@pytest.mark.parametrize("zero", [True, False])
@on_ranks(2)
def test_a_mesh_of_one_dimension(zero: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    module = build()
    oracle = copy.deepcopy(module)
    early = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 1:
        with torch.no_grad():
            module[0].weight.zero_()  # type: ignore[operator]
    replica = gradsync.replicate(module, mesh=mesh, bucket_cap_mb=0.0001)
    for parameter in replica.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(),)
    out = replica(batch(0).double())
    assert not any(isinstance(p, DTensor) for p in replica.parameters())  # plain until backward has ended
    assert all(isinstance(p, DTensor) for p in replica.state_dict().values())
    out = replica(batch(0).double())
    out.sum().backward()
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in replica.parameters())
    replica.zero_grad()
    with torch.no_grad():
        replica(batch(0).double())
    assert all(isinstance(p, DTensor) for p in replica.parameters())
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(gradsync.errors.UnsynchronizedStepError, match=r"'0.weight'.*Build the optimizer after"):
        early.step()
    size = dist.get_world_size()
    check_training(replica, oracle, list(range(size)), dist.get_rank(), optimizer, zero)
    norm = nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    assert isinstance(norm, Tensor)


@on_ranks(2)
def test_accumulation_on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,))
    replica: Any = gradsync.replicate(build(), mesh=mesh)
    oracle = build()
    for micro in range(3):
        replica.set_requires_gradient_sync(micro == 2)
        replica.set_is_last_backward(micro == 2)
        backward(replica, micro)
        mean_backward(oracle, micro)
    assert_gradients(replica, gradients_of(oracle))
    assert gradsync.statistics(replica).rounds == 1
    with replica.no_sync():
        replica(batch(dist.get_rank()).double()).sum().backward()
    replica.zero_grad()  # thrown away, and nothing of it comes back
    backward(replica, 9)
    oracle.zero_grad()
    mean_backward(oracle, 9)
    assert_gradients(replica, gradients_of(oracle))


@on_ranks(2)
def test_converted_afterwards() -> None:
    mesh = init_device_mesh("cpu", (2,))
    replica = gradsync.replicate(build().float(), mesh=mesh)
    replica(batch(0)).sum().backward()
    replica.zero_grad()
    replica.to(torch.float64)
    replica(batch(dist.get_rank()).double()).sum().backward()
    for parameter in replica.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype is torch.float64
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.to_local().dtype is torch.float64
    oracle = copy.deepcopy(build().float()).double()
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    check_training(replica, oracle, [0, 1], dist.get_rank(), optimizer)
    with replica.no_sync():
        replica.float()(batch(dist.get_rank())).square().mean().backward()
    backward(replica, 1)
    oracle.float().zero_grad()
    for part in range(2):
        sum(oracle(batch(part, micro)).square().mean() / 2 for micro in range(2)).backward()
    assert_gradients(replica, gradients_of(oracle))


@on_ranks(2)
def test_several_groups_on_one_mesh() -> None:
    """A list is one group; the rest of the model is another, with other options; tied weights once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 4)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(self.embed(x))))

    torch.manual_seed(0)
    model = Tied().double()
    oracle = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    pair: list[nn.Module] = [model.embed, model.head]
    assert gradsync.replicate(pair, mesh=mesh) == pair
    gradsync.replicate(model, mesh=mesh)
    assert gradsync.statistics(model.embed) is gradsync.statistics(model.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    check_training(model, oracle, [0, 1], dist.get_rank(), optimizer)


@pytest.mark.parametrize("hidden", [6, 5])
@pytest.mark.parametrize("by", ["mesh", "group", "device_mesh", "ddp"])
@on_ranks(4)
def test_tensor_parallelism_underneath(by: str, hidden: int) -> None:
    """4 ranks, 2 of them hold a layer together: gradients are reduced between the pairs only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 4)).double()
    oracle = copy.deepcopy(module)
    even: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    uneven: dict[str, Any] = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, mesh["tp"], uneven if hidden % 2 else even)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if by == "mesh":
        replica: Any = gradsync.replicate(module, mesh=mesh["dp"])
        for parameter in replica.parameters():
            assert parameter.device_mesh.mesh_dim_names == ("dp", "tp")
            assert parameter.placements[0] == Replicate()
        assert module[0].weight.placements == (Replicate(), Shard(0))
    elif by == "group":
        replica = gradsync.replicate(module, process_group=mesh.get_group("dp"))
    elif by == "device_mesh":
        replica = gradsync.replicate(module, device_mesh=mesh["dp"])
    else:
        replica = gradsync.DistributedDataParallel(module, device_mesh=mesh["dp"])
    names = [name for name, _ in module.named_parameters()]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    check_training(replica, oracle, [0, 1], mesh["dp"].get_local_rank(), optimizer)
    assert [name for name, _ in module.named_parameters()] == names  # they never vanish
    assert all(isinstance(value, DTensor) for value in module.state_dict().values())
