"""A small model and what goes with it, for tests of single features."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import gradsync

FRONTS = pytest.mark.parametrize("front", ["replicate", "DistributedDataParallel"])
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "process_group"])


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def make(front: str, module: nn.Module, **options: Any) -> Any:
    return getattr(gradsync, front)(module, **{"bucket_cap_mb": 0.0001, **options})


def batch(part: int, step: int = 0) -> Tensor:
    """Of the rank with this number."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 16 + part))


def backward(replica: Any, step: int = 0) -> None:
    """On this rank's batch, with the loss that `mean_gradients` differentiates."""
    _loss(replica, dist.get_rank(), step).backward()


def mean_gradients(module: nn.Module, step: int = 0, parts: Collection[int] = (0, 1)) -> list[Tensor]:
    """Of the mean loss over the batches of these ranks, from one process."""
    plain = copy.deepcopy(module)
    if isinstance(plain, gradsync.ReplicateModule):
        gradsync.unreplicate(plain)
    plain.zero_grad()
    mean_backward(plain, step, parts)
    return [p.grad for p in plain.parameters() if p.grad is not None]


def mean_backward(module: nn.Module, step: int = 0, parts: Collection[int] = (0, 1)) -> None:
    """The same for a plain module, which then has them in `.grad`, added to what was there."""
    for part in parts:
        (_loss(module, part, step) / len(parts)).backward()


def _loss(module: nn.Module, part: int, step: int) -> Tensor:
    double = next(module.parameters()).dtype is torch.float64
    x = batch(part, step)
    loss: Tensor = module(x.double() if double else x).square().mean()
    return loss


def same_everywhere(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    prints: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(prints, gradsync.fingerprint(module), group=group)
    assert len(set(prints)) == 1


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def assert_gradients(module: nn.Module, wanted: Iterable[Tensor | None], **tolerance: Any) -> None:
    for (name, parameter), gradient in zip(module.named_parameters(), wanted, strict=True):
        _assert_close(full(parameter.grad), gradient, f"gradient of {name}", **tolerance)


def _assert_close(found: Tensor | None, wanted: Tensor | None, where: str, **tolerance: Any) -> None:
    torch.testing.assert_close(found, wanted, **tolerance, msg=lambda text: f"{where}: {text}")


def short_group(seconds: float) -> Any:
    """A group of all ranks, in which a collective may take that long."""
    return dist.new_group(timeout=timedelta(seconds=seconds))


def full(tensor: Any) -> Any:
    """All of it, where this rank has only its shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Fails(torch.autograd.Function):
    """Passes on what it is given, and raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")
