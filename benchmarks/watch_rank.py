"""One rank of `python -m benchmarks watch`: steps with the watch and without it, in turns."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradsync
from benchmarks.job import Told
from benchmarks.models import model
from gradsync.cli.report import Reporter, reporting

MODULE = "benchmarks.watch_rank"
VARIABLE = "GRADSYNC_WATCH"
THREAD = "gradsync-watch"
WARM_UP = 4


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    transport: str
    repetitions: int


def measure(job: Job, report: Reporter) -> None:
    contenders = [make(job.transport, flag) for flag in ("1", "0")]
    for step in range(WARM_UP):
        for contender in contenders:
            train(contender, step)
    on_cpu, began = thread_seconds(), time.monotonic()
    for step in range(job.repetitions):
        times, cores = [0.0, 0.0], [0.0, 0.0]
        for which in (0, 1) if step % 2 else (1, 0):
            times[which], cores[which] = train(contenders[which], step)
        share = (thread_seconds() - on_cpu) / (time.monotonic() - began)
        report.send("pair", times=times, cores=cores, share=share)
    dist.barrier()


def make(transport: Any, flag: str) -> Any:
    os.environ[VARIABLE] = flag
    torch.manual_seed(0)
    module = gradsync.replicate(model("gpt").make(), transport=transport)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4)


def train(contender: Any, step: int) -> tuple[float, float]:
    """How long it took, and how long this thread was on a core."""
    module, optimizer = contender
    chosen = model("gpt")
    batch = chosen.batch(torch.Generator().manual_seed(step * 16 + dist.get_rank()))
    dist.barrier()
    began, on_core = time.perf_counter(), time.thread_time()
    optimizer.zero_grad()
    chosen.loss(module, batch).backward()
    optimizer.step()
    return time.perf_counter() - began, time.thread_time() - on_core


def thread_seconds() -> float:
    """How long the watch's threads have been on a core."""
    ids = [one.native_id for one in threading.enumerate() if one.name == THREAD]
    return sum(int(Path(f"/proc/self/task/{one}/schedstat").read_text().split()[0]) for one in ids) / 1e9


def main() -> None:
    with reporting() as report:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        measure(Job.from_json(sys.argv[1]), report)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
