"""Processes forked from a rank, on every transport: they may look at the model, and can't take the rank's part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, Dataset

import gradsync
from gradsync.errors import ForkedError
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, assert_gradients, backward, batch, build, make, mean_gradients, same_everywhere
from tests.support.children import FORKS_BESIDE_THREADS, in_child
from tests.support.ranks import on_ranks

pytestmark = FORKS_BESIDE_THREADS
PLACES = pytest.mark.parametrize(
    ("transport", "size"), [("shared_memory", 2), ("process_group", 2), ("hierarchical", 3)]
)


def replica_of(front: str, module: nn.Module, transport: str, **options: Any) -> Any:
    if transport == "hierarchical":  # the last rank is on another host
        be_on_host(dist.get_rank() // 2)
    return make(front, module, transport=transport, **options)


class Attempts:
    """What a child may try."""

    def __init__(self, replica: Any, module: nn.Sequential) -> None:
        self.replica, self.module, self.rank = replica, module, dist.get_rank()

    def loss(self) -> Tensor:
        found: Tensor = self.replica(batch(self.rank)).square().mean()
        return found

    def refused(self, attempt: Callable[[], Any]) -> None:
        with pytest.raises(ForkedError, match=f"forked from rank {self.rank}"):
            attempt()

    def backward(self) -> None:
        self.refused(lambda: self.loss().backward())

    def backward_past_the_output(self) -> None:
        self.refused(lambda: self.module[0](batch(self.rank)).sum().backward())

    def accumulation(self) -> None:
        with self.replica.no_sync():
            self.loss().backward()
        self.refused(lambda: self.loss().backward())

    def after_freezing(self) -> None:
        """Which the ranks would ask each other about, before the round."""
        self.module[4].requires_grad_(False)
        self.refused(lambda: self.loss().backward())

    def after_a_setting(self) -> None:
        self.replica.register_comm_hook(None, default_hooks.allreduce_hook)
        self.refused(lambda: self.loss().backward())

    def without_backward(self) -> None:
        self.refused(self.replica.synchronize_gradients)
        self.refused(self.replica.skip_round)
        self.refused(lambda: gradsync.verify(self.replica))

    def evaluation(self) -> None:
        assert self.loss().isfinite()
        with torch.no_grad():
            assert self.loss().isfinite()
        assert torch.autograd.grad(self.loss(), self.module[0].weight)[0].isfinite().all()  # type: ignore[arg-type]
        self.replica.eval()
        assert self.loss().isfinite()

    def child_of_a_child(self) -> None:
        in_child(self.evaluation)
        in_child(self.backward)


ATTEMPTS = [
    Attempts.backward,
    Attempts.backward_past_the_output,
    Attempts.accumulation,
    Attempts.after_freezing,
    Attempts.after_a_setting,
    Attempts.without_backward,
    Attempts.evaluation,
    Attempts.child_of_a_child,
]


@FRONTS
@PLACES
@on_ranks("size")
def test_a_child_can_not_take_the_ranks_part(front: str, transport: str, size: int) -> None:
    """Before the first round, and between two; the rank itself goes on as if there had been none."""
    module = build()
    replica = replica_of(front, module, transport)
    parts = range(size)
    for rounds in range(3):
        attempts = Attempts(replica, module)
        for attempt in ATTEMPTS if rounds != 1 else ():
            in_child(partial(attempt, attempts))
        module.zero_grad()
        wanted = mean_gradients(module, rounds, parts)
        backward(replica, rounds)
        assert_gradients(module, wanted)
    same_everywhere(module)


@FRONTS
@PLACES
@on_ranks("size")
def test_evaluation_with_buffers_of_its_own(front: str, transport: str, size: int) -> None:
    """Buffers that the ranks would exchange before an evaluation stay as they are in a child."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    replica = replica_of(front, module, transport, buffers="evaluation")
    replica(batch(dist.get_rank())).sum().backward()
    in_child(lambda: replica.eval()(batch(0)))
    replica.eval()(batch(0))
    same_everywhere(module)


class Labelled(Dataset[Any]):
    """Data that the workers label with the model, as a teacher does; with a graph, of which nobody asks anything."""

    def __init__(self, replica: Any, trains: bool) -> None:
        self.replica, self.trains = replica, trains

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        output = self.replica(batch(index))
        if self.trains:
            output.sum().backward()
        return output.detach()


@FRONTS
@on_ranks(2)
def test_workers_of_a_data_loader(front: str) -> None:
    """One transport is enough: the loader waits 5 s for a worker that has begun a backward, whoever forked it."""
    module = build()
    replica = replica_of(front, module, "process_group")
    for _ in range(2):
        module.zero_grad()
        for labels in DataLoader(Labelled(replica, False), num_workers=2, multiprocessing_context="fork"):
            assert labels.isfinite().all()
        with pytest.raises(ForkedError, match=f"forked from rank {dist.get_rank()}"):
            list(DataLoader(Labelled(replica, True), num_workers=1, multiprocessing_context="fork"))
        backward(replica)
    same_everywhere(module)
