"""Processes that are no ranks, and talk to every listener that a rank opens, from before it accepts until it closes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gradsync.transport import handshake
from gradsync.watch import wire

_ENDURANCE = 120.0  # seconds after which a listener that is still open is a failure
_HELD = 300  # connections that one process keeps open: the oldest one makes room
Address = tuple[int, int, Any]  # family, type, and where


class Stranger(NamedTuple):
    """What one connection does."""

    says: Sequence[bytes | int]
    """One after the other; a number: so many bytes of what a rank said in an earlier handshake."""
    shuts: int | None = None
    """Which direction, behind that."""
    stays: bool = True
    """Whether it remains open."""
    gives: bool = False
    """Whether a descriptor comes with what it says, where the socket takes one."""


class Strangers:
    """Of this rank. Its listeners are real ones; from here on each has a process that was told of it."""

    def __init__(self) -> None:
        self.crowd: Sequence[Stranger] = ()
        self.count = 0
        """Connections for each listener, no fewer than are in the crowd, which comes again and again."""
        self.recorded = {socket.SOCK_SEQPACKET: b"", socket.SOCK_STREAM: b""}
        """What ranks have said to listeners of the host link, and of the watch."""
        self._processes: list[tuple[int, int]] = []
        self._wrap_listeners()
        self._record()

    def have_come(self) -> None:
        """Returns when all of them have connected: for a test that does not let the last rank come before."""
        for _, said in self._processes:
            assert os.read(said, 1) == b"a", "strangers could not connect"

    def end(self) -> None:
        """Has them leave, and fails unless all have seen their listener close."""
        for process, said in self._processes:
            os.close(said)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            assert status == 0, f"strangers ended with {status}"
        self._processes.clear()

    def _wrap_listeners(self) -> None:
        listen_here, listen_on, open_listener = wire.listen_here, wire.listen_on, handshake.Listener.__init__

        def here() -> tuple[socket.socket, str]:
            made = listen_here()
            self._send_to((socket.AF_UNIX, socket.SOCK_STREAM, made[0].getsockname()))
            return made

        def on(address: str) -> tuple[socket.socket, str]:
            made = listen_on(address)
            self._send_to((made[0].family, socket.SOCK_STREAM, made[0].getsockname()))
            return made

        def link(listener: handshake.Listener) -> None:
            open_listener(listener)
            self._send_to((socket.AF_UNIX, socket.SOCK_SEQPACKET, "\0" + listener.name))

        wire.listen_here, wire.listen_on = here, on
        handshake.Listener.__init__ = link  # type: ignore[method-assign,assignment]

    def _record(self) -> None:
        rank_of, check_answer = handshake._rank_of, wire.check_answer

        def record_greeting(incoming: socket.socket, token: bytes) -> int | None:
            rank = rank_of(incoming, token)
            if rank is not None:
                self.recorded[socket.SOCK_SEQPACKET] = handshake._GREETING.pack(token, rank)
            return rank

        def record_answer(said: bytes, answered: bytes, token: bytes) -> tuple[int, bytes]:
            checked = check_answer(said, answered, token)
            self.recorded[socket.SOCK_STREAM] = answered
            return checked

        handshake._rank_of, wire.check_answer = record_greeting, record_answer

    def _send_to(self, address: Address) -> None:
        """Returns when the first have come, whom the rank thus finds when it begins to accept."""
        if not self.crowd:
            return
        said, say = os.pipe()
        process = os.fork()
        if process == 0:
            code = 99
            try:
                os.dup2(say, 3)
                os.closerange(4, 1 << 16)  # above all the listener, which has to close with the rank's
                code = _Crowd(address, self.crowd, self.count, self.recorded[address[1]]).talk(3)  # type: ignore[index]
            finally:
                os._exit(code)
        os.close(say)
        self._processes.append((process, said))
        assert os.read(said, 1) == b"f", "strangers could not connect"


class _Crowd:
    def __init__(self, address: Address, crowd: Sequence[Stranger], count: int, recorded: bytes) -> None:
        self._address, self._crowd, self._count, self._recorded = address, crowd, count, recorded

    def talk(self, report: int) -> int:
        """0 once the listener is closed and nobody reads reports any more, 1 if that never happens."""
        talking: list[tuple[socket.socket, Iterator[None]]] = []
        came, until = 0, time.monotonic() + _ENDURANCE
        while time.monotonic() < until:
            peer = socket.socket(*self._address[:2])
            try:
                self._connect(peer)
            except (BlockingIOError, ConnectionResetError):  # the queue is full, or the listener closes just now
                peer.close()
            except ConnectionRefusedError:  # the others stay on the line while the job trains
                job = select.poll()
                job.register(report, 0)
                return int(not job.poll(_ENDURANCE * 1000))
            else:
                if came < self._count:
                    talking.append((peer, self._steps(peer, self._crowd[came % len(self._crowd)])))
                    came += 1
                    self._report(report, came)
                else:  # it was only to see whether there is still a listener
                    peer.close()
                    time.sleep(0.02)
            for _, steps in talking:
                with contextlib.suppress(OSError, StopIteration):
                    next(steps)
            while len(talking) > _HELD:
                talking.pop(0)[0].close()
        return 1

    def _report(self, to: int, came: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
            os.write(to, b"f" * (came == len(self._crowd)) + b"a" * (came == self._count))

    def _connect(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        try:
            peer.connect(self._address[2])
        except BlockingIOError:
            if peer.family == socket.AF_UNIX:
                raise
            # A connection over TCP is under way. If the queue is full, the kernel goes on trying without us.
            select.select([], [peer], [], 0.1)
            if error := peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error)) from None

    def _steps(self, peer: socket.socket, stranger: Stranger) -> Iterator[None]:
        for word in stranger.says:
            data = self._recorded[:word] if isinstance(word, int) else word
            if stranger.gives and peer.family == socket.AF_UNIX:
                socket.send_fds(peer, [data or b"?"], [0])
            else:
                peer.send(data, socket.MSG_NOSIGNAL)
            yield
        if stranger.shuts is not None:
            peer.shutdown(stranger.shuts)
        if not stranger.stays:
            peer.close()
