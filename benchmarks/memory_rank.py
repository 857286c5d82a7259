"""One rank of the memory part of `python -m benchmarks footprint`: the peak while one contender trains an MLP."""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.contenders import Prepared, contender
from benchmarks.job import Told
from benchmarks.models import make_mlp
from benchmarks.together import Refused, together
from gradsync.cli.report import reporting

MODULE = "benchmarks.memory_rank"
BATCH = 4
MIB = 1024 * 1024
M_MMAP_THRESHOLD = -3  # malloc.h


@dataclass(frozen=True, kw_only=True)
class Job(Told):
    """What every rank is told."""

    contender: str
    width: int
    layers: int
    steps: int


class Peaks(NamedTuple):
    """In MiB."""

    start: float  # construction and first steps, in which buckets are made
    steady: float  # the steps after them
    proportional: float  # after a backward, a page that several ranks see divided among them
    parameters: int


def weigh(job: Job) -> Peaks:
    """Trains for a while, twice. Raises `Refused` where there is no such contender."""
    forget_peak()
    prepared = together(lambda: contender(job.contender).wrap(make_mlp(job.width, job.layers)))
    optimizer = torch.optim.SGD(prepared.module.parameters(), lr=1e-3)
    start, _ = train(prepared, optimizer, job)
    steady, proportional = train(prepared, optimizer, job)
    return Peaks(start, steady, proportional, sum(p.numel() for p in prepared.module.parameters()))


def train(prepared: Prepared, optimizer: torch.optim.Optimizer, job: Job) -> tuple[float, float]:
    """The peak, which is forgotten, and the proportional size; in MiB."""
    for _ in range(job.steps):
        optimizer.zero_grad(set_to_none=True)
        prepared.module(torch.ones(BATCH, job.width)).sum().backward()
        prepared.finish()
        optimizer.step()
    dist.barrier()  # else what a peer has not mapped yet would be ours alone
    peak, proportional = peak_bytes() / MIB, proportional_bytes() / MIB
    dist.barrier()
    forget_peak()
    return peak, proportional


def return_memory_at_once() -> None:
    """Makes glibc map each block of 1 MiB or more by itself, and unmap it when it is freed.

    By default it keeps freed memory for later, which blurs a peak by up to 100 MiB from run to run.
    """
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    except (OSError, AttributeError):  # another C library
        return


def forget_peak() -> None:
    """From here on a new peak is recorded (5: reset the high water mark); not all kernels allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """The largest resident size so far. `VmHWM` follows `forget_peak`, `ru_maxrss` does not."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def proportional_bytes() -> int:
    """Where the kernel doesn't tell, nothing is known to be shared."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return peak_bytes()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    with reporting() as report:
        job = Job.from_json(sys.argv[1])
        return_memory_at_once()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        try:
            report.send("peak", **weigh(job)._asdict())
        except Refused as refused:
            report.send("absent", reason=str(refused))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
