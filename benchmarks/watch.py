"""`python -m benchmarks watch`: what the watch between ranks costs."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

import gradsync
from benchmarks.models import model

VARIABLE = "GRADSYNC_WATCH"
THREAD = "gradsync-watch"


def watch(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    repetitions: int = typer.Option(200, min=2, help="Pairs of steps."),
) -> None:
    """Steps of the GPT with the watch and without it, in turns: the median ratio, and what its thread takes."""
    for transport in ("shared_memory", "process_group"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(run_rank, (ranks, port, transport, repetitions), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]


def run_rank(rank: int, ranks: int, port: int, transport: Any, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    contenders = [make(transport, flag) for flag in ("1", "0")]
    for step in range(4):
        for contender in contenders:
            train(contender, step)
    on_cpu, began = thread_seconds(), time.monotonic()
    mine, on_core = [], []
    for step in range(repetitions):
        times, cores = [0.0, 0.0], [0.0, 0.0]
        for which in (0, 1) if step % 2 else (1, 0):
            times[which], cores[which] = train(contenders[which], step)
        mine.append(times)
        on_core.append(cores[0] / cores[1])
    share = (thread_seconds() - on_cpu) / (time.monotonic() - began)
    of_all: list[Any] = [None] * ranks
    dist.all_gather_object(of_all, mine)
    if rank == 0:
        slowest = [[max(times) for times in zip(*pair, strict=True)] for pair in zip(*of_all, strict=True)]
        ratios = [with_it / without for with_it, without in slowest]
        print(  # noqa: T201
            f"{transport}, {ranks} ranks, {repetitions} pairs: with / without: time {figure(ratios)}, the training "
            f"thread's time on a core {figure(on_core)}; the watch's thread is on a core for {share:.4%} of the time",
            flush=True,
        )
    dist.barrier()


def figure(ratios: list[float]) -> str:
    """The median, and how far it may be off, if they were normal."""
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.4f} ± {1.25 * (upper - lower) / 1.35 / len(ratios) ** 0.5:.4f}"


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
