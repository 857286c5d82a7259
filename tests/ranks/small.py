"""A small model and what goes with it, for tests of single features."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync

FRONTS = pytest.mark.parametrize("front", ["replicate", "DistributedDataParallel"])
TRANSPORTS = pytest.mark.parametrize("transport", ["shared_memory", "process_group"])


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def make(front: str, module: nn.Module, **options: Any) -> Any:
    return getattr(gradsync, front)(module, **{"bucket_cap_mb": 0.0001, **options})


def batch(part: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 16 + part))


def mean_gradients(module: nn.Module, step: int = 0, parts: Collection[int] = (0, 1)) -> list[Tensor]:
    """Of the mean loss over the batches of these ranks, from one process."""
    plain = copy.deepcopy(module)
    if isinstance(plain, gradsync.ReplicateModule):
        gradsync.unreplicate(plain)
    plain.zero_grad()
    for part in parts:
        (plain(batch(part, step)).square().mean() / len(parts)).backward()
    return [p.grad for p in plain.parameters() if p.grad is not None]


def same_everywhere(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    prints: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(prints, gradsync.fingerprint(module), group=group)
    assert len(set(prints)) == 1
