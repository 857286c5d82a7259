"""One replica of the same training by torchft: a store, a manager and a gloo group each, as its own example has them.

Gradients are averaged as one tensor, by its manager. Its DistributedDataParallel (0.2.0) would send them while it
computes, but raises an AssertionError on those who are left when one is lost.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import elastic_rank
from benchmarks.elastic_rank import Batches, make_model
from gradsync.cli import kernel
from gradsync.cli.gpt import next_character_loss
from gradsync.cli.report import Reporter, reporting

MODULE = "benchmarks.torchft_rank"


@dataclass(frozen=True, kw_only=True)
class Job(elastic_rank.Job):
    ranks: int
    lighthouse: str
    """Its address, which all replicas ask who is there."""


def train(job: Job, number: int, report: Reporter) -> None:
    torchft: Any = importlib.import_module("torchft")
    data = Batches()
    model = make_model(job)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    report.send("ready", pid=os.getpid(), at=time.monotonic())
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=job.ranks - 1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"rank{number}_",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=job.lighthouse,
        hostname="localhost",
    )
    optimizer = torchft.Optimizer(manager, plain)
    a_rank = job.shards // job.ranks  # it does not cut a step anew: who is missing, its batches are
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        step = manager.current_step()
        losses = []
        for shard in range(number * a_rank, (number + 1) * a_rank):
            loss = next_character_loss(model, data.of(step, shard)) / a_rank
            loss.backward()
            losses.append(loss.item())
        average(model, manager)
        optimizer.step()
        if manager.current_step() > step:
            who = {"pid": os.getpid(), "rank": number, "ranks": manager.num_participants(), "began": began}
            report.send("step", at=time.monotonic(), step=manager.current_step() - 1, loss=sum(losses), **who)
        else:  # it was not committed
            report.send("lost", at=time.monotonic(), pid=os.getpid())


def average(model: nn.Module, manager: Any) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def main() -> None:
    with reporting() as report:
        kernel.die_with(os.getppid())
        torch.set_num_threads(1)
        train(Job.from_json(sys.argv[1]), int(os.environ["RANK"]), report)


if __name__ == "__main__":
    main()
