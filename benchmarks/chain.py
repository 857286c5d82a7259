"""What is trained to see the cost of each parameter: many tiny ones, next to no arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PER_BLOCK = 10
WIDTH = 8


class Block(nn.Module):
    """Ten parameters and two cheap nodes of autograd, so that what is added for each parameter shows."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(PER_BLOCK):
            self.register_parameter(f"scale{number}", nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat([p for p in self._parameters.values() if p is not None])


def make_chain(parameters: int) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(parameters // PER_BLOCK)))


def chain_input() -> Tensor:
    return torch.ones(PER_BLOCK * WIDTH)
