"""Strangers talk to all listeners of a job while it comes up: it trains as if they were not there."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradsync.transport import handshake, rendezvous, shared_watch
from gradsync.watch import visitor as visitors
from gradsync.watch import watch as watches
from gradsync.watch import wire
from tests.ranks.memory import be_on_host
from tests.ranks.small import assert_gradients, backward, build, make, mean_gradients, same_everywhere
from tests.ranks.strangers import Stranger, Strangers
from tests.ranks.test_belongings import held_at_rest, settles
from tests.support.children import FORKS_BESIDE_THREADS
from tests.support.patience import wait_until
from tests.support.ranks import Ranks

pytestmark = FORKS_BESIDE_THREADS
PLACES = ["one host", "two hosts"]  # Unix sockets, and the host link; or TCP
HUGE = bytes(150_000)  # more than is taken of anybody; less than the kernel refuses
# A thousand connections, of which a third go to each of three listeners: the host link's of both ranks, and the watch.
A_THIRD = 334
SOME_OF_ALL = [
    Stranger([]),
    Stranger([], stays=False),
    Stranger([], shuts=socket.SHUT_RD),
    Stranger([], shuts=socket.SHUT_WR),
    Stranger([b"\0"] * 1000),
    Stranger([HUGE] * 100),
    Stranger([HUGE, HUGE], shuts=socket.SHUT_RD),
    Stranger([1000], gives=True),
]


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("gradsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def be_patient() -> None:
    """Limits that a busy machine with a crowd of strangers does not reach. A hang is ended by the harness."""
    rendezvous.HANDSHAKE_SECONDS, rendezvous.VERDICT_SECONDS, watches.CONNECT_SECONDS = 60.0, 120.0, 60.0
    visitors.SILENT_SECONDS = 600.0  # that strangers go is not to be a matter of time either


def train(place: str) -> None:
    """A job from its start to its end, next to one process."""
    module: Any = make("replicate", build(), transport="shared_memory" if place == "one host" else "process_group")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        wanted = mean_gradients(module, step)
        backward(module, step)
        assert_gradients(module, wanted)
        optimizer.step()
    same_everywhere(module)
    (watch,) = shared_watch._watches.values()
    assert watch.is_complete
    assert not watch.notices
    assert wait_until(lambda: not watch._node._listeners and not watch._node._visitors, 2), "strangers are still heard"
    dist.barrier()  # no rank leaves before all have looked


def trains_among(place: str, crowds: list[list[Stranger]]) -> None:
    be_patient()
    if place == "two hosts":
        be_on_host(dist.get_rank())
    strangers, log = Strangers(), Log()
    train(place)  # alone: its handshakes are what is played back later
    if dist.get_rank() == 0:
        assert strangers.recorded[socket.SOCK_STREAM]
        assert strangers.recorded[socket.SOCK_SEQPACKET] or place == "two hosts"
    before = held_at_rest()
    for crowd in crowds:
        dist.barrier()
        strangers.crowd, strangers.count = crowd, 100
        train(place)
        strangers.end()
        assert settles(before) == before
    assert not log.lines
    dist.barrier()


def trains_among_a_thousand(place: str, folder: Path) -> None:
    """The last rank comes when all of them are there."""
    be_patient()
    rank, all_have_come = dist.get_rank(), folder / "all have come"
    if place == "two hosts":
        be_on_host(rank)
    strangers, log = Strangers(), Log()
    train(place)
    train(place)
    before, peak_before = held_at_rest(), peak()
    dist.barrier()

    def connect(*args: Any, connect: Any = watches.connect) -> Any:
        """Of rank 0, whose watch accepts from here on."""
        made = connect(*args)
        strangers.have_come()
        all_have_come.touch()
        return made

    def reach(*args: Any, reach: Any = watches.reach) -> Any:
        assert wait_until(all_have_come.exists, 60)
        return reach(*args)

    if rank == 0:
        watches.connect = connect  # type: ignore[assignment]
    else:
        watches.reach = reach  # type: ignore[assignment]
    strangers.crowd, strangers.count = SOME_OF_ALL, A_THIRD
    train(place)
    strangers.end()
    assert settles(before) == before
    assert peak() - peak_before < 16 * 1024, "kilobytes more than without strangers"
    assert not log.lines
    dist.barrier()


def peak() -> int:
    """The most kilobytes of memory that this process ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("place", PLACES)
def test_a_thousand_connections(ranks: Ranks, tmp_path: Path, place: str) -> None:
    ranks(trains_among_a_thousand, 2, place, tmp_path, limit=60.0)


WORDS = st.one_of(
    st.binary(max_size=100),
    st.integers(1, wire.ANSWER_BYTES),
    st.sampled_from(
        [
            HUGE,
            b"",
            bytes(wire.ANSWER_BYTES),
            handshake._GREETING.pack(bytes(16), 1),
            wire.answer(b"gsw1" + bytes(16), b"wrong", 1),
        ]
    ),
)
SPEECHES = st.lists(WORDS, max_size=3) | st.binary(min_size=20, max_size=60).map(
    lambda data: [data[at : at + 1] for at in range(len(data))]  # byte by byte
)
STRANGERS = st.builds(
    Stranger,
    SPEECHES,
    st.sampled_from([None, socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(crowds=st.lists(st.lists(STRANGERS, min_size=4, max_size=12), min_size=3, max_size=3))
def test_whatever_they_say(ranks: Ranks, place: str, crowds: list[list[Stranger]]) -> None:
    ranks(trains_among, 2, place, crowds, limit=60.0)
