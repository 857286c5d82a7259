"""The ranks of one host, connected by Unix sockets: who is there, who is gone, and wake-ups.

Data does not travel here, only descriptors of memory files and single bytes that wake a sleeping rank. Each
rank has a socket to each other one. A closed socket is the news that its rank is gone, whatever ended it.

The sockets have abstract names for the moment of connecting: no file, nothing to remove. Such a name ends at a
container's network namespace, so ranks that could not share memory do not meet either.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from gradsync.errors import ForkedError, ReplicaLostError, RoundTimeoutError
from gradsync.transport.store import PATIENCE, Causes

# A wait first looks without sleeping for so long: ranks in step need less, and waking up takes about as long.
SPIN = 100e-6
# However a wake-up may get lost, nobody sleeps longer than this (the first time; later ones grow up to the second).
NAP, LONGEST_NAP = 1e-3, 50e-3
RESTLESS_NAP = 1e-3
# While waiting for a rank to connect, how often to look whether it has said that it can't.
_LOOK_UP = 0.1
_BACKLOG = 1024
# Visitors of this user that may be inside before they have said which rank they are.
_MOST_SILENT = 64
_GREETING = struct.Struct("=16sq")
_CHANNEL = struct.Struct("=i")
_MESSAGE = 64 * 1024
_WAKE = b"w"
_CREDENTIALS = struct.Struct("3i")


def _never(_: Link) -> bool:
    return False


def _nothing() -> None:
    return None


def _nothing_with(_: bool) -> None:
    return


class HandshakeError(Exception):
    """The ranks of this host could not be connected; the text says who and why."""


def location() -> str:
    """What ranks that can meet here have in common: the running kernel and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


class Door:
    """A socket that waits for the other ranks of the host, under a name that nobody guesses."""

    def __init__(self) -> None:
        self.name = "gradsync-" + os.urandom(12).hex()
        self.socket = _socket()
        self.socket.bind("\0" + self.name)
        self.socket.listen(_BACKLOG)

    def close(self) -> None:
        self.socket.close()


def connect(
    door: Door,
    rank: int,
    names: Mapping[int, str],
    token: bytes,
    seconds: float,
    failed: Callable[[int], bool],
    causes: Causes | None = None,
) -> Link:
    """Connects this rank with those in `names`, which all do the same now; one that has `failed` won't come."""
    deadline = time.monotonic() + seconds
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in sorted(names):
            if peer < rank:
                sockets[peer] = _knock(peer, names[peer], rank, token, seconds)
        higher = {peer for peer in names if peer > rank}
        sockets |= _let_in(door.socket, higher, rank, token, deadline, failed)
        for peer in sorted(names):
            if peer < rank:
                _await_welcome(sockets[peer], peer, token, deadline)
    except BaseException:
        for one in sockets.values():
            one.close()
        raise
    finally:
        door.close()
    return Link(rank, sockets, causes)


class Link:
    """This rank's sockets to the other ranks of its host."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], causes: Causes | None = None) -> None:
        self.rank = rank
        self._causes = causes
        self.peers = sorted(sockets)
        self.ranks = sorted([rank, *sockets])
        self.restless: Callable[[Link], bool] = _never
        """Whether something is under way of whose end no socket here will tell."""
        self.progress: Callable[[], None] = _nothing
        """What to do while waiting: work for the others."""
        self.asleep: Callable[[bool], None] = _nothing_with
        """Told when this rank goes to sleep, and when it is awake again."""
        self.forked = False
        self.troubled = False
        """Somebody waited in vain: the ranks may no longer agree on what comes next."""
        self._sockets = dict(sockets)
        self._inbox: dict[tuple[int, int], deque[tuple[bytes, list[int]]]] = {}  # by rank and channel
        self._channels = 0
        self._sleepers, self._counting = 0, threading.Lock()
        self.gone: set[int] = set()
        """Ranks of which it is known that they have ended."""
        self._rank_of = {one.fileno(): peer for peer, one in sockets.items()}
        self._looking = threading.Lock()
        self._poll = select.poll()
        for one in sockets.values():
            one.setblocking(False)
            self._poll.register(one, select.POLLIN)
        self._close = weakref.finalize(self, _close_all, tuple(sockets.values()))
        self._close.atexit = False  # the kernel closes them; a rank that still works at exit should not lose them
        _links.add(self)

    def wake(self, peers: Iterable[int]) -> None:
        for peer in peers:
            with contextlib.suppress(OSError):  # full of wake-ups, or gone: either way there is nobody to wake
                self._sockets[peer].send(_WAKE, socket.MSG_NOSIGNAL)

    def open_channel(self) -> int:
        """A number for messages that are not to be mixed up with others, of another thread for example.

        All ranks open theirs in the same order.
        """
        self._channels += 1
        return self._channels

    def send(
        self, peer: int, message: bytes, limit: float, descriptors: Collection[int] = (), channel: int = 0
    ) -> None:
        """Waits for room: a rank that was stopped may have many wake-ups to read first."""

        def sent() -> bool:
            try:
                _send(self._sockets[peer], _CHANNEL.pack(channel) + message, descriptors)
            except BlockingIOError:
                return False
            except OSError:
                raise self._lost([peer]) from None
            return True

        self.wait(sent, limit, lambda: [peer], "room for a message")

    def receive(self, peer: int, limit: float, channel: int = 0) -> tuple[bytes, list[int]]:
        """The next message of a rank, which came with these descriptors."""
        inbox = self._inbox.setdefault((peer, channel), deque())
        self.wait(lambda: bool(inbox), limit, lambda: [peer], "a message")
        return inbox.popleft()

    def wait(
        self,
        ready: Callable[[], bool],
        limit: float,
        who: Callable[[], list[int]],
        what: str,
        late: Callable[[], Exception | None] = _nothing,
    ) -> None:
        """Returns once `ready()`; raises if a rank that is waited for is gone, or takes longer than `limit`.

        `who`: the ranks without which it can't become ready, asked for only when something is wrong. `late`: what to
        raise if none of them is to blame for the time it took.
        """
        if ready():
            return
        began = time.monotonic()
        while time.monotonic() - began < SPIN:
            self.progress()
            if ready():
                return
            os.sched_yield()
        nap = NAP
        while True:
            with self._asleep():
                self.progress()
                if ready():
                    return
                self._look(RESTLESS_NAP if self.restless(self) else nap)
            self.progress()
            if ready():
                return
            if self.gone and (lost := self.gone.intersection(who())):
                raise self._lost(sorted(lost))
            if time.monotonic() - began > limit:
                raise late() or self._late(who(), limit, what)
            nap = min(nap * 1.5, LONGEST_NAP)

    @contextlib.contextmanager
    def _asleep(self) -> Iterator[None]:
        """Says to the others that this rank may have to be woken; so do other threads of it, perhaps."""
        self._count_sleepers(1)
        try:
            yield
        finally:
            self._count_sleepers(-1)

    def _count_sleepers(self, more: int) -> None:
        with self._counting:
            self._sleepers += more
            self.asleep(self._sleepers > 0)

    def check(self) -> None:
        """Raises in a process that was forked from the rank: the sockets and the memory are the rank's."""
        if self.forked:
            raise ForkedError(
                f"this process was forked from rank {self.rank}, which alone can take part in rounds. In a child "
                "(a data loader's worker, for example) use the model without backward."
            )

    def close(self) -> None:
        self._close()

    def _look(self, seconds: float) -> None:
        """Sleeps until a socket has something, and takes it in. Of several threads that wait, one looks."""
        self.check()
        if not self._looking.acquire(blocking=False):
            time.sleep(min(seconds, NAP))
            return
        try:
            self._take_in(seconds)
        finally:
            self._looking.release()

    def _take_in(self, seconds: float) -> None:
        for descriptor, _ in self._poll.poll(seconds * 1000):
            peer = self._rank_of[descriptor]
            try:
                while True:
                    message, descriptors = _receive(self._sockets[peer])
                    if not message:
                        raise ConnectionResetError
                    if message != _WAKE:
                        (channel,) = _CHANNEL.unpack_from(message)
                        inbox = self._inbox.setdefault((peer, channel), deque())
                        inbox.append((message[_CHANNEL.size :], descriptors))
            except BlockingIOError:
                pass
            except OSError:
                self.gone.add(peer)
                self._poll.unregister(descriptor)

    def _lost(self, peers: list[int]) -> Exception:
        if self._causes is not None:
            peers = self._causes.first(peers)
        message = (
            f"rank {self.rank}: rank {_listed(peers)} is gone: the process ended, or gave up its replica. Its own "
            "output says why. Start the job again from the last checkpoint (torchrun --max-restarts does)."
        )
        return self._trouble(ReplicaLostError(message, peers))

    def _late(self, peers: list[int], limit: float, what: str) -> Exception:
        if self._causes is not None:
            peers = self._causes.first(peers, min(limit, PATIENCE))
        message = (
            f"rank {self.rank}: waited {limit:g} s for {what} from rank {_listed(peers)}, whose process is alive. It "
            "is slow, stuck, or went another way: look at what it does (py-spy dump), or give the process group a "
            "longer timeout."
        )
        return self._trouble(RoundTimeoutError(message, peers))

    def _trouble(self, error: Exception) -> Exception:
        self.troubled = True
        return error


# --- the handshake ---------------------------------------------------------------------------------------


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _knock(peer: int, name: str, rank: int, token: bytes, seconds: float) -> socket.socket:
    connected = _socket()
    try:
        connected.settimeout(seconds)
        connected.connect("\0" + name)
        _check_user(connected, f"rank {peer}")
        connected.send(_GREETING.pack(token, rank))
    except (OSError, HandshakeError) as error:
        connected.close()
        if isinstance(error, HandshakeError):
            raise
        raise HandshakeError(f"rank {rank} could not reach rank {peer}: {error.strerror or error}") from None
    return connected


def _let_in(
    door: socket.socket,
    expected: set[int],
    rank: int,
    token: bytes,
    deadline: float,
    failed: Callable[[int], bool],
) -> dict[int, socket.socket]:
    """Those who come with the token. Others are sent away; one that says nothing does not hold up the rest."""
    door.setblocking(False)
    joined: dict[int, socket.socket] = {}
    silent: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(door, select.POLLIN)

    def hear(descriptor: int) -> None:
        visitor = silent.pop(descriptor)
        poll.unregister(descriptor)
        peer = _greeted(visitor, token)
        if peer in expected and peer not in joined:
            joined[peer] = visitor
            visitor.send(_GREETING.pack(token, rank))
        else:
            visitor.close()

    try:
        while missing := expected - joined.keys():
            left = deadline - time.monotonic()
            found = poll.poll(max(min(left, _LOOK_UP), 0) * 1000)
            if not found and (left <= 0 or any(map(failed, missing))):
                raise HandshakeError(f"rank {rank} waited in vain for rank {_listed(sorted(missing))}")
            for descriptor, _ in found:
                if descriptor in silent:
                    hear(descriptor)
            for visitor in _visitors(door) if any(descriptor == door.fileno() for descriptor, _ in found) else ():
                silent[visitor.fileno()] = visitor
                poll.register(visitor, select.POLLIN)
                if len(silent) > _MOST_SILENT:  # whoever has something to say says it at once
                    hear(next(iter(silent)))
    except BaseException as error:
        _close_all(tuple(joined.values()))
        if isinstance(error, OSError):
            raise HandshakeError(f"rank {rank} could not let its peers in: {error.strerror or error}") from None
        raise
    finally:
        _close_all(tuple(silent.values()))
    return joined


def _visitors(door: socket.socket) -> Iterator[socket.socket]:
    """Those of this user who stand at the door. Others are sent away before they hold a descriptor."""
    for _ in range(_BACKLOG):
        try:
            visitor, _ = door.accept()
        except BlockingIOError:
            return
        visitor.setblocking(False)
        try:
            _check_user(visitor, "a visitor")
        except HandshakeError:
            visitor.close()
        else:
            yield visitor


def _greeted(visitor: socket.socket, token: bytes) -> int | None:
    """The rank of a visitor that has the right token."""
    try:
        theirs, peer = _GREETING.unpack(visitor.recv(_GREETING.size))
    except (OSError, struct.error):
        return None
    return int(peer) if hmac.compare_digest(theirs, token) else None


def _await_welcome(connected: socket.socket, peer: int, token: bytes, deadline: float) -> None:
    connected.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        theirs, rank = _GREETING.unpack(connected.recv(_GREETING.size))
    except (OSError, struct.error):
        raise HandshakeError(f"rank {peer} did not answer") from None
    if rank != peer or not hmac.compare_digest(theirs, token):
        raise HandshakeError(f"rank {peer} answered with a wrong token")


def _check_user(connected: socket.socket, name: str) -> None:
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise HandshakeError(f"{name} belongs to user {user}, this rank to user {os.geteuid()}")


# --- small things ----------------------------------------------------------------------------------------

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child keeps no socket open: else nobody would learn of the death of the rank itself."""
    for link in _links:
        link.forked = True
        link.close()


os.register_at_fork(after_in_child=_in_child)


def _send(connected: socket.socket, message: bytes, descriptors: Collection[int]) -> None:
    """As `socket.send_fds`, which drops its flags (Python 3.13 and before)."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    connected.sendmsg([message], rights, socket.MSG_NOSIGNAL)


def _receive(connected: socket.socket) -> tuple[bytes, list[int]]:
    """As `socket.recv_fds`. Programs that this process starts later don't get the descriptors."""
    space = socket.CMSG_LEN(array("i").itemsize)
    message, rights, _, _ = connected.recvmsg(_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
    received = array("i")
    for _, kind, data in rights:
        if kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    return message, list(received)


def _close_all(sockets: tuple[socket.socket, ...]) -> None:
    for one in sockets:
        one.close()


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
