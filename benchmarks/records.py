"""`python -m benchmarks records`: what it costs that each round is recorded, of which statistics are made."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from torch import Tensor, nn

import gradsync
from benchmarks.models import model
from benchmarks.watch import figure
from gradsync.engine import backward_rounds, flights, step
from gradsync.engine import round as rounds
from gradsync.events import RoundClosed

BUCKETS, WIDTH = 9, 16  # of the small model: as many as the GPT has
SMALL_ROUNDS = 10  # for each of the GPT's


def records(
    ranks: int = typer.Option(2, min=2, help="Processes, each with one thread."),
    repetitions: int = typer.Option(200, min=2, help="Pairs of steps."),
) -> None:
    """Steps with all records and without any, in turns: of the GPT as a ratio, of a small model in microseconds."""
    for transport in ("shared_memory", "process_group"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(run_rank, (ranks, port, transport, repetitions), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]


class Nothing:
    """Takes the place of what records: a round's record, a stopwatch. Any call does nothing."""

    forward_at = 0.0
    _closed = RoundClosed(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, (), 0, (), False, False)

    def __init__(self, *_: object) -> None: ...

    def nothing(self, *_: object) -> None: ...

    bucket_ready = bucket_launched = bucket_reduced = bucket_delivered = backward_ended = nothing
    forward_begins = forward_ended = optimizer_stepped = take = nothing

    def closed(self, *_: object) -> RoundClosed:
        return self._closed


_INSIDE = contextlib.nullcontext()


def _notice_nothing(_: object) -> None: ...


def _not_ranged(*_: object) -> contextlib.AbstractContextManager[None]:
    return _INSIDE


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, nobody reads a clock for rounds, asks for profilers, or looks whether buckets are back."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(rounds, "RoundRecord", Nothing))
        stack.enter_context(mock.patch.object(flights.Flights, "take_noticed", _notice_nothing))
        for file in (backward_rounds, flights, rounds, step):
            stack.enter_context(mock.patch.object(file, "ranged", _not_ranged))
        yield


class Contender:
    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor], is_recorded: bool, **options: Any):
        self._module: Any = gradsync.replicate(module, **options)
        self._loss, self._is_recorded = loss, is_recorded
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-4)
        if not is_recorded:
            engine: Any = self._module._engine
            engine._recorders.clear()
            engine.stopwatch = Nothing()

    def train(self, batch: Any) -> tuple[float, float]:
        """How long it took, and how long this thread was on a core."""
        with contextlib.nullcontext() if self._is_recorded else unrecorded():
            dist.barrier()
            began, on_core = time.perf_counter(), time.thread_time()
            self._optimizer.zero_grad()
            self._loss(self._module, batch).backward()
            self._optimizer.step()
            return time.perf_counter() - began, time.thread_time() - on_core


def run_rank(rank: int, ranks: int, port: int, transport: Any, repetitions: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    gpt = model("gpt")
    batches = [gpt.batch(torch.Generator().manual_seed(number * 16 + rank)) for number in range(repetitions)]
    pairs = compete([Contender(gpt.make(), gpt.loss, flag, transport=transport) for flag in (True, False)], batches)
    ratios = [with_it / without for (with_it, _), (without, _) in slowest(pairs)]
    on_core = [with_it / without for (_, with_it), (_, without) in pairs]

    small = [
        Contender(small_model(), small_loss, flag, transport=transport, bucket_cap_mb=0.0001) for flag in (True, False)
    ]
    pairs = compete(small, [torch.ones(1, WIDTH)] * repetitions * SMALL_ROUNDS)
    microseconds = [1e6 * (with_it - without) for (_, with_it), (_, without) in pairs]
    if rank == 0:
        print(  # noqa: T201
            f"{transport}, {ranks} ranks, {repetitions} pairs: with / without: time {figure(ratios)}, the training "
            f"thread's time on a core {figure(on_core)}; a round of {BUCKETS} buckets: "
            f"{statistics.median(microseconds):.0f} µs of that thread's time",
            flush=True,
        )
    dist.barrier()


Pair = list[tuple[float, float]]


def compete(contenders: list[Contender], batches: list[Any]) -> list[Pair]:
    """Both times of each, in turns; the first few steps, in which buckets are planned, don't count."""
    for batch in batches[:4]:
        for contender in contenders:
            contender.train(batch)
    pairs = []
    for number, batch in enumerate(batches):
        pair = [(0.0, 0.0)] * 2
        for which in (0, 1) if number % 2 else (1, 0):
            pair[which] = contenders[which].train(batch)
        pairs.append(pair)
    return pairs


def slowest(pairs: list[Pair]) -> list[Pair]:
    """A step takes as long as it does on the slowest rank."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, pairs)
    return [[max(of_ranks) for of_ranks in zip(*pair, strict=True)] for pair in zip(*of_all, strict=True)]


def small_model() -> nn.Module:
    """A bucket a layer, in which there is next to nothing to compute."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)))


def small_loss(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(batch).sum()
    return loss
