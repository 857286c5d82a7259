"""What torch's wrapper has beyond training: ignored and delayed parameters, buffer hooks, logging data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.engine.buffers import BufferHookLocation
from tests.support.ranks import Ranks, on_ranks

DDP = gradsync.DistributedDataParallel


def ones() -> Tensor:
    """A batch whose gradient differs between ranks: 1 on rank 0, 2 on rank 1."""
    return torch.full((1, 2), float(dist.get_rank() + 1))


def ignored() -> list[float]:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)).eval()
    rank = dist.get_rank()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["2.weight", "1.running_mean"])
    with torch.no_grad():
        module[2].weight.fill_(rank)
        module[1].running_mean.fill_(rank)
    ddp = DDP(module)
    ddp(ones()).sum().backward()
    names = [name for name, _ in DDP._get_data_parallel_params(module, named_params=True)]
    assert names == ["0.weight", "0.bias", "2.bias"]
    own = module[2].weight.grad
    assert isinstance(own, Tensor)
    assert module[1].running_mean[0].item() == rank
    assert module[2].weight[0, 0].item() == rank
    return own.flatten().tolist()


def test_ignored_parameters_and_buffers_are_left_alone(ranks: Ranks) -> None:
    first, second = ranks(ignored, 2)
    assert first != second


@on_ranks(2)
def test_delayed_parameters_leave_behind_their_anchor() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    late = [(name, p) for name, p in module.named_parameters() if name in ("2.weight", "3.weight")]
    first = next(module.parameters())
    ddp = DDP(module, bucket_cap_mb=0.000001, delay_all_reduce_named_params=late, param_to_hook_all_reduce=first)
    for _ in range(3):
        module.zero_grad()
        ddp(ones()).sum().backward()
        local = [torch.autograd.grad(module(torch.full((1, 2), r)).sum(), first)[0] for r in (1.0, 2.0)]
        torch.testing.assert_close(first.grad, sum(local) / 2)
    plan = ddp._engine.reducer.group.plan
    assert plan is not None
    assert [place.index for bucket in plan.buckets for place in bucket.places] == [1, 0, 2, 3]


def hooked(location: str) -> list[int]:
    module = nn.BatchNorm1d(2)
    ddp = DDP(module)
    calls: list[int] = []

    def hook(state: Any, named: dict[str, Tensor]) -> Any:
        state.append(int(named["num_batches_tracked"]))
        return [dist.broadcast(named["running_mean"], 1, async_op=True).get_future()]

    ddp._register_buffer_comm_hook(calls, hook, BufferHookLocation[location])
    for step in range(2):
        ddp(torch.randn(4, 2) + dist.get_rank()).sum().backward()
        assert module.running_mean is not None
        means = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(means, module.running_mean)
        assert torch.equal(*means) is (location == "POST_FORWARD"), step
    ddp.eval()
    if dist.get_rank() == 0:
        ddp(torch.randn(4, 2))
    return calls


@pytest.mark.parametrize(("location", "seen"), [("PRE_FORWARD", [0, 1]), ("POST_FORWARD", [1, 2])])
def test_a_hook_for_buffers(ranks: Ranks, location: str, seen: list[int]) -> None:
    assert ranks(hooked, 2, location) == [seen, seen]


def logged() -> dict[str, Any]:
    ddp = DDP(nn.Linear(3, 2), bucket_cap_mb=1)
    assert ddp._get_ddp_logging_data()["has_rebuilt_buckets"] == 0
    for _ in range(3):
        ddp(torch.ones(1, 3)).sum().backward()
    return ddp._get_ddp_logging_data()


def test_logging_data(ranks: Ranks) -> None:
    first, second = ranks(logged, 2)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["world_size"] == 2
    assert first["module_name"] == "Linear"
    assert first["backend_name"] == "gloo"
    assert first["iteration"] == 2
    assert first["total_parameter_size_bytes"] == 32
    assert first["num_parameter_tensors"] == 2
    assert first["bucket_cap_bytes"] == 2**20
    assert first["rebuilt_bucket_sizes"] == "32"
    assert first["has_rebuilt_buckets"] == 1
    assert first["forward_compute_time"] > 0
    assert first["backward_compute_time"] > 0
    assert first["avg_backward_comm_time"] > 0
    assert first["backward_comm_time"] >= first["backward_compute_comm_overlap_time"]


def frameworks_flag() -> list[bool]:
    module = nn.Linear(2, 2)
    ddp = DDP(module)
    ddp.require_backward_grad_sync = False
    ddp(ones()).sum().backward()
    local = module.weight.grad is not None and module.weight.grad[0, 0].item() == dist.get_rank() + 1
    ddp.require_backward_grad_sync = True
    ddp(ones()).sum().backward()
    assert module.weight.grad is not None
    return [local, module.weight.grad[0, 0].item() == 3.0]


def test_the_flag_that_frameworks_set(ranks: Ranks) -> None:
    assert ranks(frameworks_flag, 2) == [[True, True]] * 2


@on_ranks(2)
def test_how_torch_compile_is_to_split_graphs() -> None:
    """It asks the class, of whatever stands in torch's place, while a forward runs for which gradients are wanted."""
    seen: list[int | None] = []

    class Asks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            asked = {kind._get_active_ddp_module() for kind in (DDP, nn.parallel.DistributedDataParallel)}
            seen.extend(None if one is None else one.bucket_bytes_cap for one in asked)
            return super().forward(input)

    ddp = DDP(Asks(2, 2), bucket_cap_mb=7)
    ddp(ones())
    with torch.no_grad():
        ddp(ones())
    DDP(Asks(2, 2), bucket_cap_mb=0.1)(ones())  # which is less than torch allows
    with pytest.raises(TypeError):
        ddp(ones(), ones())
    assert seen == [7 << 20, None, 1 << 20]
    assert DDP._get_active_ddp_module() is None
