"""One rank of `python -m benchmarks records`: steps with all records and without any, in turns."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from benchmarks.job import Told
from benchmarks.models import model
from gradsync.cli.report import Reporter, reporting
from gradsync.engine import backward_rounds, flights, step
from gradsync.engine import round as rounds
from gradsync.events import RoundClosed

MODULE = "benchmarks.records_rank"
BUCKETS, WIDTH = 9, 16  # of the small model: as many as the GPT has
SMALL_ROUNDS = 10  # for each of the GPT's
WARM_UP = 4  # buckets are planned in the first


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    transport: str
    repetitions: int


def measure(job: Job, report: Reporter) -> None:
    """A pair of the GPT's steps, and some of the small model's, at a time."""
    gpt, transport = model("gpt"), job.transport
    large = [Contender(gpt.make(), gpt.loss, flag, transport=transport) for flag in (True, False)]
    small = [
        Contender(small_model(), small_loss, flag, transport=transport, bucket_cap_mb=0.0001) for flag in (True, False)
    ]
    few = torch.ones(1, WIDTH)
    for number in range(WARM_UP):
        compete(large, number, gpt.batch(torch.Generator().manual_seed(dist.get_rank())))
        compete(small, number, few)
    for number in range(job.repetitions):
        batch = gpt.batch(torch.Generator().manual_seed(number * 16 + dist.get_rank()))
        (time_with, core_with), (time_without, core_without) = compete(large, number, batch)
        pairs = [compete(small, number * SMALL_ROUNDS + at, few) for at in range(SMALL_ROUNDS)]
        report.send(
            "pair",
            times=[time_with, time_without],
            cores=[core_with, core_without],
            microseconds=[1e6 * (with_it - without) for (_, with_it), (_, without) in pairs],
        )
    dist.barrier()


def compete(contenders: Sequence[Contender], number: int, batch: Any) -> list[tuple[float, float]]:
    """Both times of each, in turns."""
    pair = [(0.0, 0.0)] * 2
    for which in (0, 1) if number % 2 else (1, 0):
        pair[which] = contenders[which].train(batch)
    return pair


def small_model() -> nn.Module:
    """A bucket a layer, in which there is next to nothing to compute."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)))


def small_loss(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(batch).sum()
    return loss


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


def main() -> None:
    with reporting() as report:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        measure(Job.from_json(sys.argv[1]), report)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
