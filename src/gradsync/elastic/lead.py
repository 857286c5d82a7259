"""Of all hosts' launchers one is the lead: it hears what happens to ranks anywhere, and says who trains with whom.

The others are connected to it as ranks are to each other's watch: by a token from the store, which torchrun's
rendezvous gives to whoever knows its endpoint.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gradsync.elastic.coordinator import Coordinator
from gradsync.elastic.host import Host
from gradsync.watch import wire
from gradsync.watch.visitor import MOST_SILENT, Visitor
from gradsync.watch.wire import Channel, Message


@dataclass
class Lead:
    coordinator: Coordinator
    selector: selectors.BaseSelector
    say: Callable[[str], None]
    more_may_come: bool
    """Whether other hosts may join."""
    token: bytes = b""
    _own: Host | None = None
    _hosts: dict[int, Channel] = field(default_factory=dict)
    _ranks: dict[int, set[str]] = field(default_factory=dict)  # of other hosts
    _visitors: dict[socket.socket, Visitor] = field(default_factory=dict)

    def lead(self, own: Host) -> None:
        """This host's ranks are heard from now on."""
        self._own = own

    def listen_on(self, listener: socket.socket) -> None:
        """For other hosts' launchers."""
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    @property
    def has_others(self) -> bool:
        return bool(self._hosts)

    def stop(self) -> None:
        """By a signal."""
        self.coordinator.stop()

    # --- what happens ------------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Of a rank, on any host."""
        now, name = time.monotonic(), str(message["name"])
        match message["is"]:
            case "born":
                self.coordinator.born(name, now)
            case "died":
                self.coordinator.died(name, str(message["how"]), now)
            case "ready":
                self.coordinator.ready(name, message, now)
            case "at":
                self.coordinator.at(name, int(message["step"]), now)

    def tick(self) -> None:
        """Now and then, and after anything has happened: passes on what was decided."""
        if self._own is not None:
            self.coordinator.expect_others(self.more_may_come or self._own.living >= self.coordinator.terms.least)
        self.coordinator.decide(time.monotonic())
        for word in self.coordinator.words():
            self.say(word)
        for order in self.coordinator.orders():
            number = int(order.to.partition(".")[0])
            if self._own is not None and number == self._own.number:
                self._own.tell(order.to, order.message)
            elif (channel := self._hosts.get(number)) is not None:
                channel.send({"to": order.to, "message": order.message})
        for channel in self._hosts.values():
            channel.flush()
        for visitor in [one for one in self._visitors.values() if one.until < time.monotonic()]:
            self._dismiss(visitor)

    # --- other hosts -------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connected, _ = listener.accept()
            if len(self._visitors) >= MOST_SILENT:
                self._dismiss(next(iter(self._visitors.values())))
            visitor = self._visitors[connected] = Visitor(connected)
            self.selector.register(connected, selectors.EVENT_READ, lambda: self._answered(visitor))

    def _answered(self, visitor: Visitor) -> None:
        try:
            if not visitor.has_answered():
                return
            number, proof = wire.check_answer(visitor.said, visitor.answered, self.token)
            visitor.socket.sendall(proof)
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(visitor)
            return
        del self._visitors[visitor.socket]
        wire.keep_alive(visitor.socket)
        channel = self._hosts[number] = Channel(visitor.socket, number)
        self._ranks[number] = set()
        self.selector.modify(visitor.socket, selectors.EVENT_READ, lambda: self._listen(channel))
        self.say(f"host {number} has come")

    def _dismiss(self, visitor: Visitor) -> None:
        self._visitors.pop(visitor.socket, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(visitor.socket)
        visitor.socket.close()

    def _listen(self, channel: Channel) -> None:
        try:
            for message in channel.receive():
                if int(str(message["name"]).partition(".")[0]) == channel.rank:
                    self._note(channel.rank, message)
                    self.hear(message)
        except (OSError, KeyError, TypeError, ValueError):
            self._lose(channel)

    def _note(self, number: int, message: Message) -> None:
        if message["is"] == "born":
            self._ranks[number].add(str(message["name"]))
        elif message["is"] == "died":
            self._ranks[number].discard(str(message["name"]))

    def _lose(self, channel: Channel) -> None:
        """A host is gone, or its launcher is; its ranks have no way back."""
        self.selector.unregister(channel.socket)
        channel.close()
        del self._hosts[channel.rank]
        if (gone := self._ranks.pop(channel.rank)) and not self.coordinator.over:
            self.say(f"host {channel.rank} is lost, with {len(gone)} ranks")
        for name in sorted(gone):
            self.hear({"is": "died", "name": name, "how": "its host is lost"})
