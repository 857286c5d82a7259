"""One fault, from the fork of its ranks to what they have left behind."""

from __future__ import annotations

import heapq
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gradsync.cli import kernel
from gradsync.cli.chaos.fault import Fault, Kind
from gradsync.cli.chaos.hosts import Host
from gradsync.cli.chaos.judge import LIMIT_IF_STUCK, promised
from gradsync.cli.chaos.outcome import Observation, Outcome
from gradsync.cli.chaos.rank import DUMP_STACKS, run_rank
from gradsync.cli.chaos.script import Meeting
from gradsync.cli.crowding import Stopwatch, crowding
from gradsync.cli.launch import reserve_port
from gradsync.cli.report import Inbox, Record, Reporter

LOCAL = "127.0.0.1"
# Beyond what is promised, and what the fault itself takes: who is not back by then has hung.
HANG_SECONDS = 15.0
# Of the process group, unless its limit is what is tried: who waits for it has hung.
_NO_LIMIT = 300.0
_PORTS = range(20_000, 30_000)  # on hosts of our own, where nobody else is
_TAIL = 6000  # characters of a rank's output


@dataclass
class Child:
    """A rank, in the process that has forked it."""

    rank: int
    pid: int
    pidfd: int
    inbox: Inbox
    go: int
    output: Path
    records: dict[str, Record] = field(default_factory=dict)
    status: int | None = None
    hung: bool = False

    def reap(self) -> None:
        """It has ended."""
        os.close(self.pidfd)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def give_up(self) -> None:
        """It hangs, and says where."""
        self.hung = True
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.pid, DUMP_STACKS)

    def outcome(self) -> Outcome:
        raised = self.records.get("raised", {})
        return Outcome(
            rank=self.rank,
            status=None if self.hung else self.status,
            finished=self.records.get("finished", {}).get("fingerprint", ""),
            error=raised.get("error", ""),
            text=raised.get("text", ""),
            blamed=tuple(raised.get("blamed", ())),
            at=raised.get("at", 0.0),
            left=tuple(self.records.get("left", {}).get("what", ())),
            output=self.output.read_text(errors="replace")[-_TAIL:] if self.output.exists() else "",
        )


class Run:
    """Forks the ranks, lets the fault happen, and waits for all to end. This process must have no threads."""

    def __init__(self, fault: Fault, hosts: Sequence[Host], number: int, folder: Path) -> None:
        self._fault = fault
        self._hosts = hosts if fault.hosts > 1 else ()
        self._folder = folder
        self._children: list[Child] = []
        self._agent = 0
        self._fault_at: float | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._selector = selectors.DefaultSelector()
        self._limit = LIMIT_IF_STUCK * crowding() if fault.kind.is_stuck else _NO_LIMIT
        self._reserved: socket.socket | None = None
        if self._hosts:
            port = _PORTS[number % len(_PORTS)]
            self._meeting = Meeting(self._hosts[0].address, port, self._hosts[0].interface)
        else:
            self._reserved = reserve_port()
            self._meeting = Meeting(LOCAL, self._reserved.getsockname()[1], "lo")

    def observe(self) -> Observation:
        began, busy = time.monotonic(), crowding()
        try:
            if not self._fault.store_in_rank_0:
                self._agent = self._start_agent()
            self._fork(0)
            if not self._fault.store_in_rank_0:
                self._fork_others()
            self._watch()
        finally:
            self._end()
        return Observation(
            outcomes=tuple(child.outcome() for child in self._children),
            fault_at=self._fault_at,
            left=tuple(self._left_behind()),
            crowding=max(busy, crowding()),
            seconds=time.monotonic() - began,
        )

    # --- processes -------------------------------------------------------------------------------

    def _start_agent(self) -> int:
        """A process that has the store, and is no rank, as torchrun's."""
        reading, writing = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _serve_store(self._meeting, self._host(0), writing, parent)
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        return pid

    def _fork(self, rank: int) -> None:
        (reading, writing), (waiting, go) = os.pipe(), os.pipe()
        output = self._folder / f"rank{rank}.out"
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            for child in self._children:  # else nobody would see the end of their pipes
                os.close(child.go)
            host, report = self._host(self._fault.host_of(rank)), Reporter(writing)
            run_rank(self._fault, rank, self._meeting, host, output, report, waiting, parent, self._limit)
        os.close(writing)
        os.close(waiting)
        child = Child(rank, pid, os.pidfd_open(pid), Inbox(reading), go, output)
        self._children.append(child)
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._read(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._reap(child))

    def _fork_others(self) -> None:
        for rank in range(1, self._fault.ranks):
            self._fork(rank)

    def _host(self, number: int) -> Host | None:
        return self._hosts[number] if self._hosts else None

    def _reap(self, child: Child) -> None:
        self._read(child)
        self._selector.unregister(child.pidfd)
        child.reap()

    def _end(self) -> None:
        """Nothing runs after this, and the network is as it was."""
        for child in self._children:
            if child.status is None:
                os.kill(child.pid, signal.SIGKILL)
                self._reap(child)
            child.inbox.close()
            os.close(child.go)
        if self._agent:
            os.kill(self._agent, signal.SIGKILL)
            os.waitpid(self._agent, 0)
        for host in self._hosts if self._fault.kind.needs_hosts else ():
            host.set_link(True)
        self._selector.close()
        if self._reserved is not None:
            self._reserved.close()

    # --- while it runs ---------------------------------------------------------------------------

    def _watch(self) -> None:
        watch = Stopwatch()
        limit = HANG_SECONDS + promised(self._fault) + self._fault.seconds + self._fault.delay
        while self._children_alive():
            for key, _ in self._selector.select(self._patience()):
                key.data()
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            if self._fault.kind.is_stuck and self._only_stuck_left():
                self._signal(self._children[self._fault.rank], signal.SIGKILL)
            if watch.seconds > limit:
                self._give_up()

    def _only_stuck_left(self) -> bool:
        alive = [child.rank for child in self._children if child.status is None]
        return len(self._children) == self._fault.ranks and alive == [self._fault.rank] and self._fault_at is not None

    def _children_alive(self) -> bool:
        return len(self._children) < self._fault.ranks or any(child.status is None for child in self._children)

    def _patience(self) -> float:
        return 0.25 if not self._due else max(0.0, min(0.25, self._due[0][0] - time.monotonic()))

    def _give_up(self) -> None:
        """Those who hang say where, and are killed."""
        alive = [child for child in self._children if child.status is None]
        for child in alive:
            child.give_up()
        time.sleep(0.5 * crowding())
        for child in alive:
            os.kill(child.pid, signal.SIGKILL)
            self._reap(child)
        self._children += [  # who was never forked, since rank 0 did not listen
            Child(rank, 0, -1, Inbox(os.open(os.devnull, os.O_RDONLY)), os.open(os.devnull, os.O_RDONLY), Path(), {}, 0)
            for rank in range(len(self._children), self._fault.ranks)
        ]

    def _read(self, child: Child) -> None:
        while records := child.inbox.read():
            for record in records:
                self._take(child, record)
        if child.inbox.ended:
            with suppress(KeyError):
                self._selector.unregister(child.inbox.fd)

    def _take(self, child: Child, record: Record) -> None:
        event = record["event"]
        child.records[event] = record
        if event == "listening":
            self._fork_others()
        elif event == "point":
            self._after(self._fault.delay, lambda: self._act(child))
        elif event == "fault":
            self._fault_at = record["at"]
            if self._fault.kind is Kind.STOP:
                self._after(self._fault.seconds, lambda: self._signal(child, signal.SIGCONT))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, len(self._due), action))

    # --- the fault, where the rank does not do it itself -------------------------------------------

    def _act(self, child: Child) -> None:
        kind = self._fault.kind
        if kind is Kind.KILL:
            self._signal(child, signal.SIGKILL)
        elif kind is Kind.HALT:
            self._signal(child, signal.SIGSTOP)
        elif kind is Kind.STOP:
            self._signal(child, signal.SIGSTOP)
            self._after(self._fault.seconds, lambda: self._signal(child, signal.SIGCONT))
        else:
            host = self._hosts[self._fault.host_of(child.rank)]
            host.set_link(False)
            if kind is Kind.FLAP:
                self._after(self._fault.seconds, lambda: host.set_link(True))
        self._fault_at = time.monotonic()
        with suppress(BrokenPipeError):
            os.write(child.go, b"g")

    def _signal(self, child: Child, number: signal.Signals) -> None:
        if child.status is None:
            os.kill(child.pid, number)

    # --- afterwards -------------------------------------------------------------------------------

    def _left_behind(self) -> list[str]:
        processes = [f"process {pid} ({kernel.command_line(pid)})" for pid in kernel.children(os.getpid())]
        ours = {child.output for child in self._children}
        return [*processes, *(f"file {path.name}" for path in self._folder.iterdir() if path not in ours)]


def run(fault: Fault, hosts: Sequence[Host], number: int) -> Observation:
    """`number`: how many this process has run."""
    # Not a `TemporaryDirectory`: ranks end as Python does, and would remove it.
    folder = Path(tempfile.mkdtemp(prefix="gradsync-chaos-"))
    try:
        return Run(fault, hosts, number, folder).observe()
    finally:
        shutil.rmtree(folder)


def _serve_store(meeting: Meeting, host: Host | None, ready: int, parent: int) -> NoReturn:
    try:
        kernel.die_with(parent)
        if host is not None:
            host.enter()
        store: Any = meeting.store(is_master=True)
        os.write(ready, b"r")
        while store is not None:
            signal.pause()
    finally:
        os._exit(70)
