"""Where there is no watch: training is right, one line says so, and c10d tells of lost and stuck ranks."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync.errors import ReplicaLostError, RoundTimeoutError
from tests.ranks.small import backward, build, make, mean_gradients, same_everywhere
from tests.ranks.test_python_groups import Own
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
    assert [outcome.output.count(LINE) for outcome in outcomes] == [int(is_wanted), 0], outcomes


def fail(fault: str) -> None:
    _, front = replica("nothing communicated", 3.0)
    backward(front)
    if dist.get_rank() == 1:
        if fault == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    backward(front, 1)


@pytest.mark.parametrize("fault", ["lost", "stuck"])
def test_faults_are_for_c10d_to_report(ranks: Ranks, fault: str) -> None:
    """Rank 0 does not wait for ever; but nobody can tell it which rank it waits for, nor where that is."""
    survivor = ranks.outcomes(fail, 2, fault, grace=30.0 if fault == "lost" else 0.0)[0]
    error = survivor.exception
    assert isinstance(error, RuntimeError), survivor
    assert not isinstance(error, (ReplicaLostError, RoundTimeoutError)), error
    assert "rank 1 has been" not in survivor.output
