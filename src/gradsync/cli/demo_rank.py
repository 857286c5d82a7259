"""One rank of the demo. The line that makes it data parallel is `gradsync.replicate(model)`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from gradsync.cli import text
from gradsync.cli.gpt import GPT, Shape, generate, next_character_loss
from gradsync.cli.report import Reporter, reporting

MODULE = "gradsync.cli.demo_rank"
VALIDATION_WINDOWS = 128
SAMPLE_PROMPT = "def "
SAMPLE_LENGTH = 220

J = TypeVar("J", bound="Job")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank is told; the same for all, and enough to repeat the run."""

    ranks: int
    steps: int
    seed: int
    folder: str
    batch: int
    context: int
    layers: int
    heads: int
    width: int
    learning_rate: float

    @property
    def shape(self) -> Shape:
        return Shape(
            vocabulary=text.VOCABULARY,
            context=self.context,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.ranks * self.batch * self.context

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[J], line: str) -> J:
        return cls(**json.loads(line))


def learning_rate(job: Job, step: int) -> float:
    """Linear warm-up over a twentieth of the run, then half a cosine down to a twentieth of the peak."""
    warm = min(1.0, (step + 1) / max(1, job.steps // 20))
    cosine = 0.5 * (1 + math.cos(math.pi * step / job.steps))
    return job.learning_rate * min(warm, 0.05 + 0.95 * cosine)


def validates_after(step: int, steps: int) -> bool:
    """Ten times in a run, the last time after the last step. `step` counts from 1."""
    return step * 10 // steps != (step - 1) * 10 // steps


def train(job: Job, rank: int, report: Reporter) -> None:
    data = text.load(Path(job.folder))
    torch.manual_seed(job.seed + rank)  # replicas begin different on purpose: replicate() makes them equal
    model = GPT(job.shape)
    gradsync.replicate(model)

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + rank)  # each rank its own batches
    held_out = validation_windows(data.validation, job, rank)
    report.send("ready", parameters=sum(p.numel() for p in model.parameters()), characters=len(data.training))

    for step in range(1, job.steps + 1):
        began, waited = time.perf_counter(), gradsync.statistics(model).waited_seconds
        set_learning_rate(optimizer, learning_rate(job, step - 1))
        batch = text.random_windows(data.training, batch=job.batch, length=job.context + 1, generator=generator)
        loss = next_character_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report.send(
            "step",
            step=step,
            loss=loss.item(),
            seconds=time.perf_counter() - began,
            waited=gradsync.statistics(model).waited_seconds - waited,
        )
        if validates_after(step, job.steps):
            report.send("validation", step=step, loss=evaluate(model, held_out, job.batch))

    report.send("fingerprint", value=gradsync.fingerprint(model))
    if rank == 0:
        report.send("sample", text=sample(model, job.seed))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def validation_windows(held_out: Tensor, job: Job, rank: int) -> Tensor:
    """This rank's share of the held-out windows, which are the same in every run."""
    count = max(VALIDATION_WINDOWS, job.ranks) // job.ranks * job.ranks  # equal shares: the mean of means is the mean
    starts = torch.linspace(0, len(held_out) - job.context - 1, count).long()
    return text.windows(held_out, starts[rank :: job.ranks], job.context + 1)


@torch.no_grad()
def evaluate(model: GPT, held_out: Tensor, batch: int) -> float:
    total = sum(next_character_loss(model, part).item() * len(part) for part in held_out.split(batch))
    return total / len(held_out)


def sample(model: GPT, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return text.decode(generate(model, text.encode(SAMPLE_PROMPT), SAMPLE_LENGTH, generator=generator))


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        rank = int(os.environ["RANK"])
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        train(job, rank, report)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
