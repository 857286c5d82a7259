"""Ranks that are an MPI world too: started by `mpiexec`, otherwise as in `launch.py`.

MPI's processes find each other through whatever started them, so the ranks can't be started one by one as usual.
`mpiexec` hands on open files and the environment; each rank takes its part of both by its number.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradsync.cli import report
from gradsync.cli.launch import BOOT, Rank, Ranks, environment

# `mpiexec` ends with us, however we end: the death signal survives exec. Its helper ends the ranks then.
_EXEC = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execv(sys.argv[1], sys.argv[1:])"
)
_BOOT = """\
import json, os, sys
os.environ.update(json.loads(sys.argv.pop(1))[int(os.environ["PMI_RANK"])])
start = json.loads(sys.argv[1])
start["parent"] = os.getppid()
sys.argv[1] = json.dumps(start)
"""


def mpiexec() -> str | None:
    """Beside this Python first, where `pip install mpich` puts it: it must be that of the library in use."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def missing() -> str | None:
    """Why there can be no MPI world here; None if there can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install -e '.[bench]'"
    if mpiexec() is None:
        return "mpiexec was not found: pip install -e '.[bench]'"
    return None


class MpiRank(Rank):
    """`mpiexec` waits for the ranks that are left if one fails before it has started MPI: its own word counts too."""

    @property
    def status(self) -> int | None:
        return super().status if self.failed_at is None else 1


class MpiRanks(Ranks):
    """All ranks share one process here, `mpiexec`, which ends when they have; each has a pipe of its own to report."""

    def _start(self, module: str, arguments: Sequence[str], ranks: int, port: int) -> Iterator[Rank]:
        command = mpiexec()
        if command is None:
            raise FileNotFoundError("mpiexec")
        pipes = [os.pipe() for _ in range(ranks)]
        output = tempfile.TemporaryFile()  # noqa: SIM115 - each rank below gets its own handle of it
        variables = [
            {**environment(rank, ranks, port), report.FD_VARIABLE: str(writing)}
            for rank, (_, writing) in enumerate(pipes)
        ]
        start = json.dumps({"path": sys.path, "module": module})
        boot = [sys.executable, "-c", _BOOT + BOOT, json.dumps(variables), start, *arguments]
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _EXEC, command, "-n", str(ranks), *boot],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[writing for _, writing in pipes],
                start_new_session=True,
            )
        except BaseException:
            for reading, _ in pipes:
                os.close(reading)
            output.close()
            raise
        finally:
            for _, writing in pipes:
                os.close(writing)
        for rank, (reading, _) in enumerate(pipes):
            yield MpiRank(rank, process, report.Inbox(reading), os.fdopen(os.dup(output.fileno()), "rb"))
        output.close()
