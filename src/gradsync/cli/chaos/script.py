"""The training that is disturbed: a small script as users write it, which says where it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync._torch import TCPStore
from gradsync.cli.chaos.fault import Fault, Phase

EXPLAIN_AFTER = 0.3  # so that waits are explained here, too
_EVALUATIONS = 5


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one training find each other."""

    address: str
    port: int
    interface: str

    def store(self, is_master: bool) -> TCPStore:
        return TCPStore(self.address, self.port, is_master=is_master, wait_for_workers=False)


class Script:
    """One rank's."""

    def __init__(self, fault: Fault, rank: int, reach: Callable[..., None]) -> None:
        """`reach(phase, step, bucket, after)` is told of each place."""
        self._fault, self._rank, self._reach = fault, rank, reach
        self._step = self._arrived = 0

    def join(self, store: TCPStore, limit: float) -> None:
        os.environ["GRADSYNC_EXPLAIN_AFTER"] = str(EXPLAIN_AFTER)
        torch.set_num_threads(1)
        timeout = timedelta(seconds=limit)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._fault.ranks, timeout=timeout)
        dist.barrier()  # the promises begin when there is a group

    def train(self) -> str:
        """The fingerprint of what comes out."""
        torch.manual_seed(self._rank)  # replicas begin different on purpose
        plain = self._build()
        self._reach(Phase.CONSTRUCTION, 0)
        replica: Any = self._replicate(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: self._at(Phase.STEP))
        for step in range(self._fault.steps):
            self._step = step
            self._at(Phase.LOADING)
            self._train_step(replica, optimizer)
            self._evaluate(replica)
        return gradsync.fingerprint(plain)

    def _train_step(self, replica: Any, optimizer: torch.optim.Optimizer) -> None:
        replica.train()
        optimizer.zero_grad()
        self._arrived = 0
        replica(self._batch()).square().mean().backward()
        optimizer.step()

    def _evaluate(self, replica: Any) -> None:
        replica.eval()
        with torch.no_grad():
            for _ in range(_EVALUATIONS):
                replica(self._batch())

    def _replicate(self, plain: nn.Module) -> Any:
        """A bucket for each parameter. What is told before and after replicating surrounds the bucket's departure."""
        for parameter in plain.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self._bucket(after=False))
        front = getattr(gradsync, self._fault.front)
        replica = front(plain, transport=self._fault.transport, bucket_cap_mb=1e-6)
        for parameter in plain.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self._bucket(after=True))
        return replica

    def _bucket(self, after: bool) -> None:
        self._reach(Phase.BACKWARD, self._step, self._arrived, after)
        self._arrived += after

    def _at(self, phase: Phase) -> None:
        self._reach(phase, self._step)

    def _build(self) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(8, 8), nn.BatchNorm1d(8)]
        for _ in range(2):
            layers += [_Place(self._at), nn.Linear(8, 8), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(8, 2))

    def _batch(self) -> Tensor:
        """Each rank's own."""
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(self._step * 64 + self._rank))


class _Place(nn.Module):
    """In the middle of forward."""

    def __init__(self, at: Callable[[Phase], None]) -> None:
        super().__init__()
        self._at = at

    def forward(self, x: Tensor) -> Tensor:
        self._at(Phase.FORWARD if self.training else Phase.EVALUATION)
        return x
