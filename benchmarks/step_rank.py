"""One rank of `python -m benchmarks step`: whole training steps, contender by contender.

All contenders live in the same process and take turns step by step, in an order that changes with each repetition,
the same on all ranks. Each has a module and an optimizer of its own, warmed up before anything is measured.
A step is what a user waits for: zero_grad, forward, backward with its synchronization, and the optimizer (SGD).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import field
from benchmarks.agreement import Difference, difference
from benchmarks.contenders import PLAIN, TORCH, Contender, contender
from benchmarks.job import Told
from benchmarks.models import Batch, Model, model
from gradsync.cli.report import reporting

MODULE = "benchmarks.step_rank"
WARM_UP = 3  # torch arranges its buckets anew after the first step, gradsync learns in it
LEARNING_RATE = 1e-3
LIMIT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    model: str
    contenders: list[str]  # torch's DDP with its defaults is always among them: the others' gradients must be its
    repetitions: int


class Entrant:
    """A contender with its module and optimizer."""

    def __init__(self, contender: Contender, model: Model, batch: Batch) -> None:
        self.key = contender.key
        self._loss, self._batch = model.loss, batch
        torch.manual_seed(0)
        plain = model.make()
        # Before the wrapper: replicate_with_fsdp puts other parameters in the place of these.
        self._names = [name for name, _ in plain.named_parameters()]
        prepared = contender.wrap(plain)
        self._plain, self._module, self._finish = plain, prepared.module, prepared.finish
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss(self._module, self._batch).backward()
        self._finish()
        self._optimizer.step()

    def measure(self) -> float:
        """Seconds. The ranks start together; what that takes is not part of it."""
        dist.barrier()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def parameters(self) -> list[Tensor]:
        """As plain tensors, in an order that is the same for all contenders."""
        return [_local(self._plain.get_parameter(name).detach()) for name in self._names]

    def gradients(self) -> dict[str, Tensor]:
        found = {name: self._plain.get_parameter(name).grad for name in self._names}
        return {name: torch.zeros(0) if grad is None else _local(grad.detach()) for name, grad in found.items()}


def _local(tensor: Tensor) -> Tensor:
    """A DTensor's own part, which for replicas is all of it."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


class Field(field.Field[Entrant]):
    def __init__(self, contenders: Sequence[Contender], model: Model, batch: Batch) -> None:
        super().__init__()
        for one in contenders:
            self.admit(one.key, partial(_warm, one, model, batch))
        self._compare()

    def _compare(self) -> None:
        """From the same parameters each contender must come to the gradients of torch's DDP; else it isn't measured."""
        if TORCH.key in self.absent:
            raise RuntimeError(f"nothing to compare with: {TORCH.name} is absent: {self.absent[TORCH.key]}")
        reference = self.entrant(TORCH.key)
        start = [parameter.clone() for parameter in reference.parameters()]
        differences: dict[str, Difference] = {}
        expected: dict[str, Tensor] = {}
        for entrant in (reference, *(e for e in self.entrants if e.key not in (TORCH.key, PLAIN.key))):
            with torch.no_grad():
                torch._foreach_copy_(entrant.parameters(), start)
            entrant.step()
            if entrant is reference:
                expected = {name: gradient.clone() for name, gradient in entrant.gradients().items()}
            else:
                differences[entrant.key] = difference(expected, entrant.gradients())
        self.judge(differences)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.entrants[0].parameters())


def _warm(contender: Contender, model: Model, batch: Batch) -> Entrant:
    entrant = Entrant(contender, model, batch)
    for _ in range(WARM_UP):
        entrant.step()
    return entrant


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=LIMIT)
        chosen = model(job.model)
        batch = chosen.batch(torch.Generator().manual_seed(dist.get_rank()))
        entered = Field([contender(key) for key in job.contenders], chosen, batch)
        report.send("field", parameters=entered.parameters, absent=entered.absent, wrong=entered.wrong)
        entered.compete(job.repetitions, report)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
