"""Two models, each trained in a thread of its own on every rank: in which order their rounds come differs by rank."""

from __future__ import annotations

import copy
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from tests.ranks.small import FRONTS, TRANSPORTS, make, same_everywhere
from tests.support.ranks import on_ranks

WIDTHS = [(6, 6), (8, 5), (6, 6), (5, 8), (6, 6)]  # of the two models; equal shapes are easily mixed up
STEPS = 6


def model(width: int) -> nn.Module:
    """With buffers, which also travel in each round."""
    layers = (nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 2))
    return nn.Sequential(*layers).double()


def batch(number: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed((step * 2 + number) * 16 + dist.get_rank())
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def train(replica: Any, number: int, hurry: random.Random | None = None) -> None:
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if hurry is not None:
            time.sleep(hurry.random() * 3e-3)
        optimizer.zero_grad()
        replica(batch(number, step)).square().mean().backward()
        optimizer.step()


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_two_models_in_two_threads(front: str, transport: str) -> None:
    """All replicas are made in the main thread."""
    torch.manual_seed(0)
    for repetition, widths in enumerate(WIDTHS):
        modules = [model(width) for width in widths]
        others = copy.deepcopy(modules)
        together, in_turn = ([make(front, one, transport=transport) for one in some] for some in (modules, others))
        for number, replica in enumerate(in_turn):
            train(replica, number)
        begin = threading.Barrier(2)

        def run(number: int, repetition: int, together: list[Any], begin: threading.Barrier) -> None:
            begin.wait()
            train(together[number], number, random.Random(repetition * 4 + dist.get_rank() * 2 + number))

        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(run, number, repetition, together, begin) for number in range(2)]:
                future.result()
        for found, wanted in zip(modules, others, strict=True):
            torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=1e-12, atol=1e-12)
            same_everywhere(found)
        assert all(gradsync.statistics(replica).overlapped_buckets > 1 for replica in together)
