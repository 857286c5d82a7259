"""What a test left behind."""

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from gradsync.cli import kernel
from tests.support.ranks import Ranks

_FOR_GOOD = {"tqdm_monitor"}  # threads: dynamo has a progress bar where tqdm is installed, with one for the process
_OWN_VARIABLES = {"PYTEST_CURRENT_TEST"}
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Resources:
    """What this process owns at one moment: what identifies each entry, and words for people."""

    processes: Mapping[int, str]
    threads: Mapping[int | None, str]
    variables: Mapping[tuple[str, str], str]
    groups: Mapping[str, str]
    files: Mapping[Path, str]
    shared_memory: Mapping[Path, str]


def resources_in_use(ranks: Ranks) -> Resources:
    """Look around."""
    return Resources(
        processes={pid: f"{pid} ({kernel.command_line(pid)})" for pid in _processes(ranks)},
        threads={one.ident: f"{one.name} ({one.ident})" for one in threading.enumerate() if one.name not in _FOR_GOOD},
        variables={item: "=".join(item) for item in os.environ.items() if item[0] not in _OWN_VARIABLES},
        groups=_groups(),
        files=_files(ranks.folder),
        shared_memory=_shared_memory({os.getpid(), *ranks.pids}),
    )


def find_leaks(before: Resources, ranks: Ranks, patience: float = 1.0) -> list[str]:
    """What is there now and was not before. What is just ending gets `patience` seconds to do so."""
    deadline = time.monotonic() + patience
    while (leaks := _difference(before, resources_in_use(ranks))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return leaks


def _difference(before: Resources, after: Resources) -> list[str]:
    return [
        f"{field.name.replace('_', ' ')}: {words}"
        for field in fields(Resources)
        for identity, words in getattr(after, field.name).items()
        if identity not in getattr(before, field.name)
    ]


def _processes(ranks: Ranks) -> set[int]:
    """Our children and the fork server's; the fork server itself may stay."""
    pids = kernel.children(os.getpid())
    if ranks.fork_server_pid is not None:
        pids = pids - {ranks.fork_server_pid} | kernel.children(ranks.fork_server_pid)
    return pids


def _groups() -> dict[str, str]:
    """Ask only if torch.distributed is loaded: a look must not cost an import."""
    distributed = sys.modules.get("torch.distributed")
    initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return {"default": "default process group"} if initialized else {}


def _files(folder: Path | None) -> dict[Path, str]:
    """What ranks left in the TMPDIR of their run."""
    return {path: str(path) for path in folder.glob("run*/tmp/*")} if folder else {}


def _shared_memory(pids: set[int]) -> dict[Path, str]:
    """Only what carries one of our ids, as torch's segments do: others use this machine, too."""
    names = set(map(str, pids))
    return {path: str(path) for path in _SHARED_MEMORY.glob("*") if names.intersection(re.split(r"[\W_]+", path.name))}
