"""Who may connect to a rank: those of the same user who have the token, and nobody else."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.transport import handshake
from gradsync.transport.handshake import HandshakeError
from tests.support.children import FORKS_BESIDE_THREADS
from tests.support.ranks import Ranks, on_ranks

TOKEN = bytes(range(16))
NOBODY = 65534
PATIENT = 30.0  # seconds that nobody needs: this takes milliseconds, or many times that on a busy machine
pytestmark = FORKS_BESIDE_THREADS
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def beside(body: Callable[[], int]) -> Iterator[None]:
    """A process that does something meanwhile; fails unless it ends with 0."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = body()
        finally:
            os._exit(code)
    yield
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the other process ended with {status}"


def try_to_connect(name: str, say: bytes | None, user: int | None = None) -> int:
    """A process that is no rank connects to one: 0 if it was refused, 1 if it was admitted."""
    if user is not None:
        os.setuid(user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(PATIENT)
        peer.connect("\0" + name)
        if say is not None:
            peer.send(say)
        try:
            return int(bool(peer.recv(100)))
        except ConnectionResetError:
            return 0


def greeting(token: bytes, rank: int = 1) -> bytes:
    return handshake._GREETING.pack(token, rank)


# What they say, and who they are. The last one has the token, but is somebody else.
UNAUTHORIZED = [(greeting(bytes(16)), None), (b"?", None), (None, None), (greeting(TOKEN, rank=7), None)]
SOMEBODY_ELSE = (greeting(TOKEN), NOBODY)


@on_ranks(2)
def test_unauthorized_peers_are_refused_and_the_ranks_connect() -> None:
    """Two ranks connect, the second one late: others have tried to by then."""
    listener = handshake.Listener()
    names: list[str] = [""] * 2
    dist.all_gather_object(names, listener.name)
    if dist.get_rank() == 1:
        time.sleep(0.3)
        connected = handshake.connect(listener, 1, {0: names[0]}, TOKEN, PATIENT, lambda rank: False)
        connected.send(0, b"good morning", PATIENT)
    else:
        with ExitStack() as others:
            for say, user in [*UNAUTHORIZED, *([SOMEBODY_ELSE] if os.geteuid() == 0 else [])]:
                others.enter_context(beside(partial(try_to_connect, listener.name, say, user)))
            connected = handshake.connect(listener, 0, {1: names[1]}, TOKEN, PATIENT, lambda rank: False)
        assert connected.peers == (1,)
        assert connected.receive(1, PATIENT)[0] == b"good morning"
    dist.barrier()


@needs_root
@on_ranks(1)
def test_a_listener_of_another_user() -> None:
    """A listener under the right name that is another user's: the token is not told there."""
    reading, writing = os.pipe()

    def impostor() -> int:
        os.setuid(NOBODY)
        listener = handshake.Listener()
        os.write(writing, listener.name.encode())
        incoming, _ = listener.socket.accept()
        return len(incoming.recv(100))

    with beside(impostor):
        name = os.read(reading, 100).decode()
        with pytest.raises(HandshakeError, match=f"rank 0 belongs to user {NOBODY}, this rank to user {os.geteuid()}"):
            handshake.connect(handshake.Listener(), 1, {0: name}, TOKEN, PATIENT, lambda rank: False)


@on_ranks(1)
def test_peers_that_are_none() -> None:
    """A peer of the same user without the token."""
    listener = handshake.Listener()

    def impostor() -> int:
        incoming, _ = listener.socket.accept()
        incoming.recv(100)  # closed before it is read, the answer would be lost
        incoming.send(greeting(bytes(16), rank=0))
        return 0

    with beside(impostor), pytest.raises(HandshakeError, match="rank 0 answered with a wrong token"):
        handshake.connect(handshake.Listener(), 1, {0: listener.name}, TOKEN, PATIENT, lambda rank: False)
    listener.close()
    with pytest.raises(HandshakeError, match="rank 1 could not reach rank 0: Connection refused"):
        handshake.connect(handshake.Listener(), 1, {0: "gradsync-nobody"}, TOKEN, PATIENT, lambda rank: False)
    with pytest.raises(HandshakeError, match="rank 0 waited in vain for rank 1, 2"):
        handshake.connect(handshake.Listener(), 0, {1: "", 2: ""}, TOKEN, 0.2, lambda rank: False)
    began = time.monotonic()
    with pytest.raises(HandshakeError, match="rank 0 waited in vain for rank 1, 2"):
        handshake.connect(handshake.Listener(), 0, {1: "", 2: ""}, TOKEN, 60, lambda rank: rank == 2)
    assert time.monotonic() - began < PATIENT  # and not 60 s


@on_ranks(2)
def test_wake_ups_do_not_crowd_out_messages() -> None:
    """A message to a rank that has not read thousands of wake-ups waits for it, as for any slow rank."""
    listener = handshake.Listener()
    names: list[str] = [""] * 2
    dist.all_gather_object(names, listener.name)
    rank = dist.get_rank()
    connected = handshake.connect(listener, rank, {1 - rank: names[1 - rank]}, TOKEN, PATIENT, lambda rank: False)
    if rank == 0:
        for _ in range(5000):
            connected.wake(1)
        connected.send(1, b"and now?", PATIENT)
    else:
        time.sleep(0.2)
        assert connected.receive(0, PATIENT)[0] == b"and now?"
    dist.barrier()


def stranger(name: str) -> socket.socket:
    """A connection that has said nothing."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.setblocking(False)
    try:
        peer.connect("\0" + name)
    except OSError:
        peer.close()
        raise
    return peer


def meet(listener: handshake.Listener) -> list[str]:
    names: list[str] = [""] * 2
    dist.all_gather_object(names, listener.name)
    return names


@on_ranks(2)
def test_a_rank_waits_where_strangers_fill_the_queue() -> None:
    """For Unix sockets that is an error at once, not a wait."""
    listener, crowd = handshake.Listener(), []
    rank = dist.get_rank()
    if rank == 0:
        listener.socket.listen(1)  # a short one, for the test
        with contextlib.suppress(BlockingIOError):
            while True:
                crowd.append(stranger(listener.name))
    names = meet(listener)
    if rank == 0:
        time.sleep(0.2)
    connected = handshake.connect(listener, rank, {1 - rank: names[1 - rank]}, TOKEN, PATIENT, lambda rank: False)
    assert connected.peers == (1 - rank,)
    for one in crowd:
        one.close()
    dist.barrier()


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_a_rank_that_was_taken_for_a_stranger_comes_again(when: str) -> None:
    """In a crowd, one that has connected and not greeted yet; or whose greeting came at the moment of being refused."""
    listener, crowd = handshake.Listener(), []
    names, rank = meet(listener), dist.get_rank()
    seen: list[socket.socket] = []

    def check_user_late(connected: socket.socket, name: str, check: Any = handshake._check_user) -> None:
        if not seen:
            seen.append(connected)
            assert select.select([connected], [], [], PATIENT)[0], "it was not turned away"
        check(connected, name)

    def refuse_once(incoming: socket.socket, token: bytes, rank_of: Any = handshake._rank_of) -> int | None:
        found: int | None = rank_of(incoming, token)
        if found is None or seen:
            return found
        seen.append(incoming)
        return None

    if when == "after" and rank == 0:
        handshake._rank_of = refuse_once
    if when == "before" and rank == 1:
        handshake._check_user = check_user_late
    if when == "before" and rank == 0:
        # Once rank 1 waits in the queue, so many that it becomes the one that has been silent for longest.
        assert select.select([listener.socket], [], [], PATIENT)[0]
        crowd = [stranger(listener.name) for _ in range(handshake._MOST_SILENT)]
    connected = handshake.connect(listener, rank, {1 - rank: names[1 - rank]}, TOKEN, PATIENT, lambda rank: False)
    assert connected.peers == (1 - rank,)
    assert len(seen) == ((rank == 1) if when == "before" else (rank == 0))
    for one in crowd:
        one.close()
    dist.barrier()


def come_and_go(listener: handshake.Listener) -> int:
    """Connects and closes at once, until nobody listens any more."""
    listener.close()  # in this process, which was forked from the one that listens
    while True:
        try:
            stranger(listener.name).close()
        except BlockingIOError:
            time.sleep(0.001)
        except ConnectionRefusedError:
            return 0


@on_ranks(1)
def test_strangers_that_keep_coming_do_not_prolong_a_wait() -> None:
    """Neither to its limit nor to the news that the rank does not come."""
    has_failed: Callable[[int], bool]
    for seconds, has_failed in ((0.3, lambda rank: False), (600.0, lambda rank: True)):
        listener = handshake.Listener()
        with ExitStack() as others:
            for _ in range(3):
                others.enter_context(beside(partial(come_and_go, listener)))
            with pytest.raises(HandshakeError, match="rank 0 waited in vain for rank 1"):
                handshake.connect(listener, 0, {1: ""}, TOKEN, seconds, has_failed)


def flood(name: str, user: int | None, seconds: float) -> int:
    """Connects again and again, says nothing, and keeps what it gets."""
    if user is not None:
        os.setuid(user)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    held: list[socket.socket] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and len(held) < 4000:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.setblocking(False)
        try:
            peer.connect("\0" + name)
        except BlockingIOError:  # the backlog is full
            peer.close()
            time.sleep(0.001)
        except OSError:  # the listener is closed: the ranks are connected
            return 0
        else:
            held.append(peer)
    return 0


def connect_in_a_flood(user: int | None) -> None:
    """With few descriptors left, of which unauthorized peers must not hold any."""
    listener = handshake.Listener()
    names: list[str] = [""] * 2
    dist.all_gather_object(names, listener.name)
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(0.5)
        connected = handshake.connect(listener, 1, {0: names[0]}, TOKEN, 60, lambda rank: False)
    else:
        with beside(partial(flood, listener.name, user, 60.0)):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            # Root of the test may have many open already. Fewer are left than silent peers may hold otherwise.
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 10, hard))
            connected = handshake.connect(listener, 0, {1: names[1]}, TOKEN, 60, lambda rank: False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert connected.peers == (1 - rank,)
    dist.barrier()


@needs_root
def test_a_flood_of_another_user(ranks: Ranks) -> None:
    ranks(connect_in_a_flood, 2, NOBODY, limit=60.0)


def test_a_flood_of_the_same_user(ranks: Ranks) -> None:
    ranks(connect_in_a_flood, 2, None, limit=60.0)
