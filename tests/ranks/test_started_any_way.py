"""The default group, made of what launchers other than torchrun say, or nobody."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.support.ranks import Ranks

FRONTS = pytest.mark.parametrize("front", ["replicate", "DistributedDataParallel"])


def heard() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        assert vars(record)["rank"] == dist.get_rank(), "there is a group by then"
        lines.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("gradsync").addHandler(handler)
    return lines


def train(front: str) -> tuple[int, int, float]:
    torch.manual_seed(0)
    model: Any = getattr(gradsync, front)(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    gradient = next(model.parameters()).grad[0, 0].item()
    optimizer.step()
    getattr(gradsync, front)(nn.Linear(2, 1))  # a second one says nothing more
    told = dist.get_rank(), dist.get_world_size(), gradient
    dist.destroy_process_group()
    return told


def by_plain_python(front: str) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    lines = heard()
    assert train(front) == (0, 1, 1.0)
    (line,) = lines
    assert "a world of one" in line
    assert "gradsync run --ranks N" in line


@FRONTS
def test_plain_python_is_a_world_of_one(ranks: Ranks, front: str) -> None:
    ranks(by_plain_python, 1, front, backend=None, limit=60)


def in_a_batch_script() -> None:
    """Of eight tasks, whose author has forgotten srun: as sbatch runs it."""
    os.environ.update(SLURM_PROCID="0", SLURM_NTASKS="8")
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    lines = heard()
    assert train("replicate") == (0, 1, 1.0)
    (line,) = lines
    assert "a world of one" in line
    assert "This SLURM job has 8 tasks: `srun python script.py` starts a rank in each" in line


def test_a_batch_script_without_srun_is_told_of_it(ranks: Ranks) -> None:
    ranks(in_a_batch_script, 1, backend=None, limit=60)


def by(names: tuple[str, str]) -> tuple[int, int, float]:
    for name, other in zip(("RANK", "WORLD_SIZE"), names, strict=True):
        os.environ[other] = os.environ.pop(name)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if names[0] == "SLURM_PROCID":  # the host from its list; the port is one that is free
        os.environ["SLURM_STEP_NODELIST"] = os.environ.pop("MASTER_ADDR")
    return train("replicate")


@pytest.mark.parametrize(
    "names",
    [
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ],
    ids=lambda names: names[0],
)
def test_other_launchers(ranks: Ranks, names: tuple[str, str]) -> None:
    assert ranks(by, 2, names, backend=None, limit=60) == [(0, 2, 1.5), (1, 2, 1.5)]


def with_all_cores() -> list[str]:
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(1 + (os.cpu_count() or 1))
    lines = heard()
    for _ in range(2):
        gradsync.replicate(nn.Linear(2, 1))
    return [line for line in lines if "OMP_NUM_THREADS" in line]


def test_threads_are_told_of_once(ranks: Ranks) -> None:
    if len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        pytest.skip("this process may not use all cores, as a rank that is pinned")
    first, second = ranks(with_all_cores, 2, limit=60)
    assert len(first) == 1
    assert second == []
