"""One rank of the memory part of `python -m benchmarks sharing`: what training an MLP with AdamW takes."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.job import Told
from benchmarks.memory_rank import BATCH, proportional_bytes, return_memory_at_once
from benchmarks.models import make_mlp
from benchmarks.sharing_contenders import Training, contender, optimizer_kind
from benchmarks.together import Refused, together
from gradsync.cli.report import reporting

MODULE = "benchmarks.sharing_memory_rank"
TINY = 8  # the width of what is trained first, so that modules and libraries are loaded


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    contender: str
    width: int
    layers: int
    steps: int


def weigh(job: Job) -> int:
    """Bytes on this rank; a page that several see is divided among them. Raises `Refused` where there is none such."""
    train(job, TINY)
    before = settled()
    trained = train(job, job.width)
    after = settled()
    del trained
    return after - before


def train(job: Job, width: int) -> Training:
    def prepare() -> Training:
        return contender(job.contender).prepare(make_mlp(width, job.layers), optimizer_kind("adamw"))

    training = together(prepare)
    for _ in range(job.steps):
        training.zero_grad()
        training.module(torch.ones(BATCH, width)).sum().backward()
        training.step()
    return training


def settled() -> int:
    """When all ranks have come so far, and while none goes on: what only one has touched would be its alone."""
    gc.collect()
    dist.barrier()
    size = proportional_bytes()
    dist.barrier()
    return size


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        return_memory_at_once()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        try:
            report.send("memory", bytes=weigh(job))
        except Refused as refused:
            report.send("absent", reason=str(refused))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
