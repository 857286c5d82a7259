"""Who may connect to a rank: those of the same user who have the token, and nobody else."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from gradsync.transport import link
from gradsync.transport.link import HandshakeError
from tests.support.ranks import Ranks

TOKEN = bytes(range(16))
NOBODY = 65534
PATIENT = 30.0  # seconds that nobody needs: this takes milliseconds, or many times that on a busy machine
# Python 3.12 and later warn of forks beside threads, which gloo has.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
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
    assert status == 0, f"the stranger ended with {status}"


def knock(name: str, say: bytes | None, user: int | None = None) -> int:
    """A stranger at the door of a rank: 0 if it was sent away, 1 if it was let in."""
    if user is not None:
        os.setuid(user)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(PATIENT)
        stranger.connect("\0" + name)
        if say is not None:
            stranger.send(say)
        try:
            return int(bool(stranger.recv(100)))
        except ConnectionResetError:
            return 0


def greeting(token: bytes, rank: int = 1) -> bytes:
    return link._GREETING.pack(token, rank)


# What they say, and who they are. The last one has the token, but is somebody else.
STRANGERS = [(greeting(bytes(16)), None), (b"?", None), (None, None), (greeting(TOKEN, rank=7), None)]
SOMEBODY_ELSE = (greeting(TOKEN), NOBODY)


def meet() -> None:
    """Two ranks connect, the second one late: strangers have come by then."""
    door = link.Door()
    names: list[str] = [""] * 2
    dist.all_gather_object(names, door.name)
    if dist.get_rank() == 1:
        time.sleep(0.3)
        connected = link.connect(door, 1, {0: names[0]}, TOKEN, PATIENT, lambda rank: False)
        connected.send(0, b"good morning", PATIENT)
    else:
        with ExitStack() as strangers:
            for say, user in [*STRANGERS, *([SOMEBODY_ELSE] if os.geteuid() == 0 else [])]:
                strangers.enter_context(beside(partial(knock, door.name, say, user)))
            connected = link.connect(door, 0, {1: names[1]}, TOKEN, PATIENT, lambda rank: False)
        assert connected.peers == [1]
        assert connected.receive(1, PATIENT)[0] == b"good morning"
    dist.barrier()


def test_strangers_are_sent_away_and_the_ranks_meet(ranks: Ranks) -> None:
    ranks(meet, 2)


def anothers_door(user: int) -> None:
    """A door under the right name that somebody else has opened: the token is not told there."""
    reading, writing = os.pipe()

    def impostor() -> int:
        os.setuid(user)
        door = link.Door()
        os.write(writing, door.name.encode())
        visitor, _ = door.socket.accept()
        return len(visitor.recv(100))

    with beside(impostor):
        name = os.read(reading, 100).decode()
        with pytest.raises(HandshakeError, match=f"rank 0 belongs to user {user}, this rank to user {os.geteuid()}"):
            link.connect(link.Door(), 1, {0: name}, TOKEN, PATIENT, lambda rank: False)


@needs_root
def test_a_door_of_another_user(ranks: Ranks) -> None:
    ranks(anothers_door, 1, NOBODY)


def wrong_answer() -> None:
    """A peer of the same user without the token."""
    door = link.Door()

    def impostor() -> int:
        visitor, _ = door.socket.accept()
        visitor.recv(100)  # closed before it is read, the answer would be lost
        visitor.send(greeting(bytes(16), rank=0))
        return 0

    with beside(impostor), pytest.raises(HandshakeError, match="rank 0 answered with a wrong token"):
        link.connect(link.Door(), 1, {0: door.name}, TOKEN, PATIENT, lambda rank: False)
    door.close()
    with pytest.raises(HandshakeError, match="rank 1 could not reach rank 0: Connection refused"):
        link.connect(link.Door(), 1, {0: "gradsync-nobody"}, TOKEN, PATIENT, lambda rank: False)
    with pytest.raises(HandshakeError, match="rank 0 waited in vain for rank 1, 2"):
        link.connect(link.Door(), 0, {1: "", 2: ""}, TOKEN, 0.2, lambda rank: False)
    began = time.monotonic()
    with pytest.raises(HandshakeError, match="rank 0 waited in vain for rank 1, 2"):
        link.connect(link.Door(), 0, {1: "", 2: ""}, TOKEN, 60, lambda rank: rank == 2)
    assert time.monotonic() - began < PATIENT  # and not 60 s


def test_peers_that_are_none(ranks: Ranks) -> None:
    ranks(wrong_answer, 1)


def crowded() -> None:
    """A message to a rank that has not read thousands of wake-ups waits for it, as for any slow rank."""
    door = link.Door()
    names: list[str] = [""] * 2
    dist.all_gather_object(names, door.name)
    rank = dist.get_rank()
    connected = link.connect(door, rank, {1 - rank: names[1 - rank]}, TOKEN, PATIENT, lambda rank: False)
    if rank == 0:
        for _ in range(5000):
            connected.wake([1])
        connected.send(1, b"and now?", PATIENT)
    else:
        time.sleep(0.2)
        assert connected.receive(0, PATIENT)[0] == b"and now?"
    dist.barrier()


def test_wake_ups_do_not_crowd_out_messages(ranks: Ranks) -> None:
    ranks(crowded, 2)


def flood(name: str, user: int | None, seconds: float) -> int:
    """Connects again and again, says nothing, and keeps what it gets."""
    if user is not None:
        os.setuid(user)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    held: list[socket.socket] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and len(held) < 4000:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.setblocking(False)
        try:
            stranger.connect("\0" + name)
        except BlockingIOError:  # the backlog is full
            stranger.close()
            time.sleep(0.001)
        except OSError:  # the door is closed: the ranks have met
            return 0
        else:
            held.append(stranger)
    return 0


def meet_in_a_flood(user: int | None) -> None:
    """With few descriptors left, of which strangers must not hold any."""
    door = link.Door()
    names: list[str] = [""] * 2
    dist.all_gather_object(names, door.name)
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(0.5)
        connected = link.connect(door, 1, {0: names[0]}, TOKEN, 60, lambda rank: False)
    else:
        with beside(partial(flood, door.name, user, 60.0)):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            # Root of the test may have many open already.
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 100, hard))
            connected = link.connect(door, 0, {1: names[1]}, TOKEN, 60, lambda rank: False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert connected.peers == [1 - rank]
    dist.barrier()


@needs_root
def test_a_flood_of_another_user(ranks: Ranks) -> None:
    ranks(meet_in_a_flood, 2, NOBODY, limit=60.0)


def test_a_flood_of_the_same_user(ranks: Ranks) -> None:
    ranks(meet_in_a_flood, 2, None, limit=60.0)
