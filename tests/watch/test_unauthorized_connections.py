"""Whoever else finds the watch's address changes nothing: it hears a nonce, and is turned away."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradsync.watch import visitor as visitors
from gradsync.watch import wire
from gradsync.watch.node import Node
from gradsync.watch.tree import Place
from gradsync.watch.watch import Watch

TOKEN = b"t" * 32


def within(seconds: float, condition: object) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.005)
    return False


class Waiting:
    """Rank 0, which waits for rank 1."""

    def __init__(self) -> None:
        listener, self.address = wire.listen_on("127.0.0.1")
        self.port = int(self.address.rpartition(":")[2])
        place = Place(above=None, members=(), leaders=(1,), above_is_remote=True)
        self.node = Node(0, [0, 1], place, TOKEN, [listener])

    def visitor(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def still_works(self) -> None:
        """The rank that is meant can connect, and is heard."""
        connected = wire.connect_to(self.address, TOKEN, 1, 5)
        assert within(5, lambda: self.node.is_complete)
        assert self.node.lost is None
        connected.close()
        assert within(5, lambda: self.node.lost is not None)
        assert self.node.lost is not None
        assert self.node.lost.rank == 1


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.node.end()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=4 * wire.ANSWER_BYTES), pieces=st.integers(1, 4))
def test_garbage(waiting: Waiting, data: bytes, pieces: int) -> None:
    with waiting.visitor() as visitor:
        assert len(visitor.recv(wire.HELLO_BYTES)) == wire.HELLO_BYTES
        with contextlib.suppress(OSError):  # turned away in the middle
            for start in range(pieces):
                visitor.sendall(data[start::pieces])
    assert not waiting.node.notices
    assert not waiting.node.is_complete


def test_after_garbage_the_rank_can_still_connect(waiting: Waiting) -> None:
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10_000, struct.pack("!I", 2**31)):
        with waiting.visitor() as visitor:
            visitor.sendall(data)
    waiting.still_works()


def test_a_wrong_token(waiting: Waiting) -> None:
    with pytest.raises(OSError, match=r"."):
        wire.connect_to(waiting.address, b"x" * 32, 1, 5)
    waiting.still_works()


def test_a_rank_that_is_not_expected(waiting: Waiting) -> None:
    with pytest.raises(OSError, match=r"."):
        wire.connect_to(waiting.address, TOKEN, 7, 5)
    waiting.still_works()


def test_what_was_overheard_is_of_no_use(waiting: Waiting) -> None:
    """The answer to one challenge is none to another."""
    first = waiting.visitor()
    overheard = wire.answer(first.recv(wire.HELLO_BYTES), TOKEN, 1)
    with waiting.visitor() as second:
        second.recv(wire.HELLO_BYTES)
        second.sendall(overheard)
        assert second.recv(32) == b""  # closed without a proof
    first.close()
    waiting.still_works()


def test_a_listener_that_does_not_know_the_token_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend() -> None:
            visitor, _ = false.accept()
            visitor.sendall(wire.hello())
            visitor.recv(wire.ANSWER_BYTES)
            visitor.sendall(b"p" * 32)
            visitor.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(wire.WireError, match="does not know the token"):
            wire.connect_to(f"tcp:127.0.0.1:{false.getsockname()[1]}", TOKEN, 1, 5)
        thread.join()


def test_a_thousand_who_say_nothing(waiting: Waiting) -> None:
    """No more of them are kept than a few; the one that is meant comes through between them."""
    crowd = [waiting.visitor() for _ in range(300)]
    waiting.still_works()
    for one in crowd:
        one.close()
    assert len(waiting.node._visitors) <= visitors.MOST_SILENT


def test_a_slow_writer_is_given_up(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "SILENT_SECONDS", 0.2)
    with waiting.visitor() as visitor:
        visitor.recv(wire.HELLO_BYTES)
        visitor.sendall(b"a")
        assert visitor.recv(1) == b""
    waiting.still_works()


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=1, max_size=300))
def test_frames_that_make_no_sense(data: bytes) -> None:
    """A rank that speaks nonsense, after it has proven who it is, is a rank that is lost; nothing else happens."""
    waiting = Waiting()
    try:
        connected = wire.connect_to(waiting.address, TOKEN, 1, 5)
        connected.sendall(data)
        connected.close()
        assert within(5, lambda: waiting.node.lost is not None)
    finally:
        waiting.node.end()


def test_a_frame_that_is_too_long() -> None:
    waiting = Waiting()
    try:
        connected = wire.connect_to(waiting.address, TOKEN, 1, 5)
        connected.sendall(struct.pack("!I", wire.MOST_BYTES + 1))
        assert within(5, lambda: waiting.node.lost is not None)
        connected.close()
    finally:
        waiting.node.end()


def test_nobody_listens_once_everybody_is_there(waiting: Waiting) -> None:
    connected = wire.connect_to(waiting.address, TOKEN, 1, 5)
    assert within(5, lambda: waiting.node.is_complete)
    assert within(5, lambda: not waiting.node._listeners)
    with pytest.raises(ConnectionRefusedError):
        waiting.visitor()
    connected.close()


def test_a_watch_ends_with_its_last_user() -> None:
    before = threading.active_count()
    waiting = Waiting()
    watch = Watch(waiting.node)
    assert threading.active_count() == before + 1
    del watch
    assert within(5, lambda: threading.active_count() == before)
