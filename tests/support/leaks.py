"""What a test left behind."""

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tests.support import kernel
from tests.support.ranks import Ranks

_OWN_VARIABLES = {"PYTEST_CURRENT_TEST"}
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Belongings:
    """What this process owns at one moment; each entry by a name that a person can act on."""

    processes: frozenset[str]
    threads: frozenset[str]
    variables: frozenset[str]
    groups: frozenset[str]
    files: frozenset[str]
    shared_memory: frozenset[str]


def belongings(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> Belongings:
    """Look around."""
    return Belongings(
        processes=_processes(ranks),
        threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
        variables=frozenset(f"{name}={environ[name]}" for name in environ if name not in _OWN_VARIABLES),
        groups=_groups(),
        files=_files(ranks.folder),
        shared_memory=_shared_memory({os.getpid(), *ranks.pids}),
    )


def find_leaks(before: Belongings, ranks: Ranks, patience: float = 1.0) -> list[str]:
    """What is there now and was not before. What is just ending gets `patience` seconds to do so."""
    deadline = time.monotonic() + patience
    while (leaks := _difference(before, belongings(ranks))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return leaks


def _difference(before: Belongings, after: Belongings) -> list[str]:
    return [
        f"{field.name.replace('_', ' ')}: {entry}"
        for field in fields(Belongings)
        for entry in sorted(getattr(after, field.name) - getattr(before, field.name))
    ]


def _processes(ranks: Ranks) -> frozenset[str]:
    """Our children and the zygote's; the zygote itself may stay."""
    pids = kernel.children(os.getpid())
    if ranks.zygote_pid is not None:
        pids = pids - {ranks.zygote_pid} | kernel.children(ranks.zygote_pid)
    return frozenset(f"{pid} ({kernel.command_line(pid)})" for pid in pids)


def _groups() -> frozenset[str]:
    """Ask only if torch.distributed is loaded: a look must not cost an import."""
    distributed = sys.modules.get("torch.distributed")
    initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return frozenset({"default process group"} if initialized else ())


def _files(folder: Path | None) -> frozenset[str]:
    """What ranks left in the TMPDIR of their run."""
    return frozenset(str(path) for path in folder.glob("run*/tmp/*")) if folder else frozenset()


def _shared_memory(pids: set[int]) -> frozenset[str]:
    """Only what carries one of our ids: others use this machine, too."""
    return frozenset(
        str(path) for path in _SHARED_MEMORY.glob("*") if pids & set(map(int, re.findall(r"\d+", path.name)))
    )
