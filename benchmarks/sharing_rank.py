"""One rank of `python -m benchmarks sharing`: whole training steps with one optimizer, contender by contender.

As in `step_rank`, all contenders live in the same process and take turns. A step is what a user waits for: zero_grad,
forward, backward with its synchronization, and the optimizer; where that steps in backward, forward and backward.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import field
from benchmarks.agreement import CHANGE_TOLERANCE, Changes, Difference
from benchmarks.job import Told
from benchmarks.models import Batch, Model, model
from benchmarks.sharing_contenders import (
    NO_COMMUNICATION,
    ONE_PROCESS,
    TORCH,
    Contender,
    OptimizerKind,
    contender,
    is_here,
    optimizer_kind,
    threads,
)
from gradsync.cli.report import reporting

MODULE = "benchmarks.sharing_rank"
WARM_UP = 3
# For a step of the single process. Its threads wait for each other in every operation: where other work has the cores,
# a step takes a hundred times as long.
LONGEST = 5.0
LIMIT = timedelta(seconds=180)


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    model: str
    optimizer: str
    contenders: list[str]  # torch's DDP is always among them: the others' parameters must be its
    repetitions: int


class Entrant:
    """A contender with its module and optimizer, on ranks that compute with it."""

    def __init__(self, contender: Contender, model: Model, kind: OptimizerKind, batch: Batch) -> None:
        self.key = contender.key
        self._threads = threads(dist.get_world_size()) if contender.is_alone else 1
        self._loss, self._batch = model.loss, batch
        self._plain = make(model)
        self._training = contender.prepare(self._plain, kind)

    def step(self) -> None:
        training = self._training
        if self._threads > 1:
            torch.set_num_threads(self._threads)
        training.zero_grad()
        self._loss(training.module, self._batch).backward()
        training.step()
        if self._threads > 1:
            torch.set_num_threads(1)

    def measure(self) -> float:
        """Seconds. The ranks start together; what that takes is not part of it."""
        dist.barrier()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._plain.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._plain.named_parameters() if p.grad is not None}


class Elsewhere:
    """A contender that computes on another rank."""

    def __init__(self, contender: Contender) -> None:
        self.key = contender.key

    def measure(self) -> float:
        """A step takes as long as on the slowest rank, which this is not."""
        dist.barrier()
        return 0.0


def make(model: Model) -> nn.Module:
    """The same on all ranks, and for all contenders."""
    torch.manual_seed(0)
    return model.make()


class Field(field.Field["Entrant | Elsewhere"]):
    """`batch`: of this rank."""

    def __init__(self, contenders: Sequence[Contender], model: Model, kind: OptimizerKind, batch: Batch) -> None:
        super().__init__()
        together = _of_all_ranks(batch)
        for one in contenders:
            self.admit(one.key, partial(_warm, one, model, kind, together if one.is_alone else batch))
        if TORCH.key in self.absent:
            raise RuntimeError(f"nothing to compare with: {TORCH.name} is absent: {self.absent[TORCH.key]}")
        start = make(model)
        self.parameters = sum(parameter.numel() for parameter in start.parameters())
        self._compare(dict(start.named_parameters()), any(True for _ in start.buffers()))

    def _compare(self, start: dict[str, nn.Parameter], has_buffers: bool) -> None:
        """All have begun with the same parameters: after the same steps they must have come to those of torch's DDP.

        Not a single process with all batches where the model has statistics of its batches.
        """
        reference = self.entrant(TORCH.key)
        assert isinstance(reference, Entrant)
        with torch.no_grad():
            changes = Changes(start, reference.parameters(), reference.gradients())
            self.judge(
                {
                    entrant.key: changes.difference(entrant.parameters())
                    if isinstance(entrant, Entrant)
                    else Difference("", 0.0, "change", CHANGE_TOLERANCE)
                    for entrant in self.entrants
                    if entrant.key not in (TORCH.key, NO_COMMUNICATION.key)
                    if not (has_buffers and entrant.key == ONE_PROCESS.key)
                }
            )


def _of_all_ranks(batch: Batch) -> Batch:
    inputs, targets = ([torch.empty_like(part) for _ in range(dist.get_world_size())] for part in batch)
    dist.all_gather(inputs, batch[0])
    dist.all_gather(targets, batch[1])
    return torch.cat(inputs), torch.cat(targets)


def _warm(contender: Contender, model: Model, kind: OptimizerKind, batch: Batch) -> Entrant | Elsewhere:
    if not is_here(contender):
        return Elsewhere(contender)
    entrant = Entrant(contender, model, kind, batch)
    for _ in range(WARM_UP):
        began = time.perf_counter()
        entrant.step()
        seconds = time.perf_counter() - began
        if contender.is_alone and seconds > LONGEST:
            raise TimeoutError(f"a step took {seconds:.0f} s: other work has the cores for which its threads wait")
    return entrant


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=LIMIT)
        chosen = model(job.model)
        batch = chosen.batch(torch.Generator().manual_seed(dist.get_rank()))
        contenders = [contender(key) for key in job.contenders]
        entered = Field(contenders, chosen, optimizer_kind(job.optimizer), batch)
        report.send("field", parameters=entered.parameters, absent=entered.absent, wrong=entered.wrong)
        entered.compete(job.repetitions, report)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
