"""A replica that is trained until somebody says that the ranks have diverged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.errors import ReplicaDivergedError
from tests.ranks.small import batch, build, make

NAMES = [name for name, _ in build().named_parameters()]


@dataclass
class Training:
    """One replica and its optimizer; `odd` on the rank that is about to do something else than the others."""

    replica: Any
    module: nn.Module
    optimizer: Any
    odd: bool = False
    rank: int = field(default_factory=dist.get_rank)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.replica(batch(self.rank, step)).square().mean().backward()

    def parameter(self, name: str = "2.bias") -> nn.Parameter:
        return self.module.get_parameter(name)


def train(front: str, module: nn.Module | None = None, odd: int = 1, **options: Any) -> Training:
    module = build() if module is None else module
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    return Training(replica, module, optimizer, dist.get_rank() == odd)


@dataclass(frozen=True)
class Alarm:
    """What a rank was told, and in which round."""

    round: int
    ranks: list[int]
    parameters: list[str]
    text: str


def alarm(error: ReplicaDivergedError, step: int) -> Alarm:
    return Alarm(step, sorted(error.ranks), list(error.parameters), str(error))


def until_alarm(training: Training, rounds: int, at: int, change: Callable[[Training], None] | None) -> Alarm | None:
    """Trains; in round `at`, what happens after backward is left to `change`. Its first alarm, if any."""
    for step in range(rounds):
        try:
            training.backward(step)
        except ReplicaDivergedError as error:
            return alarm(error, step)
        if step == at and change is not None:
            change(training)
        else:
            training.optimizer.step()
    return None


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Changes one bit of one element, in memory as it is."""
    size = tensor.element_size()
    start = (element % tensor.numel()) * size
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    flat[start + bit // 8 % size] ^= 1 << bit % 8


def data_replaced(training: Training) -> None:
    training.optimizer.step()
    if training.odd:
        training.parameter().data = training.parameter().data + 1


def another_learning_rate(training: Training) -> None:
    if training.odd:
        training.optimizer.param_groups[0]["lr"] *= 1.01
    training.optimizer.step()


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
