"""Sparse gradients whose rows are known beforehand (torch's sparse metadata), on both fronts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import gradsync
from gradsync.errors import InvalidOptionError
from tests.ranks.small import FRONTS, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Embedding(9, 3, sparse=True) for _ in range(2))
        self.head = nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.first(ids) * self.second(ids))


def ids_of(rank: int, step: int) -> Tensor:
    return torch.tensor([[rank, step, step], [rank + 2, 3, step + 1]])


def known(step: int) -> Tensor:
    return torch.cat([ids_of(rank, step).flatten() for rank in range(2)])


@FRONTS
@pytest.mark.parametrize("options", [{}, {"reduce": "sum"}, {"gradient_as_bucket_view": False}])
@on_ranks(2)
def test_training_with_known_rows(front: str, options: dict[str, Any]) -> None:
    """As one process, row by row; `.grad` has the rows that were given, also one that nobody used."""
    module: Any = Bag()
    alone = copy.deepcopy(module)
    replica = make(front, module, **options)
    divisor = 1 if options.get("reduce") == "sum" else 2
    for step in range(4):
        rows = torch.cat([known(step), torch.tensor([8, 8])])
        if step == 3:
            replica.set_sparse_rows({})  # forgotten
        else:
            replica.set_sparse_rows({"first.weight": rows})
        for one in (module, alone):
            one.zero_grad()
        replica(ids_of(dist.get_rank(), step)).square().sum().backward()
        sum((alone(ids_of(rank, step)).square().sum() / divisor for rank in range(2)), torch.zeros(())).backward()
        for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
            assert found.grad.layout is wanted.grad.layout
            torch.testing.assert_close(found.grad.to_dense(), wanted.grad.to_dense())
        if step < 3:
            assert module.first.weight.grad.indices()[0].tolist() == sorted(set(rows.tolist()))
        assert set(module.second.weight.grad.indices()[0].tolist()) == set(known(step).tolist())


def by_torchs_name() -> list[int]:
    module = nn.Embedding(5, 2, sparse=True)
    ddp = gradsync.DistributedDataParallel(module)
    ddp._set_sparse_metadata({"weight": torch.tensor([4.0, 0.0, 1.0])})  # torch takes floats as well
    ddp(torch.tensor([dist.get_rank()])).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad.coalesce().indices()[0].tolist()


def test_torchs_name_for_it(ranks: Ranks) -> None:
    assert ranks(by_torchs_name, 2) == [[0, 1, 4]] * 2


# --- ranks that count for nothing, or know nothing -----------------------------------------------------


@FRONTS
@pytest.mark.parametrize("how", ["join", "uneven"])
@on_ranks(2)
def test_ranks_without_data(front: str, how: str) -> None:
    """A rank without data has no rows to bring, and nobody tells it which the others have."""
    module: Any = Bag()
    replica = make(front, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batches = [ids_of(dist.get_rank(), step) for step in range(1 + 2 * dist.get_rank())]

    def train(number: int, ids: Tensor) -> None:
        if number < len(batches):
            rows = known(number) if number == 0 else ids
            replica.set_sparse_rows({"first.weight": rows, "second.weight": rows})
        optimizer.zero_grad()
        replica(ids).square().sum().backward()
        optimizer.step()

    if how == "join":
        with Join([replica]):
            for number, ids in enumerate(batches):
                train(number, ids)
    else:
        for number, ids in enumerate(gradsync.uneven(batches, replica)):
            train(number, ids)
    same_everywhere(module)


@FRONTS
@on_ranks(2)
def test_rows_known_on_one_rank_only_are_of_no_use_and_do_no_harm(front: str) -> None:
    module: Any = Bag()
    replica = make(front, module)
    if dist.get_rank() == 1:
        replica.set_sparse_rows({"first.weight": known(0)})
    replica(ids_of(dist.get_rank(), 0)).sum().backward()  # exchanged as ever
    same_everywhere(module)
    gradients: list[Any] = [None] * 2
    dist.all_gather_object(gradients, module.first.weight.grad.to_dense())
    assert torch.equal(*gradients)


# --- mistakes --------------------------------------------------------------------------------------------


@FRONTS
@on_ranks(2)
def test_mistakes(front: str) -> None:
    module: Any = Bag()
    replica = make(front, module)
    rank = dist.get_rank()
    with pytest.raises(InvalidOptionError, match=r"'module.first.weight' is no managed .*'first.weight', 'second"):
        replica.set_sparse_rows({"module.first.weight": known(0)})
    with pytest.raises(InvalidOptionError, match=r"'head\.weight' is no managed parameter with a sparse gradient"):
        replica.set_sparse_rows({"head.weight": known(0)})
    with pytest.raises(InvalidOptionError, match="rows 0 to 8, but the rows given go from -1 to 9"):
        replica.set_sparse_rows({"first.weight": torch.tensor([9, -1])})

    replica.set_sparse_rows({"first.weight": ids_of(0, 5)})  # those of rank 0 only
    here = " Here: 1" if rank == 1 else ""
    with pytest.raises(InvalidOptionError, match=rf"rank {rank}: .*'first.weight' has rows on rank 1 that.*{here}"):
        replica(ids_of(rank, 5)).sum().backward()
    replica.zero_grad()
    replica.set_sparse_rows({"first.weight": torch.cat([known(0), torch.tensor([7 + rank])])})
    with pytest.raises(InvalidOptionError, match=rf"rank {rank}: .*different rows for 'first.weight'"):
        replica(ids_of(rank, 0)).sum().backward()

    replica.set_sparse_rows({"first.weight": known(0)})  # mended: training goes on
    replica.zero_grad()
    replica(ids_of(rank, 0)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    same_everywhere(module)
