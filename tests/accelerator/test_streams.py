"""Who computes on which stream is the user's affair: whatever it is, everything that we queue is in order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks.small import FRONTS, batch, build, make
from tests.support.accelerator.ranks import on_accelerator

STEPS = 3


class Fork(nn.Module):
    """Two branches, each on a stream of its own, whose gradients share buckets."""

    def __init__(self, streams: Callable[[], torch.Stream]) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self._streams = streams

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        if x.is_cpu:
            return self.left(hidden) + self.right(hidden)
        main, other = torch.accelerator.current_stream(), self._streams()
        other.wait_stream(main)
        with other:
            right = self.right(hidden)
            right.record_stream(main)
        hidden.record_stream(other)
        left = self.left(hidden)
        main.wait_stream(other)
        return left + right


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """As people write it: behind what was queued, and waited for."""
    outside = torch.accelerator.current_stream()
    stream.wait_stream(outside)
    with stream:
        yield
    outside.wait_stream(stream)


def train(
    front: str, module: nn.Module, forward: Callable[[int], Any], backward: Callable[[int], Any], **options: Any
) -> None:
    """Steps, each part on the stream that is given for it; the gradients must be one process's."""
    oracle = copy.deepcopy(module).to("cpu")
    replica = make(front, module, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (module, oracle)]
    for step in range(STEPS):
        x = batch(dist.get_rank(), step)
        with forward(step):
            loss = replica(x.to(next(module.parameters()).device)).square().mean()
        with backward(step):
            loss.backward()
        del loss
        for part in range(2):
            (oracle(batch(part, step)).square().mean() / 2).backward()
        for found, wanted in zip(module.parameters(), oracle.parameters(), strict=True):
            assert found.grad is not None
            torch.testing.assert_close(found.grad.cpu(), wanted.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def here(step: int) -> Any:
    return contextlib.nullcontext()


def a_stream() -> Callable[[int], Any]:
    stream = torch.Stream(torch.accelerator.current_accelerator())
    return lambda step: on_stream(stream)


def another_each_time() -> Callable[[int], Any]:
    return lambda step: on_stream(torch.Stream(torch.accelerator.current_accelerator()))


PLACES = {"here": lambda: here, "aside": a_stream, "elsewhere each time": another_each_time}


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("forward", PLACES)
@pytest.mark.parametrize("backward", PLACES)
@FRONTS
@on_accelerator(2)
def test_steps_on_streams_of_the_users(forward: str, backward: str, front: str) -> None:
    module = build().to(torch.accelerator.current_accelerator())
    train(front, module, PLACES[forward](), PLACES[backward]())


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("cap", [0.0001, 25])
@FRONTS
@on_accelerator(2)
def test_branches_on_streams_of_their_own(front: str, cap: float) -> None:
    torch.manual_seed(0)
    module = Fork(lambda: torch.Stream(torch.accelerator.current_accelerator()))
    module.to(torch.accelerator.current_accelerator())
    train(front, module, here, here, bucket_cap_mb=cap)
