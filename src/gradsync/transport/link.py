"""The ranks of one host, connected by Unix sockets: who is there, who is gone, and wake-ups.

Data does not travel here, only descriptors of memory files and single bytes that wake a sleeping rank. Each rank has a
socket to each other one, see `handshake.py`. A closed socket is the news that its rank is gone, whatever ended it.
"""

from __future__ import annotations

import contextlib
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

from gradsync.errors import ForkedError, ReplicaLostError, RoundTimeoutError
from gradsync.transport import progress_engine
from gradsync.watch.patience import Patience, after_break
from gradsync.watch.watch import Watch

# A wait first looks without sleeping for so long: ranks in step need less, and waking up takes about as long.
SPIN = 100e-6
# However a wake-up may get lost, nobody sleeps longer than this (the first time; later ones grow up to the second).
NAP, LONGEST_NAP = 1e-3, 50e-3
# While something is under way whose end wakes nobody.
POLLING_NAP = 1e-3
_CHANNEL = struct.Struct("=i")
_LOOK_SECONDS = 0.25  # how often a wait asks the watch
_MESSAGE = 64 * 1024
_WAKE = b"w"


class Link:
    """This rank's sockets to the other ranks of its host."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], watch: Watch | None = None) -> None:
        self.rank = rank
        self.peers = tuple(sorted(sockets))
        self.ranks = tuple(sorted([rank, *sockets]))
        self._watch = watch
        self._is_forked = self._is_broken = False
        self._sockets = dict(sockets)
        self._rank_of = {one.fileno(): peer for peer, one in sockets.items()}
        self._gone: set[int] = set()
        self._inbox: dict[tuple[int, int], deque[tuple[bytes, list[int]]]] = {}  # by rank and channel
        self._channels = 0
        self._sleepers, self._counting = 0, threading.Lock()
        self._sleep_flag: memoryview | None = None
        self._polling = threading.Lock()
        self._poll = select.poll()
        for one in sockets.values():
            one.setblocking(False)
            self._poll.register(one, select.POLLIN)
        self._close = weakref.finalize(self, close_all, tuple(sockets.values()))
        self._close.atexit = False  # the kernel closes them; a rank that still works at exit should not lose them
        _links.add(self)

    @property
    def is_reusable(self) -> bool:
        """Not once somebody waited in vain: the ranks may no longer agree on what comes next. Nor in a forked child."""
        return not self._is_broken and not self._is_forked and (self._watch is None or self._watch.lost is None)

    def is_gone(self, rank: int) -> bool:
        """Whether it is known to have ended."""
        return rank in self._gone

    def show_sleep_in(self, flag: memoryview) -> None:
        """From now on the one word of `flag` is not 0 while this rank sleeps: then others have to wake it."""
        self._sleep_flag = flag

    def wake(self, peer: int) -> None:
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
        """The next message of a rank, and the descriptors that came with it."""
        inbox = self._inbox.setdefault((peer, channel), deque())
        self.wait(lambda: bool(inbox), limit, lambda: [peer], "a message")
        return inbox.popleft()

    def wait(
        self,
        ready: Callable[[], bool],
        limit: float,
        awaited: Callable[[], list[int]],
        what: str,
        late: Callable[[], Exception | None] | None = None,
    ) -> None:
        """Returns once `ready()`; raises if a rank that is waited for is gone, or takes longer than `limit`.

        `awaited`: the ranks without which it can't become ready, asked for only when something is wrong. `late`: what
        to raise if none of them is to blame for the time it took.
        """
        if ready():
            return
        began = time.monotonic()
        while time.monotonic() - began < SPIN:
            progress_engine.progress()
            if ready():
                return
            os.sched_yield()
        nap, look_at, patience = NAP, began + _LOOK_SECONDS, None
        try:
            while True:
                with self._asleep():
                    # Once more: what came before the others could see that this rank sleeps wakes nobody.
                    progress_engine.progress()
                    if ready():
                        return
                    self._sleep(POLLING_NAP if progress_engine.needs_polling(self) else nap)
                progress_engine.progress()
                if ready():
                    return
                if self._gone and (lost := self._gone.intersection(awaited())):
                    raise self._lost(sorted(lost))
                now = time.monotonic()
                if self._watch is not None and now > look_at:
                    patience = patience or Patience(self._watch, limit, what, now - began)
                    look_at = now + _LOOK_SECONDS
                    patience.look()
                if now - began > limit:
                    raise self._late(awaited(), limit, what, patience, late)
                nap = min(nap * 1.5, LONGEST_NAP)
        except (ReplicaLostError, RoundTimeoutError):
            self._is_broken = True
            raise
        finally:
            if patience is not None:
                patience.over()

    @contextlib.contextmanager
    def _asleep(self) -> Iterator[None]:
        """Inside, the others see that this rank may have to be woken; several of its threads may be here at once."""
        self._count_sleepers(1)
        try:
            yield
        finally:
            self._count_sleepers(-1)

    def _count_sleepers(self, more: int) -> None:
        with self._counting:
            self._sleepers += more
            if self._sleep_flag is not None:
                self._sleep_flag[0] = self._sleepers > 0

    def _sleep(self, seconds: float) -> None:
        """Until a socket has something, which is read. Of several threads that wait, one does that."""
        self.check_not_forked()
        if not self._polling.acquire(blocking=False):
            time.sleep(min(seconds, NAP))
            return
        try:
            for descriptor, _ in self._poll.poll(seconds * 1000):
                self._read(descriptor)
        finally:
            self._polling.release()

    def _read(self, descriptor: int) -> None:
        """Everything that a socket has: messages for the inbox, wake-ups, or the end of its rank."""
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
            self._gone.add(peer)
            self._poll.unregister(descriptor)

    def check_not_forked(self) -> None:
        """Raises in a process that was forked from the rank: the sockets and the memory are the rank's."""
        if self._is_forked:
            raise ForkedError(
                f"this process was forked from rank {self.rank}, which alone can take part in rounds. In a child "
                "(a data loader's worker, for example) use the model without backward."
            )

    def close(self) -> None:
        self._close()

    def close_in_child(self) -> None:
        """A forked child keeps no socket open: else nobody would learn of the death of the rank itself."""
        self._is_forked = True
        self.close()

    def _lost(self, peers: list[int]) -> Exception:
        error = ReplicaLostError(
            f"rank {self.rank}: rank {listed(peers)} is gone: the process ended, or gave up its replica. Its own "
            "output says why. Start the job again from the last checkpoint (torchrun --max-restarts does).",
            peers,
        )
        return error if self._watch is None else after_break(self._watch, error)

    def _late(
        self,
        peers: list[int],
        limit: float,
        what: str,
        patience: Patience | None,
        late: Callable[[], Exception | None] | None,
    ) -> Exception:
        if patience is not None:
            return patience.too_long(peers)
        return (None if late is None else late()) or RoundTimeoutError(
            f"rank {self.rank}: waited {limit:g} s for {what} from rank {listed(peers)}, whose process is alive. It "
            "is slow, stuck, or went another way: look at what it does (py-spy dump), or give the process group a "
            "longer timeout.",
            peers,
        )


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _in_child() -> None:
    for link in _links:
        link.close_in_child()


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


def close_all(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
