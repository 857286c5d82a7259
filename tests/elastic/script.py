"""The training that the proof disturbs: started by `gradsync run --elastic`, or by itself for the truth.

Each rank writes a line for each step that it has finished: what its model is then, and which samples it has seen in it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from typing import Any

from tests.elastic.fault import Phase
from tests.elastic.planted import STEPS, Planted

faulthandler.register(signal.SIGUSR2)
planted = Planted()
if planted.is_again:
    planted.happens(Phase.JOINING, part=0)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import gradsync  # noqa: E402
from gradsync.elastic import training as elastic  # noqa: E402
from gradsync.elastic import world  # noqa: E402
from gradsync.elastic.state import State  # noqa: E402

SHARDS, BATCH, SAMPLES = 8, 4, 148  # five steps an epoch, the last one not whole


def here(phase: Phase, part: int = 0) -> None:
    """A place where something may be planned."""
    epoch = training._epoch.number if training._epoch is not None else 0
    planted.happens(phase, part=part, step=training.step, ranks=training.ranks, epoch=epoch)


class Stepped(torch.optim.AdamW):
    """Has two groups of parameters, and may end between them."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        if group is self.param_groups[1]:
            here(Phase.OPTIMIZER)
        return super()._init_group(group, *lists)


class Watched(State):
    """May end while it is sent."""

    def send(self, transport: Any, source: int, takes: bool) -> Any:
        broadcast, sent = transport.broadcast, 0

        def send_one(*arguments: Any) -> None:
            nonlocal sent
            broadcast(*arguments)
            planted.happens(Phase.TRANSFER, part=min(sent, 1))  # head, or the first tensors
            sent += 1

        transport.broadcast = send_one
        try:
            return super().send(transport, source, takes)
        finally:
            del transport.broadcast
            planted.happens(Phase.TRANSFER, part=2)


def begin(number: int, *arguments: Any) -> Any:
    """An epoch."""
    planted.happens(Phase.MEETING, part=0, epoch=number)
    planted.happens(Phase.MEETING, part=1, epoch=number)  # a little later
    made = _begin(number, *arguments)
    planted.happens(Phase.MEETING, part=2, epoch=number)
    return made


_begin = world.begin
vars(world)["begin"], vars(elastic)["State"] = begin, Watched

torch.manual_seed(0)
x = torch.randn(SAMPLES, 16)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
middle = nn.Linear(64, 64)
model: nn.Module = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), middle, nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1)
)
model = gradsync.replicate(model, bucket_cap_mb=0.01)
first, *rest = model.parameters()
groups: list[dict[str, Any]] = [{"params": [first]}, {"params": rest, "lr": 2e-3}]
optimizer = Stepped(groups, lr=4e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20)

if planted.is_again:
    planted.happens(Phase.JOINING, part=1)
training = gradsync.Elastic(
    model, optimizer, schedule, shards=SHARDS, seed=1, checkpoint=planted.folder / "checkpoint.pt"
)
resumed = training.resume()
if planted.is_again:
    planted.happens(Phase.JOINING, part=2)
shard = 0


def in_shard(phase: Phase) -> None:
    """In the first or the last one."""
    if shard in (0, len(training.shards.mine) - 1):
        here(phase, part=int(shard > 0))


middle.register_forward_hook(lambda *_: in_shard(Phase.FORWARD))
middle.weight.register_hook(lambda _: in_shard(Phase.BACKWARD))
loader = gradsync.data.Loader(data, training.shards, batch_size=BATCH)
a_time = len(loader)
number = -1
for step in training.steps(loader, epochs=-(-int(os.environ[STEPS]) // a_time)):
    if training._epoch is not None and training._epoch.number != number:
        number = training._epoch.number
        planted.epoch_begins(training.step)
    planted.pace(training.ranks)
    here(Phase.BETWEEN)
    began = time.monotonic()
    with step:
        here(Phase.BEGIN)
        samples, rank, ranks = [], training.rank, training.ranks
        for shard, (inputs, targets, numbers) in enumerate(step):  # noqa: B007 (hooks look at it)
            samples.append(numbers.tolist())
            nn.functional.mse_loss(model(inputs), targets).backward()
        here(Phase.REDUCED)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        here(Phase.STEPPED)
        optimizer.zero_grad()
        schedule.step()
    if training.step == step.number:
        continue  # it is made again
    ended = time.monotonic()
    planted.record(
        step=step.number,
        at=ended,
        took=ended - began,
        epoch=max(number, 0),
        rank=rank,
        ranks=ranks,
        samples=samples,
        stepped=int(optimizer.state[first]["step"]),
        fingerprint=gradsync.fingerprint(model),
    )
planted.record(
    end=True,
    at=time.monotonic(),
    steps=training.step,
    resumed=resumed,
    rank=training.rank,
    fingerprint=gradsync.fingerprint(model),
)
