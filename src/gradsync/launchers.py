"""What the environment says of this process: which rank it is, of how many, and where they meet.

torchrun's variables are torch's own. SLURM's `srun` and the launchers of MPI have others, of which the same is made
here. A script that was started by plain `python` has none: a world of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gradsync.errors import NoProcessGroupError

# What `init_process_group` needs of the environment; torchrun sets all of them.
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# (what it is called, rank, number of ranks, ranks on this host). SLURM's are those of a step: a batch script that runs
# Python without srun has a SLURM_PROCID as well, and is alone.
LAUNCHERS = (
    ("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
# A descriptor: the line to the launcher of an elastic training.
ELASTIC = "GRADSYNC_ELASTIC_LINE"
_PORTS = 15000, 10000  # the first that a SLURM job may have, and how many there are


@dataclass(frozen=True)
class World:
    """Ranks that are to meet at `host:port`; without a host there is one only."""

    rank: int
    size: int
    host: str = ""
    port: int = 0


def describe(environment: Mapping[str, str]) -> World | None:
    """What a launcher other than torchrun says; None if it was torchrun, or somebody who sets the same."""
    missing = [name for name in TORCHRUN if name not in environment]
    if not missing:
        return None
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        for launcher, rank, size, _ in LAUNCHERS:
            if rank in environment and size in environment:
                return _world(launcher, int(environment[rank]), int(environment[size]), environment)
            if environment.get(rank, "0") != "0":  # nobody's first: it would train alone, beside others who do
                raise NoProcessGroupError(
                    f"rank {environment[rank]}: {launcher} started this process, but does not say among how many "
                    f"({size} not set). Set {size} on all ranks, or what torchrun sets: {', '.join(TORCHRUN)}."
                )
        return World(0, 1)
    raise NoProcessGroupError(
        "Default process group has not been initialized, and the environment describes none "
        f"({', '.join(missing)} not set). Start the script with `torchrun --nproc-per-node=N script.py`, "
        "or call torch.distributed.init_process_group(...) first."
    )


def is_elastic(environment: Mapping[str, str]) -> bool:
    """Whether it was `gradsync run --elastic`, which tells each rank as it goes with whom it trains."""
    return ELASTIC in environment


def how_to_start_more(environment: Mapping[str, str]) -> str:
    """What to do for more ranks than one."""
    tasks = environment.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        return f"This SLURM job has {tasks} tasks: `srun python script.py` starts a rank in each"
    return "For N ranks on this machine: gradsync run --ranks N script.py"


def rank(environment: Mapping[str, str], otherwise: int) -> int:
    """Which one this process is, as far as a launcher says."""
    for name in ("RANK", *(launcher[1] for launcher in LAUNCHERS)):
        if (told := environment.get(name, "")).isdigit():
            return int(told)
    return otherwise


def ranks_here(environment: Mapping[str, str], size: int) -> int:
    """How many ranks this host has, as far as a launcher says: 1 if it doesn't."""
    if (told := environment.get("LOCAL_WORLD_SIZE", "")).isdigit():
        return int(told)
    for *_, local in LAUNCHERS:
        if match := re.match(r"\d+", environment.get(local, "")):  # SLURM's: 4(x2),3
            return int(match[0])
    return size if environment.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1") else 1


def too_many_threads(environment: Mapping[str, str], size: int, threads: int) -> str:
    """What to say if the ranks of this host have more threads than it has cores; "" if not."""
    ranks, cores = ranks_here(environment, size), os.cpu_count() or 1
    pinned = len(os.sched_getaffinity(0)) < cores  # each to cores of its own
    if "OMP_NUM_THREADS" in environment or pinned or ranks < 2 or ranks * threads <= cores:
        return ""
    cure = max(1, cores // ranks)
    return (
        f"each of the {ranks} ranks on this host computes with {threads} threads, but it has {cores} cores: they slow "
        f"each other down. Set OMP_NUM_THREADS={cure}, or call torch.set_num_threads({cure})."
    )


def _world(launcher: str, rank: int, size: int, environment: Mapping[str, str]) -> World:
    if size == 1:
        return World(0, 1)
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if launcher == "SLURM":
        host = host or first_host(environment.get("SLURM_STEP_NODELIST", ""))
        job = environment.get("SLURM_JOB_ID", "")
        port = port or (str(_PORTS[0] + int(job) % _PORTS[1]) if job.isdigit() else "")
    absent = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if absent:
        raise NoProcessGroupError(
            f"rank {rank}: {launcher} started {size} ranks, but does not say where they meet "
            f"({', '.join(absent)} not set). On all ranks, set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a "
            "port that is free there, such as 29500."
        )
    return World(rank, size, host, int(port))


def first_host(nodes: str) -> str:
    """Of a list as SLURM writes it: `gpu[003-007,9],login` begins with gpu003."""
    match = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\])?([^,\[\]]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""
