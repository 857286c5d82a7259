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
from gradsync.transport import link
from tests.ranks.small import FRONTS, batch, build, make, mean_gradients, same_everywhere
from tests.support.children import in_child
from tests.support.ranks import Ranks

# Python 3.12 and later warn of forks beside threads, which gloo has.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
PLACES = pytest.mark.parametrize(
    ("transport", "size"), [("shared_memory", 2), ("process_group", 2), ("hierarchical", 3)]
)


def replica_of(front: str, module: nn.Module, transport: str, **options: Any) -> Any:
    if transport == "hierarchical":  # the last rank is on another host
        place = f"host {dist.get_rank() // 2}"
        link.location = lambda: place
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


def children(front: str, transport: str) -> None:
    """Before the first round, and between two; the rank itself goes on as if there had been none."""
    module = build()
    replica = replica_of(front, module, transport)
    rank, parts = dist.get_rank(), range(dist.get_world_size())
    for rounds in range(3):
        attempts = Attempts(replica, module)
        for attempt in ATTEMPTS if rounds != 1 else ():
            in_child(partial(attempt, attempts))
        module.zero_grad()
        wanted = mean_gradients(module, rounds, parts)
        replica(batch(rank, rounds)).square().mean().backward()
        for parameter, gradient in zip(module.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    same_everywhere(module)


@FRONTS
@PLACES
def test_a_child_can_not_take_the_ranks_part(ranks: Ranks, front: str, transport: str, size: int) -> None:
    ranks(children, size, front, transport)


def evaluates_with_stale_buffers(front: str, transport: str) -> None:
    """Buffers that the ranks would exchange before an evaluation stay as they are in a child."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    replica = replica_of(front, module, transport, buffers="evaluation")
    replica(batch(dist.get_rank())).sum().backward()
    in_child(lambda: replica.eval()(batch(0)))
    replica.eval()(batch(0))
    same_everywhere(module)


@FRONTS
@PLACES
def test_evaluation_with_buffers_of_its_own(ranks: Ranks, front: str, transport: str, size: int) -> None:
    ranks(evaluates_with_stale_buffers, size, front, transport)


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


def labelled_by_workers(front: str, transport: str) -> None:
    module = build()
    replica = replica_of(front, module, transport)
    for _ in range(2):
        module.zero_grad()
        for labels in DataLoader(Labelled(replica, False), num_workers=2, multiprocessing_context="fork"):
            assert labels.isfinite().all()
        with pytest.raises(ForkedError, match=f"forked from rank {dist.get_rank()}"):
            list(DataLoader(Labelled(replica, True), num_workers=1, multiprocessing_context="fork"))
        replica(batch(dist.get_rank())).square().mean().backward()
    same_everywhere(module)


@FRONTS
def test_workers_of_a_data_loader(ranks: Ranks, front: str) -> None:
    """One transport is enough: the loader waits 5 s for a worker that has begun a backward, whoever forked it."""
    ranks(labelled_by_workers, 2, front, "process_group")
