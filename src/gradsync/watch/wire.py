"""What goes over a connection of the watch: who may speak, and frames of JSON that have a bound.

The handshake proves on both sides that they know a token from the group's store, without saying it:

    listener   "gsw1" + a nonce                                        ->
               <-  another nonce + rank + HMAC(token, both and rank)      who connects
               HMAC(token, the other way round)                       ->

A nonce is used once, so that nothing that was overheard can be played back.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

MOST_BYTES = 64 * 1024  # of one frame
MOST_WAITING = 1024 * 1024  # bytes for a peer that reads nothing: what comes then is dropped
_MAGIC = b"gsw1"
_NONCE, _PROOF = 16, 32
_ANSWER = struct.Struct(f"!{_NONCE}sq{_PROOF}s")
_LENGTH = struct.Struct("!I")
_CHECK_SECONDS = 0.05
HELLO_BYTES = len(_MAGIC) + _NONCE
ANSWER_BYTES = _ANSWER.size

Message = dict[str, Any]


class WireError(ConnectionError):
    """The other side does not speak as a rank of this job does."""


class TurnedAwayError(WireError):
    """The other side has closed the connection before it knew who this is."""


def hello() -> bytes:
    return _MAGIC + os.urandom(_NONCE)


def answer(said: bytes, token: bytes, rank: int) -> bytes:
    if len(said) != HELLO_BYTES or not said.startswith(_MAGIC):
        raise WireError("what answers there is not the watch of a rank")
    nonce = os.urandom(_NONCE)
    return _ANSWER.pack(nonce, rank, _prove(token, b"connects", said[-_NONCE:], nonce, rank))


def check_answer(said: bytes, answered: bytes, token: bytes) -> tuple[int, bytes]:
    """The rank that has connected, and what proves to it that this is the right listener."""
    try:
        nonce, rank, proof = _ANSWER.unpack(answered)
    except struct.error:
        raise WireError("a visitor did not answer as a rank does") from None
    if not hmac.compare_digest(proof, _prove(token, b"connects", said[-_NONCE:], nonce, rank)):
        raise WireError("a visitor does not know the token")
    return rank, _prove(token, b"listens", nonce, said[-_NONCE:], rank)


def check_proof(proof: bytes, said: bytes, answered: bytes, token: bytes) -> None:
    nonce, rank, _ = _ANSWER.unpack(answered)
    if not hmac.compare_digest(proof, _prove(token, b"listens", nonce, said[-_NONCE:], rank)):
        raise WireError("what answers there does not know the token")


def _prove(token: bytes, role: bytes, first: bytes, second: bytes, rank: int) -> bytes:
    return hmac.digest(token, role + first + second + struct.pack("!q", rank), "sha256")


class Channel:
    """Frames to and from one rank that has proven who it is. Never blocks."""

    def __init__(self, connected: socket.socket, rank: int) -> None:
        self.rank = rank
        self.socket = connected
        self._incoming, self._outgoing = bytearray(), bytearray()
        connected.setblocking(False)

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    @property
    def is_backed_up(self) -> bool:
        """Whether the peer reads more slowly than it is told."""
        return len(self._outgoing) > MOST_BYTES

    def send(self, message: Message) -> None:
        frame = json.dumps(message, ensure_ascii=False).encode(errors="replace")
        if len(frame) <= MOST_BYTES and len(self._outgoing) < MOST_WAITING:
            self._outgoing += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(OSError):  # full: later; broken: reading will tell
            while self._outgoing:
                sent = self.socket.send(self._outgoing, socket.MSG_NOSIGNAL)
                del self._outgoing[:sent]

    def receive(self) -> list[Message]:
        """What has come. Raises an `OSError` when nothing will come any more, with what the kernel says of it."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while len(self._incoming) <= MOST_BYTES + _LENGTH.size:
                data = self.socket.recv(MOST_BYTES)
                self._incoming += data
                if not data:
                    ended = True
                    break
        messages = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > MOST_BYTES:
                raise WireError(f"a frame of {length} bytes")
            if len(self._incoming) < _LENGTH.size + length:
                break
            messages.append(_decode(bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])))
            del self._incoming[: _LENGTH.size + length]
        if ended and not messages:
            raise ConnectionResetError
        return messages

    def close(self) -> None:
        self.socket.close()


def _decode(frame: bytes) -> Message:
    try:
        message = json.loads(frame)
    except (ValueError, RecursionError):  # the latter: nested too deeply
        raise WireError("a frame that is not JSON") from None
    if not isinstance(message, dict):
        raise WireError("a frame that is no message")
    return message


# --- addresses -------------------------------------------------------------------------------------------

# The kernel notices for us when a host has vanished without a word: it asks after 2 s of silence, every 2 s, three
# times; what was sent must be confirmed within 7 s. It also answers for a process that was stopped, which is not lost.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 7000}


def listen_here() -> tuple[socket.socket, str]:
    """For ranks of this host: an abstract name that nobody guesses and that no other host sees."""
    name = "gradsync-watch-" + os.urandom(12).hex()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(1024)
    return listener, f"unix:{name}"


def listen_on(address: str) -> tuple[socket.socket, str]:
    """For leaders of other hosts, at one address of this host only."""
    listener = socket.create_server((address, 0), family=_family(address), backlog=1024)
    return listener, f"tcp:{address}:{listener.getsockname()[1]}"


def connect_to(
    address: str, token: bytes, rank: int, seconds: float, check: Callable[[], None] = lambda: None
) -> socket.socket:
    """Connects, and has the other side prove that it belongs to this job.

    `check`: called meanwhile, raises if that has become pointless.
    """
    kind, _, where = address.partition(":")
    if kind == "none":
        raise ConnectionRefusedError(f"it does not listen: {where}")
    if kind == "unix":
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        host, _, port = where.rpartition(":")
        connected = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        deadline = time.monotonic() + seconds
        connected.setblocking(False)
        keep_alive(connected)
        failed = connected.connect_ex("\0" + where if kind == "unix" else (host, int(port)))
        if failed == errno.EINPROGRESS:
            _await(connected, select.POLLOUT, deadline, check)
            failed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        said = _receive_all(connected, HELLO_BYTES, deadline, check)
        answered = answer(said, token, rank)
        connected.sendall(answered)  # which fits into the kernel's buffer
        check_proof(_receive_all(connected, _PROOF, deadline, check), said, answered, token)
        connected.settimeout(seconds)
    except BaseException:
        connected.close()
        raise
    return connected


def keep_alive(connected: socket.socket) -> None:
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for (level, option), value in keepalive_options().items():
            connected.setsockopt(level, option, value)


def keepalive_options() -> dict[tuple[int, int], int]:
    """Of a connection that has `SO_KEEPALIVE`, by level and option."""
    return {
        (socket.IPPROTO_TCP, getattr(socket, option)): value
        for option, value in _KEEPALIVE.items()
        if hasattr(socket, option)  # not on every system
    }


def _await(connected: socket.socket, event: int, deadline: float, check: Callable[[], None]) -> None:
    poll = select.poll()  # unlike `select`, for any number of descriptors
    poll.register(connected, event)
    while not poll.poll(1000 * _CHECK_SECONDS):
        check()
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")


def _receive_all(connected: socket.socket, count: int, deadline: float, check: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < count:
        _await(connected, select.POLLIN, deadline, check)
        more = connected.recv(count - len(data))
        if not more:
            raise TurnedAwayError("the connection was closed in the middle of the handshake")
        data += more
    return data


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
