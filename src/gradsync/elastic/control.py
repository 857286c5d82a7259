"""A rank's line to the launcher that has started it: a thread that listens, and answers while the rank computes."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from gradsync import launchers, log
from gradsync._torch import Store
from gradsync.errors import ElasticError, InvalidOptionError, ReplicaLostError
from gradsync.watch.wire import Channel, Message

LINE, STORE, MOST = launchers.ELASTIC, "GRADSYNC_ELASTIC_STORE", "GRADSYNC_ELASTIC_MOST"
"""Variables of a rank's environment: a descriptor, `host:port`, and how many ranks there may ever be."""
_STORE_SECONDS = 60.0
_LOOK_SECONDS = 0.5


class Epoch(NamedTuple):
    """Who trains together, until one of them is lost or others come."""

    number: int
    rank: int
    size: int
    source: int
    """The rank whose state those have to take over that are `behind`."""
    behind: tuple[int, ...]
    step: int
    """The first one of it."""
    ends: int | None
    """The number of steps after which a rank has said that training is finished."""


class Over(NamedTuple):
    """There will be no other epoch; `why`, if training is not finished."""

    why: str = ""
    leaves_checkpoint: bool = False
    """Whether it is this rank that leaves one."""


def script_fails() -> None:
    """It is left by `sys.exit` with a code, which nothing else shows while Python ends."""
    global _fails
    _fails = True


def has_failed() -> bool:
    """Whether this process ends by an exception or by an exit code."""
    return _fails or hasattr(sys, "last_value")


def most_ranks() -> int:
    return int(os.environ.get(MOST, "1"))


class Control:
    """What the launcher says, for the training thread."""

    def __init__(self, line: socket.socket, store: Store) -> None:
        self.store = store
        self._channel = Channel(line, rank=-1)
        self._news = threading.Condition()
        self._epoch: Epoch | Over | None = None  # told, and not yet begun
        self._now = 0  # the number of the epoch that this rank is in
        self._lost: tuple[int, str, int] | None = None  # a rank of it: in which epoch, how, which
        self._step = 0  # in which this rank is
        self._most: int | None = None  # while others want to join: the last step that it may begin untold
        self._ends_before: int | None = None
        self._gone = False  # the launcher
        self._thread = threading.Thread(target=self._listen, name="gradsync-elastic", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls) -> Control:
        """Of the launcher that has started this process; once in it."""
        global _is_taken
        if _is_taken:
            raise InvalidOptionError(
                f"rank {log.rank()}: there is another gradsync.Elastic in this script. One training goes on when ranks "
                "die; give it all modules and optimizers that are trained together."
            )
        line = socket.socket(fileno=int(os.environ[LINE]))
        line.set_inheritable(False)
        host, _, port = os.environ[STORE].rpartition(":")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=timedelta(seconds=_STORE_SECONDS), wait_for_workers=False
        )
        _is_taken = True
        return cls(line, store)

    # --- for the training thread -------------------------------------------------------------------------

    def await_epoch(self, step: int, whole: bool, finished: bool, model: str, blamed: list[int]) -> Epoch | Over:
        """Says how far this rank is, and waits until it is told who goes on together."""
        self.leave(step, whole, finished, model, blamed)
        with self._news:
            while self._epoch is None:
                if self._gone:
                    return Over("the launcher of this host (gradsync run --elastic) is gone", leaves_checkpoint=True)
                self._news.wait(_LOOK_SECONDS)
            told, self._epoch = self._epoch, None
            if isinstance(told, Epoch):
                self._now = told.number
                if self._lost is not None and self._lost[0] != told.number:
                    self._lost = None
            return told

    def leave(self, step: int, whole: bool, finished: bool, model: str = "", blamed: list[int] | None = None) -> None:
        """The same without waiting."""
        with self._news:
            said = {"is": "ready", "step": step, "whole": whole, "finished": finished, "model": model}
            self._channel.send({**said, "blamed": blamed or []})

    def fails(self, how: str) -> None:
        """This rank leaves, by an exception of its own: the others need not wait for its process to end."""
        with self._news:
            self._channel.send({"is": "failed", "how": how})

    def may_begin(self, step: int) -> bool:
        """Before a step: whether this rank goes on with it, or leaves the epoch. May wait until that is known."""
        with self._news:
            while True:
                if self._lost is not None or self._gone or self._epoch is not None:
                    return False
                if self._ends_before is not None:
                    if step >= self._ends_before:
                        return False
                elif self._most is not None and step > self._most:
                    self._news.wait(_LOOK_SECONDS)
                    continue
                self._step = step
                return True

    def check(self, rank: int) -> None:
        """Raises if a rank of the epoch is known to be lost."""
        if (lost := self._lost) is not None:
            raise ReplicaLostError(f"rank {rank}: a rank of epoch {self._now} is lost: {lost[1]}")
        if self._gone:
            raise ElasticError(f"rank {rank}: the launcher of this host (gradsync run --elastic) is gone.")

    @property
    def lost(self) -> tuple[int, str] | None:
        """A rank of the epoch that is, and how."""
        return None if self._lost is None else (self._lost[2], self._lost[1])

    def has_lost(self, seconds: float) -> bool:
        """Whether a rank of the epoch is lost; news may take so long."""
        with self._news:
            return self._news.wait_for(lambda: self._lost is not None or self._gone, seconds)

    # --- the thread --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLIN)
        try:
            while True:
                poll.poll(1000 if not self._channel.has_more_to_send else 20)
                with self._news:  # the training thread sends, too
                    self._channel.flush()
                for message in self._channel.receive():
                    self._take(message)
        except (OSError, LookupError, TypeError, ValueError):
            with self._news:
                self._gone = True
                self._news.notify_all()

    def _take(self, message: Message) -> None:
        with self._news:
            match message["is"]:
                case "epoch":
                    behind = tuple(map(int, message["behind"]))
                    told = int(message["number"]), int(message["rank"]), int(message["size"]), int(message["source"])
                    self._epoch = Epoch(*told, behind, int(message["step"]), message["ends"])
                    self._step, self._most, self._ends_before = self._epoch.step, None, None
                case "over":
                    self._epoch = Over()
                case "give up" | "refused":
                    self._epoch = Over(str(message["why"]), bool(message.get("checkpoint")))
                case "lost":
                    self._lost = int(message["epoch"]), str(message["how"]), int(message["rank"])
                case "hold":
                    self._most = self._step + 1
                    self._channel.send({"is": "at", "step": self._step})
                case "break":
                    self._ends_before = int(message["before"])
            self._news.notify_all()


_is_taken = False
_fails = False
