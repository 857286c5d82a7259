"""`gradsync.uneven`, ranks with different numbers of batches; and other groups between rounds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from tests.ranks.small import FRONTS, assert_gradients, backward, build, make, mean_gradients, same_everywhere
from tests.support.ranks import Ranks, on_ranks

# --- uneven inputs, without a context -----------------------------------------------------------------


def without_context(front: str) -> list[float]:
    module = nn.Linear(1, 1, bias=False)
    replica = make(front, module)
    optimizer = torch.optim.Adam(module.parameters())
    seen = []
    batches = [torch.full((1, 1), float(dist.get_rank() + 1))] * (1 + 2 * dist.get_rank())
    for x in gradsync.uneven(batches, replica):
        optimizer.zero_grad()
        for _ in range(2):  # any number of backwards a batch
            replica(x).sum().backward()
        assert module.weight.grad is not None
        seen.append(module.weight.grad.item())
        optimizer.step()
        same_everywhere(module)
    optimizer.zero_grad()
    replica(torch.full((1, 1), dist.get_rank() * 2.0)).sum().backward()  # both count again
    assert module.weight.grad is not None
    seen.append(module.weight.grad.item())
    optimizer.step()
    same_everywhere(module)  # the optimizers' states are the same too
    return seen


@FRONTS
def test_uneven_loaders_without_a_context(ranks: Ranks, front: str) -> None:
    assert ranks(without_context, 2, front) == [[3.0, 4.0, 4.0, 1.0]] * 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = gradsync.replicate(nn.Linear(1, 1, bias=False))
        self.outer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.outer(x)


def replicas_inside() -> list[list[float]]:
    replica = gradsync.replicate(Nested())
    seen = []
    for x in gradsync.uneven([torch.full((1, 1), dist.get_rank() + 1.0)] * (1 + dist.get_rank()), replica):
        replica.zero_grad()
        replica(x).sum().backward()
        seen.append([p.grad.item() for p in replica.parameters() if p.grad is not None])
    return seen


def test_a_rank_without_data_counts_for_nothing_in_replicas_inside_either(ranks: Ranks) -> None:
    assert ranks(replicas_inside, 2) == [[[1.5, 1.5], [2.0, 2.0]]] * 2


def weighed_inside() -> list[list[float]]:
    """Weights and `no_sync` reach the replicas inside a replica."""
    replica: Any = gradsync.replicate(Nested())
    with replica.no_sync():
        replica(torch.ones(1, 1)).sum().backward()
        local = [p.grad.item() for p in replica.parameters()]
        replica.zero_grad()
    replica.set_round_weight(1 + 2 * dist.get_rank())
    replica(torch.full((1, 1), 4.0 * dist.get_rank())).sum().backward()
    return [local, [p.grad.item() for p in replica.parameters()]]


def test_what_is_set_on_a_replica_is_set_on_those_inside(ranks: Ranks) -> None:
    assert ranks(weighed_inside, 2) == [[[1.0, 1.0], [3.0, 3.0]]] * 2


def no_batch_at_all() -> None:
    replica = gradsync.replicate(nn.Linear(1, 1))
    for x in gradsync.uneven([torch.ones(1, 1)] * dist.get_rank(), replica):
        replica(x).sum().backward()


def test_a_rank_without_a_single_batch(ranks: Ranks) -> None:
    first, _ = ranks.outcomes(no_batch_at_all, 2)
    assert isinstance(first.exception, gradsync.errors.InvalidOptionError)
    assert "rank 0" in str(first.exception)


# --- other groups ------------------------------------------------------------------------------------


@FRONTS
@on_ranks(3)
def test_changing_groups_between_rounds(front: str) -> None:
    module = nn.Sequential(*build(), nn.BatchNorm1d(2))
    replica = make(front, module)
    world = dist.group.WORLD
    assert world is not None
    rank = dist.get_rank()
    for group, members in ((dist.new_group([0, 1]), [0, 1]), (dist.new_group([1, 2]), [1, 2]), (world, [0, 1, 2])):
        if rank in members:
            replica.change_process_group(group)
            for _ in range(2):
                module.zero_grad()
                backward(replica)
            wanted = mean_gradients(module, parts=members)
            assert_gradients(module, wanted)
            same_everywhere(module, group)  # buffers are, too
        dist.barrier()


@on_ranks(3)
def test_changing_groups_by_torchs_name() -> None:
    module = build()
    ddp = gradsync.DistributedDataParallel(module)
    backward(ddp)
    pair = dist.new_group([0, 1])
    ddp._update_process_group(pair)
    module.zero_grad()
    if dist.get_rank() < 2:
        assert ddp.process_group is pair
        for _ in range(2):
            module.zero_grad()
            backward(ddp)
        assert_gradients(module, mean_gradients(module))
    ddp._update_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    module.zero_grad()
    backward(ddp)
    assert_gradients(module, mean_gradients(module, parts=range(3)))


# --- ranks of weight 0 --------------------------------------------------------------------------------


class Branches(nn.Module):
    """Of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, *used: int) -> Tensor:
        return self.scale * sum((self.parts[number](x) for number in used), torch.zeros(()))


@FRONTS
@on_ranks(2)
def test_what_a_rank_of_weight_0_has_accumulated_alone_is_dropped(front: str) -> None:
    """Also where it comes late to the other: in a second pass, which adds to what is there."""
    replica = make(front, Branches())
    first, x = dist.get_rank() == 0, torch.ones(2, 4)
    used = [(0, 2), (0, 1)] if first else [(0,), (0,)]  # the second rank has never used the third part before
    for step in used:
        replica.zero_grad()
        replica(x, *step).sum().backward()
    replica.zero_grad()
    with replica.no_sync():
        replica(x, *((1, 2) if first else (0,))).sum().backward()
    replica.set_round_weight(0 if first else 1)
    replica(x, *(() if first else (0, 2))).sum().backward()
    found = {name.removeprefix("module."): parameter.grad for name, parameter in replica.named_parameters()}
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, found)
    torch.testing.assert_close(everywhere[0], everywhere[1], rtol=0, atol=0)
    assert found["parts.1.weight"] is None
    assert found["parts.2.weight"] is not None
