"""`gradsync run --elastic`: what runs on each host, beside its ranks, until training is over."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from gradsync._torch import Store
from gradsync.elastic.coordinator import Coordinator, Terms
from gradsync.elastic.host import Host, Plan
from gradsync.elastic.lead import Lead
from gradsync.transport import addresses
from gradsync.watch import wire
from gradsync.watch.wire import Channel, Message

_LOOK_SECONDS = 0.1
_JOIN_SECONDS = 60.0
_PREFIX = "gradsync/elastic"


@dataclass(frozen=True)
class Job:
    """What the user has asked for."""

    command: Sequence[str]
    ranks_here: int
    least: int
    most: int
    wait: float
    max_restarts: int
    meeting: RendezvousParameters | None
    """Where hosts meet; None: there is this one only."""
    prog: str = "gradsync run"


def launch(job: Job) -> int:
    """Returns when training is over, with the exit code."""

    def say(text: str) -> None:
        sys.stderr.write(f"{job.prog}: {text}\n")
        sys.stderr.flush()

    with selectors.DefaultSelector() as selector:
        try:
            store, where = _store(job)
            number = store.add(f"{_PREFIX}/hosts", 1) - 1
            leads = job.meeting is None or number == 0
            make = _Leading if leads else _Following
            side = make(job, store, number, selector, say)
        except (RendezvousConnectionError, dist.DistError, OSError) as error:
            where = "" if job.meeting is None else f" at {job.meeting.endpoint}"
            say(f"the hosts can't meet{where}: {str(error).splitlines()[0]}")
            return 1
        plan = Plan(job.command, job.ranks_here, job.most, where, job.max_restarts)
        host = Host(number, plan, side.hear, say, selector)
        side.take(host)
        try:
            with _signals() as heard:
                host.start()
                code = _loop(host, side, selector, heard)
        finally:
            host.close()
        if code:
            say(f"stopped by {signal.Signals(code - 128).name}; all ranks have ended")
        return code or _verdict(host, say)


def _loop(host: Host, side: _Leading | _Following, selector: selectors.BaseSelector, heard: list[int]) -> int:
    """Until all ranks have ended; the exit code, if a signal ends it."""
    stopped = 0
    while host.living or side.is_needed:
        if heard and not stopped:
            stopped = heard[0]
            side.stop()
            host.stop(stopped)
        side.tick()
        host.tick()
        for key, _ in selector.select(_LOOK_SECONDS):
            key.data()
        if stopped and not host.living:
            break
    side.tick()
    return 128 + stopped if stopped else 0


def _verdict(host: Host, say: Callable[[str], None]) -> int:
    if host.over == "finished":
        return 1 if host.failed else 0
    if not host.over and not host.ever_came:
        say(
            "the script has ended without gradsync.Elastic, so each rank has trained alone, if at all. Write its loop "
            "as `for step in training.steps(loader): with step: ...` (docs/elastic.md), or leave out --elastic"
        )
    return 1


class _Leading:
    """The first host of all."""

    def __init__(
        self, job: Job, store: Store, number: int, selector: selectors.BaseSelector, say: Callable[[str], None]
    ):
        terms, token = Terms(least=job.least, wait=job.wait), secrets.token_bytes(32)
        self._lead = Lead(Coordinator(terms), selector, say, job.meeting is not None, token)
        if job.meeting is not None:
            listener, where = wire.listen_on(addresses.of_this_host(store))
            self._lead.listen_on(listener)
            store.set(f"{_PREFIX}/lead", f"{token.hex()} {where}")

    def take(self, host: Host) -> None:
        self._lead.lead(host)

    def hear(self, message: Message) -> None:
        self._lead.hear(message)

    def tick(self) -> None:
        self._lead.tick()

    def stop(self) -> None:
        self._lead.stop()

    @property
    def is_needed(self) -> bool:
        """By ranks of other hosts."""
        return self._lead.has_others


class _Following:
    """Another one, which tells the lead all that happens, and passes on what it says."""

    def __init__(
        self, job: Job, store: Store, number: int, selector: selectors.BaseSelector, say: Callable[[str], None]
    ):
        key = f"{_PREFIX}/lead"
        store.wait([key], timedelta(seconds=_JOIN_SECONDS))
        token, _, where = store.get(key).decode().partition(" ")
        connected = wire.connect_to(where, bytes.fromhex(token), number, _JOIN_SECONDS)
        self._channel, self._selector, self._say = Channel(connected, 0), selector, say
        self._host: Host | None = None
        selector.register(connected, selectors.EVENT_READ, self._listen)

    def take(self, host: Host) -> None:
        self._host = host

    def hear(self, message: Message) -> None:
        self._channel.send(message)

    def tick(self) -> None:
        self._channel.flush()

    def stop(self) -> None:
        """The lead hears of each rank that has ended."""

    @property
    def is_needed(self) -> bool:
        return False

    def _listen(self) -> None:
        assert self._host is not None
        try:
            for message in self._channel.receive():
                self._host.tell(str(message["to"]), message["message"])
        except (OSError, KeyError, TypeError, ValueError):
            self._selector.unregister(self._channel.socket)
            if not self._host.over:
                why = "the host that leads (the first one, with the rendezvous endpoint) is lost"
                self._say(why)
                self._host.give_up(why)


def _store(job: Job) -> tuple[Store, str]:
    """Through which ranks and launchers meet, and under which address. It does not die with any rank."""
    if job.meeting is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return store, f"127.0.0.1:{store.port}"
    _, kept = create_backend(job.meeting)
    return dist.PrefixStore(job.meeting.run_id, kept), f"{kept.host}:{kept.port}"  # type: ignore[attr-defined]


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Inside, the signals that end a job are noted."""
    heard: list[int] = []
    before: dict[int, Any] = {}
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[one] = signal.signal(one, lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
