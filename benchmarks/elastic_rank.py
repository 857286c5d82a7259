"""One rank of `python -m benchmarks elastic`: trains the GPT until it is killed, and tells of each step."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import gradsync
from benchmarks.job import Told
from benchmarks.models import GPT_SHAPE
from gradsync.cli import launched, text
from gradsync.cli.gpt import GPT, next_character_loss
from gradsync.cli.report import Reporter, reporting

MODULE = "benchmarks.elastic_rank"
BATCH = 4  # windows in each shard, as in the other benchmarks
ENDLESS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    shards: int
    layers: int


def make_model(job: Job) -> GPT:
    torch.manual_seed(0)
    return GPT(dataclasses.replace(GPT_SHAPE, layers=job.layers))


class Batches:
    """Of text, so that there is something to learn; which ones depends on step and shard alone."""

    def __init__(self) -> None:
        self._characters = text.load(text.stdlib()).training

    def of(self, step: int, shard: int) -> Tensor:
        generator = torch.Generator().manual_seed(step * 1024 + shard)
        return text.random_windows(self._characters, batch=BATCH, length=GPT_SHAPE.context + 1, generator=generator)


def train(job: Job, folder: Path, report: Reporter) -> None:
    data = Batches()
    model = gradsync.replicate(make_model(job))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = gradsync.Elastic(model, optimizer, shards=job.shards, checkpoint=folder / "elastic.pt")
    report.send("ready", pid=os.getpid(), at=time.monotonic())

    def batches(step: int) -> list[Tensor]:
        return [data.of(step, shard) for shard in training.shards.mine]

    for step in training.steps(batches, steps=ENDLESS):
        began, losses = time.monotonic(), []
        with step:
            for batch in step:
                loss = next_character_loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if training.step > step.number:
            who = {"pid": os.getpid(), "rank": training.rank, "ranks": training.ranks, "began": began}
            report.send("step", at=time.monotonic(), step=step.number, loss=sum(losses) / len(losses), **who)
        else:
            report.send("lost", at=time.monotonic(), pid=os.getpid())


def main() -> None:
    with reporting() as report:
        folder = launched.begin_rank()
        torch.set_num_threads(1)
        train(Job.from_json(sys.argv[1]), folder, report)


if __name__ == "__main__":
    main()
