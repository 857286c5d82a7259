"""Modules that lie on two devices of a process, where autograd has a thread for each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.accelerator.test_streams import here, train
from tests.ranks.small import FRONTS
from tests.support import accelerator
from tests.support.accelerator.ranks import on_accelerator


class Spread(nn.Module):
    """As many branches on each device, so that both threads have gradients at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.head = nn.Linear(6, 2)

    def spread(self) -> Spread:
        first, second = (f"{accelerator.NAME}:{2 * dist.get_rank() + number}" for number in range(2))
        for number, branch in enumerate(self.branches):
            branch.to((first, second)[number % 2])
        self.trunk.to(first)
        self.head.to(second)
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(x))
        every = [branch(x.to(next(branch.parameters()).device)) for branch in self.branches]
        return self.head(sum(one.to(next(self.head.parameters()).device) for one in every))


@FRONTS
@on_accelerator(2, apart=False)
def test_a_module_on_two_devices(front: str) -> None:
    torch.manual_seed(0)
    torch.accelerator.set_device_index(2 * dist.get_rank())
    train(front, Spread().spread(), here, here)


@FRONTS
@on_accelerator(2)
def test_the_host_does_not_wait_in_backward(front: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).to(torch.accelerator.current_accelerator())
    waits: list[int] = []
    handles = [p.register_hook(lambda gradient: waits.append(accelerator.waits_of_host())) for p in module.parameters()]
    train(front, module, here, here)
    for handle in handles:
        handle.remove()
    many = len(handles)
    for step in range(len(waits) // many):
        assert len(set(waits[step * many : (step + 1) * many])) == 1, waits
