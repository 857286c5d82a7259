"""A rank that is lost before or while a replica is made, or in its first round: the others say so at once, and who."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync import _torch
from gradsync.engine import engine, parameter_group
from gradsync.errors import ReplicaLostError, UnsuitableModuleError
from gradsync.transport import choice, dedicated_group, handshake, start_watch
from tests.faults.test_named import end_as_python_does
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, backward, build, make, short_group
from tests.support.outcome import End, Outcome
from tests.support.ranks import Ranks, on_ranks

TRANSPORTS = ("shared_memory", "process_group", "hierarchical")
# Far more than the test's own limit: whoever waits for it fails.
NEVER = timedelta(minutes=30)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no data here")


def leave() -> None:
    os._exit(3)


def instead(owner: Any, name: str, end: Callable[[], None]) -> None:
    """The rank ends where it would call this."""
    setattr(owner, name, lambda *args, **kwargs: end())


def before_the_handshake(end: Callable[[], None]) -> None:
    instead(handshake, "connect", end)


def after_the_handshake(end: Callable[[], None]) -> None:
    instead(choice, "_over_group", end)


def before_its_own_connections(end: Callable[[], None]) -> None:
    instead(dedicated_group, "connect_gloo", end)


def before_models_are_compared(end: Callable[[], None]) -> None:
    instead(engine, "check_same_model", end)


def before_the_broadcast(end: Callable[[], None]) -> None:
    instead(engine._beginnings, "add", end)


def lost(dead: int, transport: str, front: str, fault: Callable[[Callable[[], None]], None], end: Any) -> None:
    group = dist.new_group(timeout=NEVER)
    if dist.get_rank() == dead:
        time.sleep(0.1)  # the others are waiting by then
        fault(end)
    module: Any = make(front, build(), process_group=group, transport=transport)
    if transport == "shared_memory":  # whoever has had nothing to wait for learns it now
        module(torch.ones(2, 4)).sum().backward()


def at_once(end: Callable[[], None]) -> None:
    end()


def assert_named(outcomes: list[Outcome], dead: int, *texts: str) -> None:
    for outcome in outcomes:
        if outcome.rank != dead:
            assert isinstance(outcome.exception, ReplicaLostError), outcome
            assert outcome.exception.ranks == [dead], outcome.exception
            for text in texts:
                assert text in str(outcome.exception)


@FRONTS
@pytest.mark.parametrize("end", [kill, leave, fail])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_before_it_comes(ranks: Ranks, transport: str, end: Callable[[], None], front: str) -> None:
    outcomes = ranks.outcomes(lost, 3, 1, transport, front, at_once, end)
    assert_named(outcomes, 1, "rank 1 is gone: its process ended")


@pytest.mark.parametrize("dead", [0, 2])
def test_whichever_it_is(ranks: Ranks, dead: int) -> None:
    assert_named(ranks.outcomes(lost, 3, dead, "auto", "replicate", at_once, kill), dead)


FAULTS = [
    (before_the_handshake, ("shared_memory", "hierarchical")),
    (after_the_handshake, TRANSPORTS),
    (before_its_own_connections, ("process_group",)),
    (before_models_are_compared, TRANSPORTS),
    (before_the_broadcast, ("shared_memory",)),
]


@pytest.mark.parametrize(("fault", "transport"), [(fault, one) for fault, those in FAULTS for one in those])
@pytest.mark.parametrize("world", [2, 3])
def test_while_it_is_made(ranks: Ranks, fault: Any, transport: str, world: int) -> None:
    outcomes = ranks.outcomes(lost, world, 1, transport, "replicate", fault, kill)
    assert outcomes[1].end is End.KILLED
    assert_named(outcomes, 1)


@pytest.mark.parametrize("fault", [after_the_handshake, before_models_are_compared])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_that_raises_is_told_with_its_reason(ranks: Ranks, fault: Any, transport: str) -> None:
    outcomes = ranks.outcomes(lost, 3, 1, transport, "replicate", fault, fail)
    assert isinstance(outcomes[1].exception, ValueError)
    assert_named(outcomes, 1, "ValueError: no data here")


def lost_before_the_second_one(transport: str, is_late: bool, raises: bool) -> None:
    group = dist.new_group(timeout=NEVER)
    first: Any = make("replicate", build(), process_group=group, transport=transport)
    backward(first)
    if dist.get_rank() == 1:
        if not raises:
            end_as_python_does(None)
        try:
            fail()
        except ValueError as raised:
            end_as_python_does(raised)
    if is_late:
        time.sleep(0.5)  # the news are here by then
    make("replicate", build(), process_group=group, transport=transport)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_one_that_raises_before_the_second_replica(ranks: Ranks, transport: str, is_late: bool) -> None:
    """There is a watch by then: all tell its exception, and where it was."""
    outcomes = ranks.outcomes(lost_before_the_second_one, 3, transport, is_late, True)
    at = "It was past the end of round 0 of Sequential."
    assert_named(outcomes, 1, "rank 1 raised ValueError: no data here.", at, "in fail")


def test_one_that_ends_before_the_second_replica(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(lost_before_the_second_one, 3, "process_group", True, False)
    assert_named(outcomes, 1, "rank 1 came to the end of its script, and did not make this one")


@on_ranks(3)
def test_a_rank_that_can_t_and_lives_on() -> None:
    """It catches the error, and lives on: the others must not wait for it."""
    group = dist.new_group(timeout=NEVER)
    module = build()
    if dist.get_rank() == 1:
        module = module.to("meta")
        with pytest.raises(UnsuitableModuleError, match="meta"):
            make("replicate", module, process_group=group)
    else:
        with pytest.raises(ReplicaLostError, match="rank 1 could not replicate its module: UnsuitableModule") as raised:
            make("replicate", module, process_group=group)
        assert raised.value.ranks == [1]
    dist.barrier()
    make("replicate", build(), process_group=group)  # all is well the next time


# --- the first round ---------------------------------------------------------------------------------------


def lost_in_the_first_round(dead: int, where: str) -> None:
    module: Any = make("replicate", build(), process_group=dist.new_group(timeout=NEVER), transport="shared_memory")
    output = module(torch.ones(2, 4))
    if dist.get_rank() == dead:
        if where == "before":
            kill()
        instead(parameter_group, "plan_of_first_rank" if where == "plan" else "make_buckets", kill)
    output.sum().backward()


@pytest.mark.parametrize("where", ["before", "plan", "memory"])
@pytest.mark.parametrize("dead", [0, 1])
def test_in_the_first_round(ranks: Ranks, where: str, dead: int) -> None:
    assert_named(ranks.outcomes(lost_in_the_first_round, 3, dead, where), dead)


# --- several hosts: who gave up is not who was lost --------------------------------------------------------------


def lost_on_another_host(dead: int, rounds: int) -> None:
    be_on_host(dist.get_rank() // 2)
    module: Any = make("replicate", build(), process_group=dist.new_group(timeout=NEVER), transport="hierarchical")
    for number in range(100):
        if number == rounds and dist.get_rank() == dead:
            kill()
        module(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("dead", range(4))
def test_all_hosts_name_the_one_that_was_lost(ranks: Ranks, dead: int, rounds: int) -> None:
    assert_named(ranks.outcomes(lost_on_another_host, 4, dead, rounds), dead)


def stuck_on_another_host(stuck: int) -> None:
    be_on_host(dist.get_rank() // 2)
    group = short_group(2)
    module: Any = make("replicate", build(), process_group=group, transport="hierarchical")
    module(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == stuck:
        time.sleep(7)
        os._exit(0)
    module(torch.ones(2, 4)).sum().backward()


def test_all_hosts_name_the_one_that_is_stuck(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(stuck_on_another_host, 4, 1):
        if outcome.rank != 1:
            assert outcome.exception.ranks == [1], outcome  # type: ignore[union-attr]


# --- the store is in a rank -------------------------------------------------------------------------------------


def lost_beside_the_store() -> None:
    """Rank 1 is lost; rank 0, which has the store, gives up because of that and ends before rank 2 has heard of it."""
    rank = int(os.environ["RANK"])
    store = _torch.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=NEVER)
    dist.barrier()
    start_watch.HEAR_SECONDS = 10.0  # a busy machine needs longer
    if rank == 1:
        kill()
    if rank == 2:
        time.sleep(0.15)
    try:
        make("replicate", build())
    except ReplicaLostError:
        if rank == 0:
            os._exit(1)
        raise


def test_who_gives_up_with_the_store_is_not_taken_for_the_cause(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(lost_beside_the_store, 3, backend=None)
    assert outcomes[0].exit_code == 1
    assert isinstance(outcomes[2].exception, ReplicaLostError), outcomes[2]
    assert outcomes[2].exception.ranks == [1], outcomes[2]
