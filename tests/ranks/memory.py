"""What tests of the transports have in common."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.replica import engine_of
from gradsync.transport import handshake, link
from gradsync.transport.base import Request, Transport
from gradsync.transport.choice import choose

CPU = torch.device("cpu")


def transport(wish: str = "shared_memory", group: Any = None) -> Transport:
    group = group or dist.group.WORLD
    assert group is not None
    return choose(group, wish, [])


def requests(*wanted: tuple[int, torch.dtype]) -> list[Request]:
    return [Request(numel, dtype, CPU) for numel, dtype in wanted]


def transport_of(module: nn.Module) -> Any:
    return engine_of(module).transport


def be_on_host(number: int) -> None:
    """From here on gradsync takes this process for one on that host."""
    handshake.location = lambda: f"host {number}"


def mapped() -> int:
    """How many pieces of shared memory this process has mapped."""
    gc.collect()
    return sum("memfd:gradsync" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> int:
    """How many descriptors of shared memory it has."""
    gc.collect()
    return sum("memfd:gradsync" in target for target in map(_target, Path("/proc/self/fd").iterdir()))


def links() -> int:
    gc.collect()
    return len(link._links)


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""  # the one with which the folder was listed


def same_on_all(*tensors: Tensor) -> None:
    """To the last bit."""
    mine = [tensor.detach().clone().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    for tensor in mine:
        rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, tensor)
        assert all(torch.equal(row, tensor) for row in rows)


def train(module: Any, steps: int = 3, first: int = 0) -> str:
    """A few steps; the fingerprint of what comes out."""
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * 64 + dist.get_rank())
        module(torch.randn(3, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return gradsync.fingerprint(module)
