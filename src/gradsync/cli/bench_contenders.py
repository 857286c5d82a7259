"""Who is measured: the same module kept in step by different means, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradsync


@dataclass(frozen=True)
class Contender:
    key: str
    name: str
    wrap: Callable[[nn.Module], nn.Module]


PLAIN = Contender("plain", "no communication", lambda module: module)
TORCH = Contender("torch", "torch DDP", TorchDDP)
TORCH_VIEWS = Contender("torch_views", "torch DDP, bucket views", lambda m: TorchDDP(m, gradient_as_bucket_view=True))
TORCH_BEST = Contender(
    "torch_best",
    "torch DDP at its best",
    lambda m: TorchDDP(m, gradient_as_bucket_view=True, static_graph=True, batched_grad_copy=True),
)
REPLICATE = Contender("replicate", "gradsync.replicate", gradsync.replicate)
WRAPPER = Contender(
    "wrapper", "gradsync DDP, bucket views", lambda m: gradsync.DistributedDataParallel(m, gradient_as_bucket_view=True)
)

IN_TIME = (PLAIN, TORCH, TORCH_BEST, REPLICATE, WRAPPER)
IN_MEMORY = (PLAIN, TORCH, TORCH_VIEWS, REPLICATE)


def contender(key: str) -> Contender:
    return next(c for c in (*IN_TIME, *IN_MEMORY) if c.key == key)
