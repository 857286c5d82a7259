"""Mixed precision: against references that cast by hand in the same places."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

import gradsync
from tests.ranks.small import batch, full, mean_backward, same_everywhere
from tests.support.ranks import on_ranks


class Probe(nn.Module):
    """Records the dtypes it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("offset", torch.zeros(2))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"input": x.dtype, "weight": self.first.weight.dtype, "norm": self.norm.weight.dtype}
        hidden = self.first(x)
        hidden = self.norm(hidden.to(self.norm.weight.dtype)).to(self.second.weight.dtype)
        return self.second(hidden)


def build() -> Probe:
    torch.manual_seed(0)
    return Probe()


def by_hand(module: nn.Module, param_dtype: torch.dtype, reduce_dtype: torch.dtype, steps: list[int]) -> list[Tensor]:
    """Mean gradients over 2 ranks and the micro-steps given: computed in one dtype, added up in another."""
    totals: list[Tensor] = []
    for part in range(2):
        for step in steps:
            low = copy.deepcopy(module).to(param_dtype)
            low(batch(part, step).to(param_dtype)).float().square().mean().backward()
            gradients = [p.grad.to(reduce_dtype) for p in low.parameters() if p.grad is not None]
            totals = gradients if not totals else [a + b for a, b in zip(totals, gradients, strict=True)]
    return [(total / 2).float() for total in totals]


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("param", "reduce"), [("bfloat16", "float32"), ("bfloat16", None), ("float16", "float32")])
@pytest.mark.parametrize("front", ["replicate", "mesh", "ddp"])
@on_ranks(2)
def test_trains_as_the_reference_does(front: str, param: str, reduce: str | None, micro: int) -> None:
    param_dtype = getattr(torch, param)
    reduce_dtype = None if reduce is None else getattr(torch, reduce)
    module = build()
    plain = copy.deepcopy(module)
    if front == "ddp":
        from gradsync.ddp_private import _MixedPrecision

        precision = _MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        replica: Any = gradsync.DistributedDataParallel(module, mixed_precision=precision)
    else:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        mesh = init_device_mesh("cpu", (2,)) if front == "mesh" else None
        replica = gradsync.replicate(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tolerance = 1e-6 if (reduce_dtype or param_dtype) is torch.float32 else 2e-2
    for round in range(2):
        steps = [round * 4 + m for m in range(micro)]
        for m, step in enumerate(steps):
            with replica.no_sync() if m < micro - 1 else torch.enable_grad():
                replica(batch(dist.get_rank(), step)).float().square().mean().backward()
        assert module.seen == dict.fromkeys(("input", "weight", "norm"), param_dtype)
        expected = by_hand(plain, param_dtype, reduce_dtype or param_dtype, steps)
        for (name, found), wanted in zip(module.named_parameters(), expected, strict=True):
            assert found.dtype is torch.float32  # the optimizer sees full precision
            assert found.grad is not None
            assert found.grad.dtype is torch.float32
            torch.testing.assert_close(
                full(found.grad), wanted, rtol=tolerance, atol=tolerance, msg=f"gradient of {name} differs"
            )
        norm = nn.utils.clip_grad_norm_(module.parameters(), 10.0)
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), expected, strict=True):
                parameter.sub_(0.1 * gradient)
        same_everywhere(module)


@on_ranks(2)
def test_policies_nest() -> None:
    """A norm layer in full precision by ignoring it; an inner module with another policy; outputs cast."""
    module = build()
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    gradsync.replicate(module.second, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    gradsync.replicate(module, mp_policy=low, ignored_params=set(module.norm.parameters()))
    seen = []
    module.second.register_forward_pre_hook(lambda m, args: seen.append((args[0].dtype, m.weight.dtype)))
    out = module(batch(0))
    assert out.dtype is torch.float64
    assert module.seen == {"input": torch.bfloat16, "weight": torch.bfloat16, "norm": torch.float32}
    assert seen == [(torch.float16, torch.float16)]
    out.sum().backward()
    assert module.norm.weight.grad is not None  # each rank's own
    assert module.offset.dtype is torch.float32
    uncast = gradsync.replicate(
        nn.Linear(4, 2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    )
    with pytest.raises(RuntimeError, match="dtype"):
        uncast(batch(0))


@on_ranks(2)
def test_frozen_parameters_compute_in_low_precision_too() -> None:
    module = build()
    module.first.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    replica = gradsync.replicate(module, mp_policy=policy)
    before = module.first.weight.clone()
    replica(batch(dist.get_rank())).float().sum().backward()
    assert module.seen["weight"] is torch.bfloat16
    assert module.first.weight.grad is None
    assert torch.equal(module.first.weight, before)
    module.first.requires_grad_(True)
    replica(batch(dist.get_rank(), 1)).float().sum().backward()
    assert module.first.weight.grad is not None


@pytest.mark.parametrize("policy", ["cpu", "none"])
@on_ranks(2)
def test_offload(policy: str) -> None:
    """Without a GPU all of it is on the CPU: training is the same, and nothing is copied."""
    policies = {"cpu": CPUOffloadPolicy(pin_memory=False), "none": OffloadPolicy()}
    module = build()
    oracle = copy.deepcopy(module)
    replica = gradsync.replicate(module, mesh=init_device_mesh("cpu", (2,)), offload_policy=policies[policy])
    replica(batch(dist.get_rank())).square().mean().backward()
    mean_backward(oracle)
    for found, wanted in zip(module.parameters(), oracle.parameters(), strict=True):
        assert isinstance(found.grad, DTensor)
        assert found.device.type == "cpu"
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
