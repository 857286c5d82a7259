"""Whoever else finds the watch's address changes nothing: it hears a nonce, and is turned away."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradsync.watch import visitor as visitors
from gradsync.watch import watch as watch_module
from gradsync.watch import wire
from gradsync.watch.node import Node
from gradsync.watch.notice import How, Notice
from gradsync.watch.tree import Place
from gradsync.watch.watch import Watch
from tests.support.patience import crowding

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
    crowd = [waiting.visitor() for _ in range(1000)]
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


def test_who_will_say_no_more_is_turned_away_at_once(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open: it can still hear, and would keep the thread busy as long as it was borne."""
    monkeypatch.setattr(visitors, "SILENT_SECONDS", 600.0)
    with waiting.visitor() as visitor:
        visitor.shutdown(socket.SHUT_WR)
        visitor.settimeout(5 * crowding())
        assert len(visitor.recv(wire.HELLO_BYTES)) == wire.HELLO_BYTES
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


def frame(message: object) -> bytes:
    said = json.dumps(message).encode()
    return struct.pack("!I", len(said)) + said


NOT_FOR_PYTHON = {
    "nested": struct.pack("!I", 60_000) + b"[" * 60_000,
    "infinite": frame({"is": "position", "at": ["in forward", "GPT", math.inf, 1, "", 0.0]}),
    "huge": frame({"is": "position", "at": ["in forward", "GPT", 1, 1, "", 10**400]}),
    "no kind": frame({}),
    "no position": frame({"is": "position", "at": 5}),
    "no news": frame({"is": "words", "rank": 1}),
    "of no kind": frame({"is": "lost", **Notice(1, How.GONE).pack(), "how": []}),
}


@pytest.mark.parametrize("name", NOT_FOR_PYTHON)
def test_frames_that_python_can_not_take(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each by another error. Its sender is lost; the thread that read it lives, and has nothing to complain of."""
    waiting = Waiting()
    try:
        connected = wire.connect_to(waiting.address, TOKEN, 1, 5)
        connected.sendall(NOT_FOR_PYTHON[name])
        assert within(5, lambda: waiting.node.lost is not None)
        assert waiting.node.is_running
        assert not caplog.records
        connected.close()
    finally:
        waiting.node.end()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda some: st.lists(some, max_size=6) | st.dictionaries(st.text(max_size=5), some, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(["position", "words", "lost", "explain", "heard", "where", "here", "report"])
FIELDS = st.dictionaries(
    st.sampled_from(["at", "rank", "how", "why", "lines", "because", "rounds", "line", "stack", "rows"]), JSON
)


@settings(max_examples=40, deadline=None)
@given(kind=KINDS, fields=FIELDS)
def test_messages_with_fields_that_make_no_sense(kind: str, fields: dict[str, object]) -> None:
    """Whatever a rank says, what follows is heard, or it is lost: never neither."""
    waiting, complaints = Waiting(), Complaints()
    try:
        connected = wire.connect_to(waiting.address, TOKEN, 1, 5)
        connected.sendall(frame({**fields, "is": kind}) + frame(raised().pack() | {"is": "words"}))
        assert within(5, lambda: waiting.node.lost is not None)
        assert waiting.node.is_running
        assert not complaints.found
        connected.close()
    finally:
        complaints.end()
        waiting.node.end()


class Complaints(logging.Handler):
    """Of a thread that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        logging.getLogger("gradsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def end(self) -> None:
        logging.getLogger("gradsync").removeHandler(self)


def raised() -> Notice:
    return Notice(1, How.RAISED, "ValueError: boom")


@contextlib.contextmanager
def flood(waiting: Waiting) -> Iterator[None]:
    """Connections without a pause, of which the last 200 are kept open."""
    held: deque[socket.socket] = deque(maxlen=200)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                if len(held) == held.maxlen:
                    held.popleft().close()
                held.append(waiting.visitor())

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for one in held:
            one.close()


def test_a_rank_comes_through_a_flood(waiting: Waiting) -> None:
    """Also if it was taken for one of those who say nothing, and turned away."""
    with flood(waiting):
        time.sleep(0.2)
        connected = watch_module.reach(waiting.address, TOKEN, 1, 20)
        assert within(5, lambda: waiting.node.is_complete)
    assert waiting.node.lost is None
    connected.close()


def test_a_rank_waits_where_strangers_fill_the_queue() -> None:
    """For Unix sockets that is an error at once, not a wait."""
    listener, address = wire.listen_here()
    listener.listen(1)  # a short one, for the test
    crowd: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            crowd.append(socket.socket(socket.AF_UNIX))
            crowd[-1].setblocking(False)
            crowd[-1].connect("\0" + address.partition(":")[2])
    nodes: list[Node] = []
    place = Place(above=None, members=(1,), leaders=(), above_is_remote=False)
    later = threading.Timer(0.2, lambda: nodes.append(Node(0, [0, 1], place, TOKEN, [listener])))
    later.start()
    try:
        connected = watch_module.reach(address, TOKEN, 1, 20)
        assert within(5, lambda: nodes and nodes[0].is_complete)
        connected.close()
    finally:
        later.join()
        nodes[0].end()
        for one in crowd:
            one.close()


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
