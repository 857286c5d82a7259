"""The few messages between pytest, the fork server and the ranks.

All share one Unix socket that keeps message boundaries. A rank inherits the fork server's end and writes to it
directly, so what it says arrives before the fork server's word that it ended.
"""

import pickle
import signal
import socket
from pathlib import Path
from typing import Any, NamedTuple

DUMP_STACKS = signal.SIGUSR1  # to a rank: write down where you stand
LEAVE = signal.SIGUSR2  # to a rank that returned: everyone has reported, you may go
_LARGEST_MESSAGE = 1 << 16


class Fork(NamedTuple):
    """pytest to fork server: start this rank of the run in `folder`."""

    rank: int
    folder: Path


class Signal(NamedTuple):
    """pytest to fork server: signal this rank, if it still lives. What it started ends with it in any case."""

    rank: int
    number: int


class Ready(NamedTuple):
    """fork server to pytest: everything is loaded."""


class Started(NamedTuple):
    """rank to pytest: I lead my own process group; signals may be sent."""

    rank: int
    pid: int


class Reported(NamedTuple):
    """rank to pytest: my report is in the folder."""

    rank: int
    returned: bool


class Ended(NamedTuple):
    """fork server to pytest: this rank was reaped. `code` is negative for a signal, `when` is monotonic time."""

    rank: int
    code: int
    when: float


class Channel:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @staticmethod
    def pair() -> tuple["Channel", "Channel"]:
        """The two ends of a new socket."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(left), Channel(right)

    def fileno(self) -> int:
        """What `select` and `Popen(pass_fds=...)` need."""
        return self._end.fileno()

    def send(self, message: NamedTuple) -> None:
        """Send one message whole."""
        self._end.send(pickle.dumps(message))

    def receive(self, timeout: float | None = None) -> Any:
        """The next message, or raise `TimeoutError`, or `EOFError` once nobody holds the other end."""
        self._end.settimeout(None if timeout is None else max(timeout, 1e-3))  # zero would mean: don't block
        message = self._end.recv(_LARGEST_MESSAGE)
        if not message:
            raise EOFError("the other end of the channel is closed")
        return pickle.loads(message)

    def close(self) -> None:
        """Close this end; the fork server takes that as the order to leave."""
        self._end.close()
