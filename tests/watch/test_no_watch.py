"""Where there is no watch, or none from the start: training is right, and what is not watched is said in one line."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync.errors import ReplicaLostError, RoundTimeoutError
from tests.ranks.memory import transport_of
from tests.ranks.small import backward, build, make, mean_gradients, same_everywhere
from tests.ranks.test_python_groups import Own
from tests.support.patience import wait_until
from tests.support.ranks import Ranks

LINE = "there is no watch between the ranks"


def replica(kind: str, seconds: float = 60.0) -> tuple[nn.Module, Any]:
    """A module and its front, over a group without a store, or one that was made without a word."""
    module = build()
    if kind == "no store":
        return module, make("replicate", module, process_group=Own(dist.get_rank(), dist.get_world_size()))
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    return module, make("replicate", module, init_sync="none", process_group=group)


def train(kind: str, is_wanted: str) -> None:
    os.environ["GRADSYNC_WATCH"] = is_wanted
    for _ in range(2):
        module, front = replica(kind)
        for step in range(3):
            expected = mean_gradients(module, step)
            front.zero_grad()
            backward(front, step)
            for parameter, gradient in zip(module.parameters(), expected, strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
        same_everywhere(module)
    dist.barrier()


@pytest.mark.parametrize("kind", ["no store", "nothing communicated"])
@pytest.mark.parametrize("is_wanted", ["1", "0"])
def test_training_is_right_and_one_line_says_so(ranks: Ranks, kind: str, is_wanted: str) -> None:
    """By rank 0, once for all replicas; not if nobody wants a watch."""
    outcomes = ranks.outcomes(train, 2, kind, is_wanted)
    assert [outcome.returned for outcome in outcomes] == [True, True], outcomes
    lines = int(is_wanted) if kind == "no store" else 0
    assert [outcome.output.count(LINE) for outcome in outcomes] == [lines, 0], outcomes


def fail(fault: str, kind: str) -> None:
    """In the second round: the watch begins in the first one."""
    _, front = replica(kind, 3.0)
    backward(front)
    if kind != "no store":
        assert wait_until(lambda: transport_of(front).watch is not None, 10)
    if dist.get_rank() == 1:
        if fault == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    backward(front, 1)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("lost", ReplicaLostError, "rank 1 is gone: its process ended without a word"),
        ("stuck", RoundTimeoutError, "rank 1 has been past the end of round 0 of Sequential for"),
    ],
)
def test_the_watch_begins_in_the_first_round(ranks: Ranks, fault: str, error: type[Exception], words: str) -> None:
    outcomes = ranks.outcomes(fail, 2, fault, "nothing communicated", grace=30.0 if fault == "lost" else 0.0)
    raised: Any = outcomes[0].exception
    assert isinstance(raised, error), outcomes[0]
    assert getattr(raised, "ranks") == [1]  # noqa: B009
    assert words in str(raised)


def test_without_a_store_faults_are_for_c10d_to_report(ranks: Ranks) -> None:
    """Rank 0 does not wait for ever; but nobody can tell it which rank it waits for, nor where that is."""
    survivor = ranks.outcomes(fail, 2, "lost", "no store", grace=30.0)[0]
    error = survivor.exception
    assert isinstance(error, RuntimeError), survivor
    assert not isinstance(error, (ReplicaLostError, RoundTimeoutError)), error


def late_threads() -> int:
    return sum(one.name == "gradsync-late-watch" for one in threading.enumerate())


def come_late() -> int:
    """Rank 1 does not come to its first round before the others have gone through a barrier."""
    _, front = replica("nothing communicated")
    if dist.get_rank() != 1:
        front(torch.ones(2, 4)).sum()  # a forward alone begins nothing
        assert late_threads() == 0
    dist.barrier()
    backward(front)
    assert wait_until(lambda: transport_of(front).watch is not None, 10)
    assert wait_until(lambda: late_threads() == 0, 10)
    dist.barrier()
    return late_threads()


def test_a_forward_alone_begins_nothing(ranks: Ranks) -> None:
    assert ranks(come_late, 3) == [0, 0, 0]


def give_up() -> bool:
    """Rank 1 never comes to a round: rank 0's thread ends when that does."""
    _, front = replica("nothing communicated", 2.0)
    if dist.get_rank() == 1:
        dist.barrier()
        return True
    with pytest.raises(RuntimeError):
        backward(front)
    gone = wait_until(lambda: late_threads() == 0, 10)
    dist.barrier()
    return gone


def test_who_never_comes_leaves_no_thread_behind(ranks: Ranks) -> None:
    assert ranks(give_up, 2) == [True, True]
