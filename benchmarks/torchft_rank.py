"""One replica of the same training by torchft, as its own example does it: a store, a manager and a gloo group each."""

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
    module = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, plain)
    a_rank = job.shards // job.ranks  # it does not cut a step anew: who is missing, its batches are
    while True:
        optimizer.zero_grad()
        step = manager.current_step()
        losses = []
        with module.no_sync():
            for shard in range(a_rank - 1):
                loss = next_character_loss(module, data.of(step, number * a_rank + shard)) / a_rank
                loss.backward()
                losses.append(loss.item())
        loss = next_character_loss(module, data.of(step, number * a_rank + a_rank - 1)) / a_rank
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if manager.current_step() > step:
            who = {"pid": os.getpid(), "rank": number, "ranks": manager.num_participants()}
            report.send("step", at=time.monotonic(), step=manager.current_step() - 1, loss=sum(losses), **who)
        else:  # it was not committed
            report.send("lost", at=time.monotonic(), pid=os.getpid())


def main() -> None:
    with reporting() as report:
        kernel.die_with(os.getppid())
        torch.set_num_threads(1)
        train(Job.from_json(sys.argv[1]), int(os.environ["RANK"]), report)


if __name__ == "__main__":
    main()
