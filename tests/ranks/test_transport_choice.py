"""Which transport a group gets: the same on all ranks, whatever each of them wished for or could do."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import _torch
from gradsync.errors import GradsyncError, InvalidOptionError, ReplicaLostError, SharedMemoryError
from gradsync.transport import handshake, rendezvous
from gradsync.transport.choice import choose
from tests.ranks.memory import train, transport_of
from tests.ranks.small import FRONTS, build, make, same_everywhere
from tests.support.outcome import End, assert_raised
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks, on_ranks

# --- wishes ------------------------------------------------------------------------------------------------


def chosen(front: str, wish: str, variable: str, **options: Any) -> tuple[str, str]:
    os.environ["GRADSYNC_TRANSPORT"] = variable
    module = build()
    replica = make(front, module, transport=wish, **options)
    found = transport_of(replica)
    train(replica)
    same_everywhere(module)
    return found.name, found.reason


@FRONTS
@pytest.mark.parametrize(
    ("wish", "variable", "name", "reason"),
    [
        ("auto", "", "shared_memory", "share a host"),
        ("shared_memory", "", "shared_memory", "share a host"),
        ("hierarchical", "", "hierarchical", "1 host"),
        ("process_group", "", "process_group", "asked for"),
        ("auto", "process_group", "process_group", "asked for"),
        ("auto", "hierarchical", "hierarchical", "1 host"),
        ("shared_memory", "process_group", "shared_memory", "share a host"),  # the argument counts more
    ],
)
def test_wishes(ranks: Ranks, front: str, wish: str, variable: str, name: str, reason: str) -> None:
    for found, why in ranks(chosen, 2, front, wish, variable):
        assert found == name
        assert reason in why


def test_one_rank_needs_no_transport(ranks: Ranks) -> None:
    assert ranks(chosen, 1, "replicate", "auto", "") == [("process_group", "there is one rank")]


def test_nothing_is_communicated_where_that_was_asked_for(ranks: Ranks) -> None:
    for name, reason in ranks(chosen, 2, "replicate", "auto", "", init_sync="none"):
        assert name == "process_group"
        assert "nothing may be communicated" in reason


def test_a_wish_for_shared_memory_is_one_for_communicating(ranks: Ranks) -> None:
    assert ranks(chosen, 2, "replicate", "shared_memory", "", init_sync="none")[1][0] == "shared_memory"


def test_statistics_tell(ranks: Ranks) -> None:
    assert ranks(told_by_statistics, 2) == ["shared_memory", "shared_memory"]


def told_by_statistics() -> str:
    module = build()
    make("replicate", module)
    return gradsync.statistics(module).transport.split(":")[0]


def wish_by_rank(wishes: list[str]) -> None:
    make("replicate", build(), transport=wishes[dist.get_rank()])


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        (["auto", "process_group", "auto"], "'auto' on rank 0, 2, 'process_group' on rank 1"),
        (["process_group", "shared_memory", "hierarchical"], "'hierarchical' on rank 2"),
    ],
)
def test_wishes_that_differ(ranks: Ranks, wishes: list[str], text: str) -> None:
    outcomes = ranks.outcomes(wish_by_rank, 3, wishes)
    assert_raised(outcomes, InvalidOptionError, "same transport", text)
    assert [f"rank {number}:" in str(one.exception) for number, one in enumerate(outcomes)] == [True] * 3


def wish_without_a_bench(wishes: list[str]) -> None:
    """With a store that ends with rank 0, which is the first to know."""
    dist.init_process_group("gloo")
    read = _torch.read_all

    def slowly(*args: Any) -> Any:
        time.sleep(0.3)
        return read(*args)

    if dist.get_rank() == 2:
        _torch.read_all = slowly  # type: ignore[assignment]
    wish_by_rank(wishes)


def test_all_learn_why_before_the_store_is_gone(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(wish_without_a_bench, 3, ["auto", "process_group", "auto"], backend=None)
    assert_raised(outcomes, InvalidOptionError, "'process_group' on rank 1")


def variable_by_rank(values: list[str]) -> None:
    os.environ["GRADSYNC_TRANSPORT"] = values[dist.get_rank()]
    make("replicate", build())


@pytest.mark.parametrize("values", [["telepathy", "telepathy"], ["auto", "telepathy"]])
def test_a_variable_that_makes_no_sense(ranks: Ranks, values: list[str]) -> None:
    """On one rank only, the others must not wait for it."""
    assert_raised(ranks.outcomes(variable_by_rank, 2, values), InvalidOptionError, "telepathy")


def on_the_meta_device(wish: str) -> str:
    """The nearest thing to a GPU that there is everywhere."""
    group = dist.group.WORLD
    assert group is not None
    found = choose(group, wish, [torch.empty(2, device="meta" if dist.get_rank() else "cpu")])
    return f"{found.name}: {found.reason}"


def test_parameters_elsewhere(ranks: Ranks) -> None:
    assert set(ranks(on_the_meta_device, 2, "auto")) == {"process_group: rank 1: has parameters on meta"}
    outcomes = ranks.outcomes(on_the_meta_device, 2, "shared_memory")
    assert_raised(outcomes, SharedMemoryError, "'shared_memory' can't be had: rank 1: has parameters on meta")


def on_hosts(wish: str, places: list[str]) -> str:
    handshake.location = lambda: places[dist.get_rank()]
    found = transport_of(make("replicate", build(), transport=wish))
    return f"{found.name}: {found.reason}"


def test_several_hosts(ranks: Ranks) -> None:
    assert ranks(on_hosts, 3, "auto", ["a", "b", "a"]) == ["hierarchical: 3 ranks are on 2 hosts"] * 3
    alone = "process_group: each rank is on a host of its own"
    assert ranks(on_hosts, 2, "auto", ["a", "b"]) == [alone] * 2
    outcomes = ranks.outcomes(on_hosts, 3, "shared_memory", ["a", "b", "a"])
    assert_raised(outcomes, SharedMemoryError, re.escape("the ranks are on 2 hosts (0 2 | 1)"))
    outcomes = ranks.outcomes(on_hosts, 2, "hierarchical", ["a", "b"])
    assert_raised(outcomes, SharedMemoryError, "host of its own")


# --- a handshake that fails --------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def no_more_files(free: int) -> None:
    """Leaves this process so many descriptors."""
    taken = [os.dup(0) for _ in range(free + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for one in taken:
        os.close(one)


def no_files_for_a_listener() -> None:
    no_more_files(0)


def no_files_for_connections() -> None:
    no_more_files(1)


def no_files_for_memory() -> None:
    no_more_files(2)


def unreachable() -> None:
    """As in another container that happens to have the same network namespace, or behind a seccomp filter."""
    listener = handshake.Listener

    def elsewhere() -> handshake.Listener:
        made = listener()
        made.name += "-but-not-here"
        return made

    handshake.Listener = elsewhere  # type: ignore[misc, assignment]


def failing(fault: Callable[[], None], faulty: int, wish: str) -> tuple[str, str, list[str], str]:
    """Without connections of its own and without a watch: the fault must meet the handshake, not gloo or a listener of
    the watch, which turns ranks away for as long as it is short of descriptors (10 s), and does without them then.
    """
    os.environ["GRADSYNC_WATCH"] = "0"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    dist.init_process_group("gloo")  # with a store behind a socket: one in a file would need descriptors
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        dist.barrier()
        return "", "", [], ""
    log = Lines()
    logging.getLogger("gradsync").addHandler(log)
    if dist.get_rank() == faulty:
        fault()
    began = time.monotonic()
    try:
        found = choose(group, wish, [], dedicated=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert seconds_since(began) < rendezvous.HANDSHAKE_SECONDS / 2, "nobody waits for a rank that has said no"
    module: Any = make("replicate", build(), process_group=group, transport="process_group")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    optimizer.step()
    same_everywhere(module, group)
    dist.barrier()
    return found.name, found.reason, log.lines, gradsync.fingerprint(module)


FAULTS = [
    (no_files_for_a_listener, (0, 1, 2), r"rank \d:? could not open a socket: Too many open files"),
    (no_files_for_connections, (0, 1, 2), "Too many open files"),
    (no_files_for_memory, (0, 1, 2), "[Tt]oo many open files"),
    (unreachable, (0, 1), "could not reach rank|waited in vain for rank"),  # nobody connects to the last rank
]


@pytest.mark.parametrize(("fault", "faulty", "text"), [(f, rank, text) for f, those, text in FAULTS for rank in those])
def test_auto_falls_back(ranks: Ranks, fault: Callable[[], None], faulty: int, text: str) -> None:
    found = ranks(failing, 4, fault, faulty, "auto", backend=None)[:3]
    assert {name for name, *_ in found} == {"process_group"}
    assert len({reason for _, reason, *_ in found}) == 1
    assert re.search(text, found[0][1]), found[0][1]
    assert f"rank {faulty}" in found[0][1]
    about_transports = [
        [line for line in lines if "the watch could not be connected" not in line] for _, _, lines, _ in found
    ]
    assert [len(lines) for lines in about_transports] == [1, 0, 0]
    assert found[0][1] in about_transports[0][0]


def test_what_was_asked_for_does_not_fall_back(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(failing, 4, unreachable, 0, "shared_memory", backend=None, grace=3)
    assert_raised(outcomes[:3], SharedMemoryError, "'shared_memory' can't be had: .*could not reach rank 0")


def dies_in_the_handshake() -> None:
    rendezvous.HANDSHAKE_SECONDS, rendezvous.VERDICT_SECONDS = 0.5, 1.0
    if dist.get_rank() == 1:
        handshake.connect = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    make("replicate", build())


def test_a_rank_that_dies_in_the_handshake_is_named(ranks: Ranks) -> None:
    first, killed, last = ranks.outcomes(dies_in_the_handshake, 3)
    assert killed.end is End.KILLED
    assert_raised([first, last], ReplicaLostError, "rank 1 is gone: its process ended")


def never_comes(absent: int, ends: bool) -> None:
    """The group's limit counts: another rank may take long to build its model. But one that ended won't come."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    dist.barrier()
    if dist.get_rank() == absent:
        if not ends:
            time.sleep(4)
        os._exit(3)
    if dist.get_rank() < 2:
        make("replicate", build(), process_group=group)


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(never_comes, 3, 1, False, backend=None)
    assert outcomes[1].exit_code == 3
    assert_raised(outcomes[:1], ReplicaLostError, "no word from rank 1", "see its own output")


def test_a_store_that_is_gone(ranks: Ranks) -> None:
    """It lives in the process of rank 0."""
    outcomes = ranks.outcomes(never_comes, 3, 0, True, backend=None)
    assert_raised(outcomes[1:2], GradsyncError, "the store .* is gone|rank 0 is gone")


# --- numbered anew -----------------------------------------------------------------------------------------


@on_ranks(2, backend=None)
def test_ranks_that_trade_places(tmp_path: Path) -> None:
    """Ranks that trade places keep their old memory alive, but must not take it for one with the new numbers."""
    kept = []
    for turn in range(2):
        rank = int(os.environ["RANK"]) ^ turn
        dist.init_process_group("gloo", init_method=(tmp_path / str(turn)).as_uri(), rank=rank, world_size=2)
        module = nn.Sequential(build(), nn.BatchNorm1d(2))
        kept.append(make("replicate", module))
        train(module)
        same_everywhere(module)
        assert transport_of(kept[-1]).name == "shared_memory"
        assert transport_of(kept[-1])._host.local_rank == rank
        dist.barrier()
        dist.destroy_process_group()
