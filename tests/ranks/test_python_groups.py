"""Process groups written in Python, which c10d has not made and does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from gradsync.errors import SharedMemoryError
from tests.ranks.small import FRONTS, backward, build, make, mean_gradients
from tests.support.ranks import on_ranks


class Done(dist._Work):  # type: ignore[name-defined]
    """Nothing but `wait` and a future, as users write it."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def done(result: Any) -> Done:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return Done(future)


class Own(dist.ProcessGroup):
    """Carries everything through another group, and counts."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.calls: list[str] = []

    def getBackendName(self) -> str:
        return "own"

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        self.calls.append("allreduce")
        for tensor in tensors:
            dist.all_reduce(tensor)
        return done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        self.calls.append("broadcast")
        for tensor in tensors:
            dist.broadcast(tensor, options.rootRank)
        return done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        self.calls.append("allgather")
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather(output, tensor)
        return done(outputs)


@FRONTS
@on_ranks(2)
def test_a_group_that_c10d_does_not_know(front: str) -> None:
    rank = dist.get_rank()
    group = Own(rank, dist.get_world_size())
    module = build()
    with torch.no_grad():
        module.get_parameter("0.bias").add_(rank)  # rank 0's count
    replica: Any = make(front, module, process_group=group)
    assert gradsync.statistics(replica).transport.startswith("process_group: the process group has no store")
    for step in range(3):
        expected = mean_gradients(module, step)
        replica.zero_grad()
        backward(replica, step)
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    gradsync.verify(replica)
    assert {"allreduce", "broadcast", "allgather"} <= set(group.calls)
    with pytest.raises(SharedMemoryError, match="no store to meet through"):
        make(front, build(), process_group=group, transport="shared_memory")


@FRONTS
@on_ranks(2)
def test_different_models_over_it(front: str) -> None:
    group = Own(dist.get_rank(), dist.get_world_size())
    module = build() if dist.get_rank() else build().double()
    with pytest.raises(gradsync.errors.ModelMismatchError, match=r"'0\.weight' is .*float32.* on rank 1"):
        make(front, module, process_group=group)
