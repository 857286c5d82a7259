"""Ranks as processes on this machine: start them, listen to them, stop them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import IO, NamedTuple, TypeVar

from gradsync.cli import report

POLL_SECONDS = 0.1
# Between the first sign of a failure and the verdict: a killed rank and the peers which lose their
# connection to it are noticed in any order.
VERDICT_SECONDS = 0.5
STOP_SECONDS = 2.0
TAIL_LINES = 12

# Run by `python -c` in each rank, before anything else is imported.
#  - The import path is the parent's: `python -m` would put the current folder first, and a `random.py`
#    lying there would be imported instead of Python's own.
#  - PR_SET_PDEATHSIG (1): the kernel ends the rank when the parent ends, however it ends. If the parent
#    was gone before the call, nobody will tell: compare its id.
BOOT = """\
import json, sys
start = json.loads(sys.argv.pop(1))
sys.path[:] = start["path"]
import ctypes, os, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == start["parent"]:
    runpy.run_module(start["module"], run_name="__main__", alter_sys=True)
"""


class Report(NamedTuple):
    rank: int
    record: report.Record


class RankFailed(Exception):
    """A rank ended with an error. `str` says which, how, and its last words."""

    def __init__(self, rank: int, status: int, words: str) -> None:
        self.rank = rank
        self.status = status
        self.words = words
        super().__init__(f"rank {rank} {describe_status(status)}")


def describe_status(status: int) -> str:
    """A return code in words; `subprocess` writes a signal as a negative number."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


@dataclass
class Rank:
    """One process; owns its inbox and the file with its output."""

    number: int
    process: subprocess.Popen[bytes]
    inbox: report.Inbox
    output: IO[bytes]
    failed_at: float | None = None  # by its own account, on the shared monotonic clock

    def read(self) -> Iterator[Report]:
        for record in self.inbox.read():
            if record["event"] == report.FAILED:
                self.failed_at = record["at"]
            else:
                yield Report(self.number, record)

    def drain(self) -> Iterator[Report]:
        """What is left in the pipe of a rank that has ended. Not "until the pipe ends": a process which the
        rank left behind may still hold it."""
        while reports := list(self.read()):
            yield from reports

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def failure(self) -> RankFailed:
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()
        return RankFailed(self.number, self.status or 0, "\n".join(lines[-TAIL_LINES:]))

    def signal(self, number: signal.Signals) -> None:
        """To the rank's whole session, so that processes it started (data loaders) go with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        self.inbox.close()
        self.output.close()


R = TypeVar("R", bound="Ranks")


class Ranks:
    """The ranks of one run, as a context: none is alive after it."""

    def __init__(self, module: str, arguments: Sequence[str], *, ranks: int) -> None:
        self._ranks: list[Rank] = []
        self._port = reserve_port()
        try:
            for rank in self._start(module, arguments, ranks, self._port.getsockname()[1]):
                self._ranks.append(rank)
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, arguments: Sequence[str], ranks: int, port: int) -> Iterator[Rank]:
        """One by one, so that those started before a failure are known. Another launcher overrides this."""
        for rank in range(ranks):
            yield start_rank(rank, environment(rank, ranks, port), module, arguments)

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.stop()
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        self._port.close()

    def reports(self) -> Iterator[Report]:
        """What the ranks say, in the order of arrival, until all have ended well. Raises `RankFailed`."""
        while not all(rank.status == 0 for rank in self._ranks):
            for rank in self._ready():
                yield from rank.read()
            if any(rank.status for rank in self._ranks):
                raise self._verdict()
        for rank in self._ranks:
            yield from rank.drain()

    def _ready(self) -> list[Rank]:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                if not rank.inbox.ended:
                    selector.register(rank.inbox.fd, selectors.EVENT_READ, rank)
            return [key.data for key, _ in selector.select(POLL_SECONDS)]

    def _verdict(self) -> RankFailed:
        """The rank that failed first: one ended by a signal, else the first by its own account."""
        time.sleep(VERDICT_SECONDS)
        for rank in self._ranks:
            list(rank.drain())
        failed = [rank for rank in self._ranks if rank.status]
        return min(failed, key=_guilt).failure()

    def stop(self) -> None:
        """End the ranks that are alive: politely, and after `STOP_SECONDS` for certain."""
        for rank in self._ranks:
            rank.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.signal(signal.SIGKILL)
                rank.process.wait()


def _guilt(rank: Rank) -> tuple[bool, float]:
    killed = (rank.status or 0) < 0
    return (not killed, rank.failed_at if rank.failed_at is not None else float("inf"))


def start_rank(
    rank: int, variables: Mapping[str, str], module: str, arguments: Sequence[str], inside: Sequence[str] = ()
) -> Rank:
    """`inside`: a command that runs another one in its place, as `ip netns exec NAME` does."""
    start = json.dumps({"path": sys.path, "parent": os.getpid(), "module": module})
    # A file, not a pipe: nobody has to keep it from filling up. Closed by `Rank.close`.
    output = tempfile.TemporaryFile()  # noqa: SIM115
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [*inside, sys.executable, "-c", BOOT, start, *arguments],
            env={**os.environ, **variables, report.FD_VARIABLE: str(writing)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[writing],
            start_new_session=True,  # the terminal's Ctrl-C is for the parent alone
        )
    except BaseException:
        os.close(reading)
        output.close()
        raise
    finally:
        os.close(writing)
    return Rank(rank, process, report.Inbox(reading), output)


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # a host name that doesn't resolve is no reason to fail here
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
    }


def cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def reserve_port() -> socket.socket:
    """A port which nobody else is given while the returned socket is open.

    Both it and rank 0's store set SO_REUSEADDR, so the store can still listen on the port: two sockets may
    share one as long as at most one listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise `KeyboardInterrupt`, once: a second Ctrl-C must not interrupt the cleaning up,
    which is short and ends for certain."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
