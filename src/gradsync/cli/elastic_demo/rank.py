"""One rank of `gradsync demo --elastic`. Any may be killed at any time; nothing here knows of it."""

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
from gradsync.cli import demo_rank, launched, text
from gradsync.cli.gpt import GPT, next_character_loss
from gradsync.cli.report import PATH_VARIABLE, Reporter, reporting

MODULE = "gradsync.cli.elastic_demo.rank"


@dataclass(frozen=True, kw_only=True)
class Job(demo_rank.Job):
    """`ranks`: how many there are when nobody is missing. `batch`: of each shard."""

    shards: int
    kills: int
    """The rank that is killed."""
    kills_after: int
    """The step."""
    pause: float = 0.0
    """Seconds behind each step while a rank is missing, so that there are steps left when another one has come."""

    @property
    def tokens_per_step(self) -> int:
        return self.shards * self.batch * self.context


class Windows:
    """Windows of the text, as many as there are samples in all steps."""

    def __init__(self, characters: Tensor, job: Job) -> None:
        self._characters, self._length = characters, job.context + 1
        generator = torch.Generator().manual_seed(job.seed)
        wanted = job.steps * job.shards * job.batch
        self._starts = torch.randint(len(characters) - self._length, (wanted,), generator=generator)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Tensor:
        start = int(self._starts[number])
        return self._characters[start : start + self._length].long()


def train(job: Job, folder: Path, report: Reporter) -> None:
    data = text.load(Path(job.folder))
    torch.manual_seed(job.seed)
    model = GPT(job.shape)
    gradsync.replicate(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: demo_rank.learning_rate(job, step) / job.learning_rate
    )
    training = gradsync.Elastic(
        model, optimizer, schedule, shards=job.shards, seed=job.seed, checkpoint=folder / "elastic.pt"
    )
    loader = gradsync.data.Loader(Windows(data.training, job), training.shards, batch_size=job.batch)
    who = {"pid": os.getpid()}
    report.send("ready", **who, at=time.monotonic(), parameters=sum(p.numel() for p in model.parameters()))

    for step in training.steps(loader, epochs=1):
        began, waited = time.perf_counter(), gradsync.statistics(model).waited_seconds
        with step:
            losses = []
            for batch in step:
                loss = next_character_loss(model, batch)
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            report.send(
                "step",
                **who,
                rank=training.rank,
                ranks=training.ranks,
                step=step.number + 1,
                shard=training.shards.mine.start,
                losses=losses,
                seconds=time.perf_counter() - began,
                waited=gradsync.statistics(model).waited_seconds - waited,
                at=time.monotonic(),
            )
        if training.ranks < job.ranks:
            time.sleep(job.pause)

    report.send("fingerprint", rank=training.rank, value=gradsync.fingerprint(model))
    if training.rank == 0:
        held_out = demo_rank.validation_windows(data.validation, dataclasses.replace(job, ranks=1), rank=0)
        report.send("validation", step=training.step, loss=demo_rank.evaluate(model, held_out, job.batch))
        report.send("sample", text=demo_rank.sample(model, job.seed))


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        folder = launched.begin_rank() if PATH_VARIABLE in os.environ else Path()
        torch.set_num_threads(1)
        train(job, folder, report)


if __name__ == "__main__":
    main()
