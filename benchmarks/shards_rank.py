"""One rank of `python -m benchmarks shards`: steps by shards, and steps that accumulate as many batches, in turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from benchmarks.job import Told
from benchmarks.models import MODELS, Batch, Model
from gradsync.cli.report import Reporter, reporting

MODULE = "benchmarks.shards_rank"
WARM_UP = 3
Train = Callable[[list[Batch]], None]


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    transport: str
    repetitions: int
    shards_a_rank: int


def measure(job: Job, report: Reporter) -> None:
    """One model after the other, as five with two optimizers each would fill the memory."""
    for chosen in MODELS:
        contenders = by_shards(chosen, job), accumulating(chosen, job)
        for step in range(-WARM_UP, job.repetitions):
            batches = [
                chosen.batch(torch.Generator().manual_seed((step + WARM_UP) * 64 + dist.get_rank() * 8 + shard))
                for shard in range(job.shards_a_rank)
            ]
            times = [0.0, 0.0]
            for which in (0, 1) if step % 2 else (1, 0):
                dist.barrier()
                began = time.perf_counter()
                contenders[which](batches)
                times[which] = time.perf_counter() - began
            if step >= 0:
                report.send("pair", model=chosen.key, times=times)
    dist.barrier()


def make(chosen: Model, job: Job) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    transport: Any = job.transport
    module: nn.Module = gradsync.replicate(chosen.make(), transport=transport)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4)


def by_shards(chosen: Model, job: Job) -> Train:
    module, optimizer = make(chosen, job)
    shards = gradsync.Shards(module, job.shards_a_rank * dist.get_world_size())

    def train(batches: list[Batch]) -> None:
        optimizer.zero_grad()
        for batch in shards.each(batches):
            chosen.loss(module, batch).backward()
        optimizer.step()

    return train


def accumulating(chosen: Model, job: Job) -> Train:
    """As one does without shards: the last backward synchronizes, and each loss is divided."""
    module, optimizer = make(chosen, job)

    def train(batches: list[Batch]) -> None:
        optimizer.zero_grad()
        with module.no_sync():
            for batch in batches[:-1]:
                (chosen.loss(module, batch) / len(batches)).backward()
        (chosen.loss(module, batches[-1]) / len(batches)).backward()
        optimizer.step()

    return train


def main() -> None:
    with reporting() as report:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        measure(Job.from_json(sys.argv[1]), report)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
