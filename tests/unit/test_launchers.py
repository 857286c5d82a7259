"""What launchers say in the environment, as a pure function of it."""

from __future__ import annotations

import os

import pytest

from gradsync.errors import NoProcessGroupError
from gradsync.launchers import World, describe, first_host, ranks_here, too_many_threads

SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}
AT = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World(0, 1)),
        (AT, World(0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", **AT}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **AT, **SLURM}, None),  # torchrun under srun
        ({**SLURM, **AT}, World(3, 8, "head", 29500)),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[03-07],x", "SLURM_JOB_ID": "1230042"}, World(3, 8, "gpu03", 15042)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World(0, 1)),  # a batch script without srun is alone
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", **AT}, World(1, 4, "head", 29500)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, World(0, 1)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", **AT}, World(2, 4, "head", 29500)),
    ],
)
def test_worlds(environment: dict[str, str], world: World | None) -> None:
    assert describe(environment) == world


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0"}, r"WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set.*torchrun"),
        ({"WORLD_SIZE": "2", **SLURM}, r"RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, r"rank 2: MPI started 4 ranks.*MASTER_ADDR, MASTER_PORT not set.*29500"),
        (SLURM, r"rank 3: SLURM started 8 ranks"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, r"rank 3: SLURM started .*SLURM_STEP_NUM_TASKS not set"),
    ],
)
def test_half_a_description_is_an_error(environment: dict[str, str], said: str) -> None:
    with pytest.raises(NoProcessGroupError, match=said):
        describe(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[003,7],z", "n003"), ("r1n[5-6]-ib", "r1n5-ib"), ("", "")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MASTER_ADDR": "127.0.0.1"}, 6),
        ({"MASTER_ADDR": "elsewhere"}, 1),
        ({}, 1),
    ],
)
def test_ranks_of_this_host(environment: dict[str, str], ranks: int) -> None:
    assert ranks_here(environment, 6) == ranks


def test_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    two = {"LOCAL_WORLD_SIZE": "2"}
    said = too_many_threads(two, 2, 8)
    assert "each of the 2 ranks on this host computes with 8 threads, but it has 8 cores" in said
    assert "OMP_NUM_THREADS=4" in said
    assert not too_many_threads(two, 2, 4)
    assert not too_many_threads({**two, "OMP_NUM_THREADS": "8"}, 2, 8)
    assert not too_many_threads({}, 2, 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert not too_many_threads(two, 2, 8)
