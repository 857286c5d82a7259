"""A rank that is lost, ends early, or keeps the others waiting is named by all of them, on every transport."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync import _torch
from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.watch import node
from tests.ranks.memory import be_on_host, transport_of
from tests.ranks.small import backward, build, make
from tests.support.outcome import Outcome
from tests.support.patience import crowding, wait_until
from tests.support.ranks import Ranks

TRANSPORTS = pytest.mark.parametrize("transport", ["process_group", "shared_memory", "hierarchical"])
WORLDS = pytest.mark.parametrize("world", [2, 3])
INSIDE_A_HOST = 1.0
ROUND = 4  # in which the fault is


def replica(transport: str, seconds: float | None = None) -> Any:
    if transport == "hierarchical" and dist.get_world_size() > 2:
        be_on_host(dist.get_rank() // 2)
    group = None if seconds is None else dist.new_group(timeout=timedelta(seconds=seconds))
    made = make("replicate", build(), transport=transport, process_group=group)
    assert transport_of(made).name == transport
    return made


def train(transport: str, doomed: int, fault: Callable[[], None], seconds: float | None = None) -> None:
    tell_often()
    module = replica(transport, seconds)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2 * ROUND):
        if step == ROUND and dist.get_rank() == doomed:
            fault()
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()


def now() -> None:
    print("fault at", time.monotonic(), flush=True)  # noqa: T201


def time_of_fault(outcome: Outcome) -> float:
    return float(outcome.output.split("fault at ")[1].split()[0])


def survivors(outcomes: list[Outcome], doomed: int) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.rank != doomed]


def assert_lost(outcomes: list[Outcome], doomed: int, *texts: str) -> None:
    """Named by all, in time, in these words."""
    for outcome in survivors(outcomes, doomed):
        assert isinstance(outcome.exception, ReplicaLostError), outcome
        assert outcome.exception.ranks == [doomed], outcome
        for text in (f"rank {outcome.rank}: rank {doomed} ", *texts):
            assert text in str(outcome.exception), outcome
        took = outcome.when - time_of_fault(outcomes[doomed])
        print(f"rank {outcome.rank} raised after {took * 1000:.0f} ms")  # noqa: T201
        assert took < INSIDE_A_HOST * max(1.0, crowding()), outcome


# --- lost -----------------------------------------------------------------------------------------------------


def tell_often() -> None:
    """Where a rank is, it tells once a second."""
    node.PUSH_SECONDS = 0.1


def killed() -> None:
    time.sleep(0.5)  # it has told by then
    now()
    os.kill(os.getpid(), signal.SIGKILL)


def left_at_once() -> None:
    time.sleep(0.5)
    now()
    os._exit(3)


def end_as_python_does(error: BaseException | None) -> None:
    """What Python does at the end of a script; the harness would leave without it."""
    now()
    if error is not None:
        sys.last_value = error
    atexit._run_exitfuncs()
    os._exit(0 if error is None else 1)


def raised() -> None:
    try:
        load_batch()
    except ValueError as error:
        end_as_python_does(error)


def load_batch() -> None:
    raise ValueError("the file is truncated")


def ended() -> None:
    end_as_python_does(None)


@TRANSPORTS
@WORLDS
@pytest.mark.parametrize("fault", [killed, left_at_once])
def test_gone_without_a_word(ranks: Ranks, transport: str, world: int, fault: Callable[[], None]) -> None:
    for doomed in (0, world - 1):
        outcomes = ranks.outcomes(train, world, transport, doomed, fault)
        at = f"It was last seen past the end of round {ROUND - 1} of Sequential, "
        assert_lost(outcomes, doomed, "is gone: its process ended without a word", at)


@TRANSPORTS
@WORLDS
def test_one_that_raised_is_told_with_its_exception(ranks: Ranks, transport: str, world: int) -> None:
    for doomed in (0, world - 1):
        outcomes = ranks.outcomes(train, world, transport, doomed, raised)
        at = f"It was past the end of round {ROUND - 1} of Sequential."
        assert_lost(outcomes, doomed, "raised ValueError: the file is truncated.", at, "in load_batch", "in raised")


@TRANSPORTS
@WORLDS
def test_one_that_ended_early_is_told_apart(ranks: Ranks, transport: str, world: int) -> None:
    for doomed in (0, world - 1):
        outcomes = ranks.outcomes(train, world, transport, doomed, ended)
        for outcome in survivors(outcomes, doomed):
            assert isinstance(outcome.exception, ReplicaLostError), outcome
            assert outcome.exception.ranks == [doomed]
            assert (
                f"rank {outcome.rank}: rank {doomed} ended its training after round {ROUND - 1}; rank {outcome.rank} "
                f"is in round {ROUND} of Sequential. Give all ranks equally many batches, or use gradsync.uneven"
            ) in str(outcome.exception)


# --- there, but not here ------------------------------------------------------------------------------------

LIMIT = 3.0  # of the group, on an idle machine


def stuck_in_user_code() -> None:
    time.sleep(limit_here() + 1.5)


def stuck_in_another_collective() -> None:
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)


def stopped() -> None:
    me = os.getpid()
    subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {me}; sleep {limit_here() + 4}; kill -CONT {me}"])
    time.sleep(0.5)


def limit_here() -> float:
    return float(os.environ["LIMIT_HERE"])


def train_in_vain(transport: str, doomed: int, fault: Callable[[], None], limit: float) -> None:
    os.environ.update(GRADSYNC_EXPLAIN_AFTER="0.3", LIMIT_HERE=str(limit))
    train(transport, doomed, fault, limit)


WHERE = {
    stuck_in_user_code: (
        rf"has been past the end of round {ROUND - 1} of Sequential for \d+ s \(test_named.py:\d+ in stuck_in_user",
        r"test_named.py:\d+ in train$",
        r"test_named.py:\d+ in stuck_in_user_code$",
    ),
    stuck_in_another_collective: (
        r"has been in another collective, all_reduce\(\), for \d+ s \(test_named.py:\d+ in stuck_in_another_collective",
        r"distributed_c10d.py:\d+ in all_reduce",
    ),
    stopped: (r"does not answer, though its process is there: it was stopped",),
}


# Several that wait, and one alone; over a process group several do so in the next test.
@pytest.mark.parametrize(("transport", "world"), [("shared_memory", 3), ("process_group", 2), ("hierarchical", 3)])
@pytest.mark.parametrize("fault", WHERE)
def test_one_that_is_waited_for(ranks: Ranks, transport: str, world: int, fault: Callable[[], None]) -> None:
    """After a while the log says where it is; at the limit all that wait raise, and say so too."""
    doomed = world - 1
    seconds = LIMIT * crowding()
    outcomes = ranks.outcomes(train_in_vain, world, transport, doomed, fault, seconds, limit=40.0)
    explanations = set()
    for outcome in survivors(outcomes, doomed):
        assert isinstance(outcome.exception, RoundTimeoutError), outcome
        assert outcome.exception.ranks == [doomed]
        told = str(outcome.exception)
        for text in (told, outcome.output):
            assert re.search(r"rank \d has waited \d+ s, at the end of backward of round 4 of Sequential", text), text
            assert re.search(r"waiting for bucket \d of 3 \(\d\.\w+ and \d more\)", text), text
            for pattern in WHERE[fault]:
                assert re.search(rf"rank {doomed} .*{pattern}" if "has been" in pattern else pattern, text, re.M), text
        assert outcome.output.count("has waited") == 1, outcome.output
        assert f"The time limit of the process group is {seconds:g} s" in told
        explanations.add(re.sub(r"^rank \d: (?=rank \d has waited)", "", told.partition("(Round ")[0]))
    assert len(explanations) == 1, explanations


class Dawdles(torch.nn.Linear):
    """Takes long at one place of a step: until somebody has asked about it."""

    place = ""
    asked: Callable[[], bool]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at("forward")
        return super().forward(Dawdler.apply(x, self))

    def at(self, place: str) -> None:
        if self.place == place:
            assert wait_until(self.asked, 30)


class Dawdler(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Dawdles) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.module.at("backward")
        return gradients[0], None


class DawdlingSGD(torch.optim.SGD):
    module: Dawdles

    def step(self, closure: Any = None) -> Any:
        self.module.at("step")
        return super().step(closure)


PLACES = {  # where rank 1 takes long, in rounds 1, 2, 3, ...: what the other one says
    "data": "past the end of round 0 of Sequential",
    "forward": "in forward of round 2 of Sequential",
    "loss": "past the forward of round 3 of Sequential",
    "backward": "in backward of round 4 of Sequential",
    "accumulation": "past a backward without synchronization of round 5 of Sequential",
    "step": "in the optimizer's step of round 6 of Sequential",
}


def dawdle(transport: str, told: Path) -> None:
    os.environ["GRADSYNC_EXPLAIN_AFTER"] = "0.3"
    torch.manual_seed(0)
    last, rank = Dawdles(4, 4), dist.get_rank()
    module: Any = make("replicate", torch.nn.Sequential(torch.nn.Linear(4, 4), last), transport=transport)
    optimizer = DawdlingSGD(module.parameters(), lr=0.1)
    optimizer.module = last
    handler = logging.FileHandler(told)
    logging.getLogger("gradsync").addHandler(handler)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        last.at("data")
        output = module(x)
        last.at("loss")
        return output.square().mean()

    for number, place in enumerate(("", *PLACES, "")):
        last.place = place if rank == 1 else ""
        last.asked = lambda number=number: told.read_text().count("rank 0 has waited") == number  # type: ignore[misc]
        if place == "accumulation":
            with module.no_sync():
                loss_of(torch.ones(2, 4)).backward()
            last.at(place)
        loss_of(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()


@TRANSPORTS
def test_each_phase_is_told(ranks: Ranks, transport: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    ranks(dawdle, 2, transport, told, limit=60.0)
    found = re.findall(r"^rank 1 has been (.*) for \d+ s \(", told.read_text(), re.M)
    assert found == list(PLACES.values()), told.read_text()


def different_modules(transport: str, limit: float) -> None:
    """Rank 1's loss reaches another one of two replicas."""
    os.environ["GRADSYNC_EXPLAIN_AFTER"] = "0.3"
    group = dist.new_group(timeout=timedelta(seconds=limit))
    two = [make("replicate", build(), transport=transport, process_group=group) for _ in range(2)]
    (two[0](torch.ones(1, 4)).sum() + two[1](torch.ones(1, 4)).sum()).backward()
    backward(two[dist.get_rank() == 1])


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_different_graphs_on_different_ranks(ranks: Ranks, transport: str) -> None:
    for outcome in ranks.outcomes(different_modules, 3, transport, LIMIT * crowding(), limit=40.0):
        assert isinstance(outcome.exception, RoundTimeoutError), outcome
        assert outcome.exception.ranks == [1], outcome
        assert "rank 1 is at the end of backward of round 1 of Sequential (replicated module" in str(outcome.exception)
        assert "The ranks are in rounds of different replicated modules" in str(outcome.exception)


def one_compares(transport: str, limit: float) -> None:
    """While the others train on."""
    os.environ["GRADSYNC_EXPLAIN_AFTER"] = "0.3"
    module = replica(transport, limit)
    backward(module)
    if dist.get_rank() == 1:
        gradsync.verify(module)
    backward(module)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_different_calls_on_different_ranks(ranks: Ranks, transport: str) -> None:
    for outcome in ranks.outcomes(one_compares, 3, transport, LIMIT * crowding(), limit=40.0):
        assert isinstance(outcome.exception, RoundTimeoutError), outcome
        assert outcome.exception.ranks == [1], outcome
        told = r"rank 1 is past the end of round 0 of Sequential, waiting for .* \(test_named.py:\d+ in one_compares\)"
        assert re.search(told, str(outcome.exception)), outcome
        assert "The ranks wait for each other in different calls" in str(outcome.exception)


def on_two_hosts(stopped_rank: int, limit: float) -> None:
    os.environ.update(GRADSYNC_EXPLAIN_AFTER="0.3", LIMIT_HERE=str(limit))
    be_on_host(dist.get_rank() // 2)
    group = dist.new_group(timeout=timedelta(seconds=limit))
    module: Any = make("replicate", build(), transport="process_group", process_group=group)
    backward(module)
    if dist.get_rank() == stopped_rank:
        stopped()
    backward(module)


@pytest.mark.parametrize("doomed", [0, 2])
def test_one_over_which_others_are_heard_is_stopped(ranks: Ranks, doomed: int) -> None:
    """Rank 0, which collects where ranks are, and the leader of another host: those below are not blamed for it."""
    outcomes = ranks.outcomes(on_two_hosts, 4, doomed, LIMIT * crowding(), limit=40.0)
    for outcome in survivors(outcomes, doomed):
        assert isinstance(outcome.exception, RoundTimeoutError), outcome
        assert outcome.exception.ranks == [doomed], outcome
        assert f"rank {doomed} does not answer, though its process is there" in str(outcome.exception)


# --- those who don't wait ------------------------------------------------------------------------------------


def computing(transport: str, phase: str) -> None:
    """Rank 1 is killed while the other one has no reason to wait for it."""
    module = replica(transport)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backward(module)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.2)
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        if phase == "evaluation":
            with torch.no_grad():
                module(torch.ones(1, 4))
        elif phase == "accumulation":
            with module.no_sync():
                module(torch.ones(1, 4)).sum().backward()
        else:
            optimizer.step()
        time.sleep(0.001)


@TRANSPORTS
@pytest.mark.parametrize("phase", ["evaluation", "accumulation", "step"])
def test_those_who_compute_hear_of_it_too(ranks: Ranks, transport: str, phase: str) -> None:
    outcomes = ranks.outcomes(computing, 2, transport, phase)
    assert_lost(outcomes, 1, "is gone: its process ended without a word")


def slow(transport: str) -> str:
    os.environ["GRADSYNC_EXPLAIN_AFTER"] = "1"
    module = replica(transport, 30)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            time.sleep(3)
        backward(module, step)
    dist.barrier()
    return "done"


@TRANSPORTS
def test_one_that_is_only_slow(ranks: Ranks, transport: str) -> None:
    """It is named in the log, once, and all go on."""
    outcomes = ranks.outcomes(slow, 2, transport)
    assert [outcome.result for outcome in outcomes] == ["done", "done"]
    assert outcomes[0].output.count("rank 1 has been past the end of round 1 of Sequential for") == 1
    assert "has waited" not in outcomes[1].output


def break_off_beside_a_closed_connection() -> bool:
    """Rank 1 has closed its connections, rank 2 sends nothing: whether a receive from that one has ended."""
    group = dist.new_group(timeout=timedelta(minutes=30))
    gloo = _torch.gloo_of(group)
    dist.barrier(group)
    if dist.get_rank() == 1:
        os._exit(0)
    ended = threading.Event()

    def receive(source: int, then: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.zeros(1)], source, 1).wait()
        then()

    if dist.get_rank() == 2:
        receive(0, ended.set)  # until that one breaks off, or ends
        return ended.is_set()
    threading.Thread(target=receive, args=(2, ended.set), daemon=True).start()
    receive(1, lambda: None)  # until it is seen that this one is gone
    _torch.break_off(gloo)
    return ended.wait(5 * crowding())


def test_all_that_is_under_way_is_broken_off(ranks: Ranks) -> None:
    """Else gloo waits for it until the limit of the group when a replica is freed whose ranks are on a lost host."""
    assert ranks.outcomes(break_off_beside_a_closed_connection, 3)[0].result is True
