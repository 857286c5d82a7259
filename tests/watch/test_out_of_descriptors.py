"""A rank that has no descriptor left for a connection: its watch waits for one without keeping a core busy."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator

from gradsync.watch import visitor as visitors
from gradsync.watch import watch as watch_module
from gradsync.watch import wire
from tests.support.patience import crowding, wait_until
from tests.support.ranks import on_ranks
from tests.watch.test_unauthorized_connections import TOKEN, Waiting


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[list[int]]:
    """Inside, this process can't open any, but for those that it closes: of these it is given some."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0) for _ in range(20)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, before[1]))
    with contextlib.suppress(OSError):
        while True:  # gaps below the limit
            spare.append(os.dup(0))
    try:
        yield spare
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in spare:
            os.close(one)


@on_ranks(1)
def test_a_watch_sleeps_until_there_is_one() -> None:
    waiting = Waiting()
    with socket.socket() as visitor:
        with no_more_descriptors():
            visitor.connect(("127.0.0.1", waiting.port))  # which the kernel accepts, and this process can't
            began, used = time.monotonic(), time.process_time()
            while time.monotonic() - began < 0.5:
                time.sleep(0.05)
            assert time.process_time() - used < 0.15, "the thread was busy waiting"
        visitor.settimeout(10 * crowding())
        assert len(visitor.recv(wire.HELLO_BYTES)) == wire.HELLO_BYTES
    waiting.still_works()
    waiting.node.end()


@on_ranks(1)
def test_those_who_say_nothing_do_not_keep_the_last_one() -> None:
    """The rank that is meant comes through, though strangers have taken all that there was."""
    visitors.SILENT_SECONDS = 600.0  # in this process, which ends with the test
    waiting = Waiting()
    crowd = [waiting.visitor() for _ in range(10)]
    assert wait_until(lambda: len(waiting.node._visitors) == 10, 5)
    patience = 5 * crowding()  # asked now: it takes a descriptor
    with no_more_descriptors() as spare:
        os.close(spare.pop())  # for this end of the connection
        connected = watch_module.reach(waiting.address, TOKEN, 1, patience)
        began = time.monotonic()
        while not waiting.node.is_complete:
            assert time.monotonic() - began < patience
            time.sleep(0.02)
    assert waiting.node.lost is None
    for one in (connected, *crowd):
        one.close()
    waiting.node.end()
