"""How the facts of all ranks come to one place: by trying on this machine, or through the store of a job."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync import launchers, restarts
from gradsync.cli.doctor import machine
from gradsync.cli.doctor.attempts import Trials
from gradsync.cli.doctor.facts import COME, Attempt, Facts, Job
from gradsync.errors import NoProcessGroupError

HERE = "127.0.0.1"
_FACTS, _GO, _ATTEMPT = "gradsync/doctor/facts/", "gradsync/doctor/go", "gradsync/doctor/attempt/"
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_LATER = 15.0  # seconds, for others to tell that they have waited too long
_NAP = 0.05
Heard = Callable[[Job], None]


class Unreachable(Exception):
    """Rank 0, from this one; the text says so, with the cure."""


def launched(environment: Mapping[str, str]) -> tuple[launchers.World | None, str]:
    """Which rank of which job this process is, or None; and what is wrong with what the launcher says."""
    try:
        world = launchers.describe(environment)
        if world is None:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            return launchers.World(rank, size, environment["MASTER_ADDR"], int(environment["MASTER_PORT"])), ""
    except NoProcessGroupError as error:
        return None, _in_other_words(str(error), environment)
    except ValueError as error:
        return None, f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}. Start the ranks with torchrun"
    return (world if world.size > 1 else None), ""


def _in_other_words(text: str, environment: Mapping[str, str]) -> str:
    there = [name for name in launchers.TORCHRUN if name in environment]
    if not {"RANK", "WORLD_SIZE"} & set(there):
        return text
    absent = [name for name in launchers.TORCHRUN if name not in environment]
    return f"{', '.join(there)} set, but not {', '.join(absent)}. Start the ranks with torchrun, or unset the first"


def on_this_machine(ranks: int, limit: float, problem: str, hear: Heard) -> Job:
    """With ranks of the doctor's own. `hear`: is told what is known so far."""
    facts = {rank: machine.look(rank) for rank in range(ranks)}
    hear(Job(size=ranks, limit=limit, facts=facts, launcher_problem=problem))
    store: Any = dist.TCPStore(HERE, 0, None, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    attempts = _try({rank: _variables(rank, ranks, ranks, HERE, store.port) for rank in range(ranks)}, limit)
    meeting = f"{HERE}:{store.port}"
    return Job(size=ranks, limit=limit, meeting=meeting, facts=facts, attempts=attempts, launcher_problem=problem)


def in_a_job(world: launchers.World, limit: float, hear: Heard) -> Job | None:
    """As one rank of it. Rank 0 gets to know of all; the others get None. Raises `Unreachable`."""
    store = _store(world, limit)
    mine = machine.look(world.rank)
    store.set(f"{_FACTS}{world.rank}", mine.to_json())
    if world.rank == 0:
        return _as_first(world, store, limit, hear)
    try:
        if not _await(store, [_GO], limit + _LATER) and store.get(_GO) == b"yes":
            store.set(f"{_ATTEMPT}{world.rank}", _try_one(world, limit).to_json())
    except RuntimeError:
        raise Unreachable(f"rank {world.rank}: rank 0 has ended meanwhile. See what it says, or its launcher") from None
    return None


def _as_first(world: launchers.World, store: Any, limit: float, hear: Heard) -> Job:
    _await(store, [f"{_FACTS}{rank}" for rank in range(world.size)], limit)
    facts = {rank: Facts.from_json(text) for rank, text in _read(store, _FACTS, world.size).items()}
    meeting = f"{world.host}:{world.port}"
    job = Job(size=world.size, limit=limit, is_launched=True, meeting=meeting, facts=facts)
    hear(job)
    store.set(_GO, "no" if job.missing else "yes")
    if job.missing:
        return job
    store.set(f"{_ATTEMPT}0", _try_one(world, limit).to_json())
    _await(store, [f"{_ATTEMPT}{rank}" for rank in range(world.size)], limit + _LATER)
    heard = {rank: Attempt.from_json(text) for rank, text in _read(store, _ATTEMPT, world.size).items()}
    attempts = {rank: heard.get(rank, Attempt(stage=COME)) for rank in range(world.size)}
    return Job(size=world.size, limit=limit, is_launched=True, meeting=meeting, facts=facts, attempts=attempts)


def _try_one(world: launchers.World, limit: float) -> Attempt:
    here = launchers.ranks_here(os.environ, world.size)
    return _try({world.rank: _variables(world.rank, world.size, here, world.host, world.port)}, limit)[world.rank]


def _try(variables: Mapping[int, Mapping[str, str]], limit: float) -> dict[int, Attempt]:
    try:
        with Trials(variables, limit) as trials:
            return trials.listen()
    except OSError as error:  # no more files, processes or memory
        said = f"its process can't be started: {error.strerror or error}"
        return dict.fromkeys(variables, Attempt(stage=COME, error=said))


def _store(world: launchers.World, limit: float) -> Any:
    """torchrun's, or one in rank 0's process; in which nobody waits for anybody else."""
    hosts_it = world.rank == 0 and os.environ.get(_AGENT) != "True"
    try:
        if not hosts_it:
            _reach(world.host, world.port, limit)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            world.host, world.port, None, hosts_it, timedelta(seconds=limit), wait_for_workers=False
        )
    except (RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:300].rstrip(".")
        cure = (
            f"Is port {world.port} in use? Set another MASTER_PORT on all ranks."
            if hosts_it
            else "Is rank 0 started, is MASTER_ADDR an address of its host, does a firewall let this host through?"
        )
        raise Unreachable(f"rank {world.rank}: can't meet at {world.host}:{world.port}: {said}. {cure}") from None
    return restarts.apart(store)


def _reach(host: str, port: int, limit: float) -> None:
    """Before torch's own attempt, which can't be interrupted, and fails with pages of its sources."""
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{error.strerror or error}, for {limit:g} s") from None
            time.sleep(_NAP)
        else:
            return


def _variables(rank: int, size: int, size_here: int, host: str, port: int) -> dict[str, str]:
    """As torchrun's. Not more: the trial shall find what a training finds."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size_here),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _await(store: Any, keys: list[str], seconds: float) -> list[str]:
    """Those that nobody has set within so many seconds. By looking: the store's own wait can't be interrupted."""
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_NAP)
    return [key for key in keys if not store.check([key])]


def _read(store: Any, prefix: str, size: int) -> dict[int, str]:
    return {rank: store.get(f"{prefix}{rank}").decode() for rank in range(size) if store.check([f"{prefix}{rank}"])}


def complain(error: Unreachable) -> None:
    sys.stderr.write(f"gradsync doctor: {error}\n")
