"""Hooks that send gradients as bytes: what torch's two quantization hooks do, on any backend.

torch's own read the result of an all-gather from its future, which NCCL and gloo shape differently, and break on
gloo. Whoever registers one of them gets its namesake from here. Each rank sends, in one all-gather, its gradients
in 8 bits together with the scale and the zero point that they were made with; the result is the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradsync.hooks.comm_hook import GradBucket, Hook

LEVELS = 255
TORCHS = "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks"


def quantization_pertensor_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """One scale for a whole bucket."""
    return _reduce(group, bucket.buffer(), bucket.buffer().numel())


def quantization_perchannel_hook(
    group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[Tensor]:
    """A scale for every `bucket_size` elements: finer where gradients differ in size."""
    return _reduce(group, bucket.buffer(), bucket_size)


def stand_in(hook: Hook) -> Hook:
    """The hook itself, or its namesake from here for one of torch's quantization hooks."""
    ours: dict[str, Callable[..., Any]] = {
        "quantization_pertensor_hook": quantization_pertensor_hook,
        "quantization_perchannel_hook": quantization_perchannel_hook,
    }
    name = getattr(hook, "__name__", "")
    return ours.get(name, hook) if getattr(hook, "__module__", "") == TORCHS else hook


def _reduce(group: dist.ProcessGroup | None, data: Tensor, length: int) -> Future[Tensor]:
    message = _encode(data, length)
    received = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(received, message, group=group, async_op=True)

    def mean(_: object) -> Tensor:
        total = sum((_decode(each, length) for each in received), torch.zeros((), device=data.device))
        return (total[: data.numel()] / len(received)).to(data.dtype)

    future: Future[Tensor] = work.get_future().then(mean)
    return future


def _encode(data: Tensor, length: int) -> Tensor:
    """Scales, zero points and 8-bit numbers of rows of `length` elements, as bytes. Zero is always exact."""
    rows = torch.nn.functional.pad(data.float(), (0, -data.numel() % max(length, 1))).view(-1, max(length, 1))
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round()
    codes = ((rows / scale).round() + zero).clamp(0, LEVELS).to(torch.uint8)
    head = torch.cat([scale, zero], dim=1)
    return torch.cat([head.view(torch.uint8), codes], dim=1).view(-1)


def _decode(message: Tensor, length: int) -> Tensor:
    rows = message.view(-1, 8 + max(length, 1))
    head = rows[:, :8].clone(memory_format=torch.contiguous_format).view(torch.float32)
    scale, zero = head[:, :1], head[:, 1:]
    return ((rows[:, 8:] - zero) * scale).reshape(-1)
