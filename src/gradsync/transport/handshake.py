"""How the ranks of one host get their sockets: each listens, connects to the lower ranks, and admits the higher ones.

The listeners have abstract names for the moment of connecting: no file, nothing to remove. Such a name ends at a
container's network namespace, so ranks that could not share memory can't connect either. Whoever connects has to be of
the same user and to have the token, which ranks know from the group's store.
"""

from __future__ import annotations

import errno
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gradsync.transport.link import Link, close_all, listed
from gradsync.watch.watch import Watch

# While waiting for a rank to connect, how often to look whether it has said that it can't.
_CHECK_SECONDS = 0.1
_BACKLOG = 1024
# What a rank hears in a crowd: the queue is full, or it was turned away. It comes again after so long.
_CROWDED, _AGAIN_SECONDS = (BlockingIOError, BrokenPipeError, ConnectionResetError), 0.01
# Connections of this user that may be open before they have said which rank they are.
_MOST_SILENT = 64
_GREETING = struct.Struct("=16sq")
_CREDENTIALS = struct.Struct("3i")


def location() -> str:
    """What ranks that can connect have in common: the running kernel and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


def location_or(otherwise: str) -> str:
    """`location`, where the system can tell it."""
    try:
        return location()
    except OSError:
        return otherwise


class HandshakeError(Exception):
    """The ranks of this host could not be connected; the text says who and why."""


class Listener:
    """A socket to which the other ranks of the host connect, under a name that nobody guesses."""

    def __init__(self) -> None:
        self.name = "gradsync-" + os.urandom(12).hex()
        self.socket = _new_socket()
        self.socket.bind("\0" + self.name)
        self.socket.listen(_BACKLOG)

    def close(self) -> None:
        self.socket.close()


def connect(
    listener: Listener,
    rank: int,
    names: Mapping[int, str],
    token: bytes,
    seconds: float,
    has_failed: Callable[[int], bool],
    watch: Watch | None = None,
) -> Link:
    """Connects this rank with those whose listeners are in `names`, which all do the same now.

    `has_failed`: whether a rank is known not to come.
    """
    deadline = time.monotonic() + seconds
    sockets: dict[int, socket.socket] = {}
    try:
        lower = sorted(peer for peer in names if peer < rank)
        for peer in lower:
            sockets[peer] = _connect_to(peer, names[peer], rank, token, deadline)
        sockets |= _admit(listener.socket, names.keys() - lower, rank, token, deadline, has_failed)
        for peer in lower:
            while not _has_answered(sockets[peer], peer, token, deadline):
                sockets[peer].close()
                sockets[peer] = _connect_to(peer, names[peer], rank, token, deadline)
    except BaseException:
        close_all(sockets.values())
        raise
    finally:
        listener.close()
    return Link(rank, sockets, watch)


def _connect_to(peer: int, name: str, rank: int, token: bytes, deadline: float) -> socket.socket:
    """Comes again while strangers fill the queue, and if it was turned away as one of them before it could greet."""
    while True:
        connected = _new_socket()
        try:
            connected.settimeout(max(deadline - time.monotonic(), 0.001))
            connected.connect("\0" + name)
            _check_user(connected, f"rank {peer}")
            connected.send(_GREETING.pack(token, rank), socket.MSG_NOSIGNAL)
        except BaseException as error:
            connected.close()
            if not isinstance(error, OSError):
                raise
            if not isinstance(error, _CROWDED) or time.monotonic() > deadline:
                raise HandshakeError(f"rank {rank} could not reach rank {peer}: {error.strerror or error}") from None
        else:
            return connected
        time.sleep(_AGAIN_SECONDS)


def _admit(
    listener: socket.socket,
    expected: set[int],
    rank: int,
    token: bytes,
    deadline: float,
    has_failed: Callable[[int], bool],
) -> dict[int, socket.socket]:
    """Those who come with the token. Others are refused; one that says nothing does not hold up the rest."""
    listener.setblocking(False)
    admitted: dict[int, socket.socket] = {}
    silent: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)

    def admit_or_refuse(descriptor: int) -> None:
        incoming = silent.pop(descriptor)
        poll.unregister(descriptor)
        peer = _rank_of(incoming, token)
        if peer in expected and peer not in admitted:
            admitted[peer] = incoming
            incoming.send(_GREETING.pack(token, rank), socket.MSG_NOSIGNAL)
        else:
            incoming.close()

    def accept() -> None:
        try:
            for incoming in _accept_own_user(listener):
                silent[incoming.fileno()] = incoming
                poll.register(incoming, select.POLLIN)
                if len(silent) > _MOST_SILENT:  # a rank greets at once: the oldest of them is none
                    admit_or_refuse(next(iter(silent)))
        except OSError as error:
            if error.errno != errno.EMFILE or not silent:
                raise
            admit_or_refuse(next(iter(silent)))  # strangers must not hold the last descriptors

    check_at = time.monotonic() + _CHECK_SECONDS
    try:
        while expected - admitted.keys():
            left = deadline - time.monotonic()
            found = poll.poll(max(min(left, _CHECK_SECONDS), 0) * 1000)
            for descriptor, _ in found:
                if descriptor in silent:
                    admit_or_refuse(descriptor)
            if any(descriptor == listener.fileno() for descriptor, _ in found):
                accept()
            if (now := time.monotonic()) < min(check_at, deadline):
                continue
            check_at = now + _CHECK_SECONDS
            # Also while strangers keep coming: else they could have it wait for ever.
            missing = expected - admitted.keys()
            if missing and (now >= deadline or any(map(has_failed, missing))):
                raise HandshakeError(f"rank {rank} waited in vain for rank {listed(sorted(missing))}")
    except BaseException as error:
        close_all(admitted.values())
        if isinstance(error, OSError):
            raise HandshakeError(f"rank {rank} could not let its peers in: {error.strerror or error}") from None
        raise
    finally:
        close_all(silent.values())
    return admitted


def _accept_own_user(listener: socket.socket) -> Iterator[socket.socket]:
    """Connections that wait. Those of other users are refused before they hold a descriptor for longer than that."""
    for _ in range(_BACKLOG):
        try:
            incoming, _ = listener.accept()
        except BlockingIOError:
            return
        incoming.setblocking(False)
        try:
            _check_user(incoming, "a peer")
        except HandshakeError:
            incoming.close()
        else:
            yield incoming


def _rank_of(incoming: socket.socket, token: bytes) -> int | None:
    """By its greeting; None without the right token."""
    try:
        theirs, peer = _GREETING.unpack(incoming.recv(_GREETING.size))
    except (OSError, struct.error):
        return None
    return int(peer) if hmac.compare_digest(theirs, token) else None


def _has_answered(connected: socket.socket, peer: int, token: bytes, deadline: float) -> bool:
    """Waits for it. False if it has turned this rank away, as it does with those who are silent in a crowd."""
    connected.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        answer = connected.recv(_GREETING.size)
    except ConnectionResetError:
        answer = b""
    except OSError:
        raise HandshakeError(f"rank {peer} did not answer") from None
    if not answer:
        if time.monotonic() > deadline:
            raise HandshakeError(f"rank {peer} did not answer")
        time.sleep(_AGAIN_SECONDS)
        return False
    if not hmac.compare_digest(answer, _GREETING.pack(token, peer)):
        raise HandshakeError(f"rank {peer} answered with a wrong token")
    return True


def _check_user(connected: socket.socket, name: str) -> None:
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise HandshakeError(f"{name} belongs to user {user}, this rank to user {os.geteuid()}")


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
