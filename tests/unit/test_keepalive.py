"""What is done to connections that are not ours, and undone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from gradsync.transport.keepalive import Keepalive

TCP_OPTIONS = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)


def options_of(one: socket.socket) -> list[int]:
    found = [one.getsockopt(socket.IPPROTO_TCP, option) for option in TCP_OPTIONS]
    return [one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *found]


KEPT = [1, 2, 2, 3, 7000]


class Connection:
    """Of this process with itself; what counts as another host is another address."""

    def __init__(self, stack: ExitStack, client: str) -> None:
        listener = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        self.near = socket.create_connection(listener.getsockname(), source_address=(client, 0))
        stack.enter_context(closing(self.near))
        self.far = stack.enter_context(closing(listener.accept()[0]))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_a_connection_with_another_host_is_kept_alive_until_all_have_released_it(stack: ExitStack) -> None:
    one = Connection(stack, "127.0.0.2").near
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 33)
    before = options_of(one)
    keepalive = Keepalive()
    assert options_of(one) == KEPT
    keepalive.hold()
    keepalive.release()
    assert options_of(one) == KEPT
    thread = threading.Thread(target=keepalive.release)  # the last one may be in any thread
    thread.start()
    thread.join()
    assert options_of(one) == before
    assert before[1] == 33


def test_nothing_else_is_touched(stack: ExitStack) -> None:
    here = Connection(stack, "127.0.0.1").near
    pair = [stack.enter_context(closing(one)) for one in socket.socketpair()]
    datagram = stack.enter_context(closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
    datagram.connect(("127.0.0.2", 9))
    before = options_of(here)
    keepalive = Keepalive()
    assert options_of(here) == before
    for one in (pair[0], datagram):
        assert not one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    keepalive.release()


def test_a_blocking_connection_stays_blocking(stack: ExitStack) -> None:
    """c10d's, of which it reads: also in a program that has set a default timeout for Python's sockets."""
    one = Connection(stack, "127.0.0.2").near
    one.setblocking(True)
    stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
    socket.setdefaulttimeout(5.0)
    keepalive = Keepalive()
    keepalive.release()
    assert os.get_blocking(one.fileno())


def test_a_descriptor_that_has_become_another_connection_is_left_alone(stack: ExitStack) -> None:
    first = Connection(stack, "127.0.0.2").near
    other = Connection(stack, "127.0.0.1").near
    other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 44)
    keepalive = Keepalive()
    os.dup2(other.fileno(), first.fileno())
    keepalive.release()
    assert options_of(other)[:2] == [1, 44]
