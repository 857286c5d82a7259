"""A connection that has yet to prove that it belongs to the watch."""

from __future__ import annotations

import contextlib
import socket
import time

from gradsync.watch import wire

# At most so many at a time, and each for so long.
MOST_SILENT, SILENT_SECONDS = 64, 5.0


class Visitor:
    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.said = wire.hello()
        self.answered = b""
        self.until = time.monotonic() + SILENT_SECONDS
        with contextlib.suppress(OSError):
            connected.send(self.said, socket.MSG_NOSIGNAL)

    def has_answered(self) -> bool:
        """Reads what has come, and says whether that is all of it."""
        data = self.socket.recv(wire.ANSWER_BYTES - len(self.answered))
        if not data:
            raise wire.WireError
        self.answered += data
        return len(self.answered) == wire.ANSWER_BYTES
