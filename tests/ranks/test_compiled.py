"""Under torch.compile: what works, what is refused by name, and what the statistics then tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd, config

import gradsync
from gradsync.errors import NotSupportedError
from tests.ranks.small import FRONTS, make
from tests.support.ranks import Ranks

BACKEND = "aot_eager"  # needs no C++ compiler


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(rank: int) -> Tensor:
    return torch.arange(12.0).view(3, 4) / (rank + 1)


def assert_mean_gradients(module: nn.Module) -> None:
    oracle = copy.deepcopy(gradsync.unreplicate(copy.deepcopy(module)) if is_replica(module) else module)
    oracle.zero_grad()
    for rank in range(dist.get_world_size()):
        (oracle(batch(rank)).square().mean() / dist.get_world_size()).backward()
    for found, wanted in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def is_replica(module: nn.Module) -> bool:
    return isinstance(module, gradsync.ReplicateModule)


# --- compiled autograd -----------------------------------------------------------------------------------


def in_context(replica: Any, module: Any, x: Tensor) -> None:
    with compiled_autograd._enable(torch.compile(backend=BACKEND)):
        replica(x).square().mean().backward()


def backward_in_context(replica: Any, module: Any, x: Tensor) -> None:
    loss = replica(x).square().mean()
    with compiled_autograd._enable(torch.compile(backend=BACKEND)):
        loss.backward()


def past_the_front(replica: Any, module: Any, x: Tensor) -> None:
    with compiled_autograd._enable(torch.compile(backend=BACKEND)):
        module[0].weight.square().sum().backward()


def configured(replica: Any, module: Any, x: Tensor) -> None:
    def step() -> None:
        replica(x).square().mean().backward()

    with config.patch(compiled_autograd=True, optimize_ddp="python_reducer"):
        torch.compile(step, backend=BACKEND)()


def refused(front: str) -> None:
    module = model()
    replica = make(front, module)
    mine = batch(dist.get_rank())
    match = r"(?s)compiled autograd.*config\.compiled_autograd = False.*python_reducer"
    for attempt in (in_context, backward_in_context, past_the_front, configured):
        with pytest.raises(NotSupportedError, match=match):
            attempt(replica, module, mine)
    module.zero_grad()
    with replica.no_sync():
        in_context(replica, module, mine)  # accumulates, as ever
    replica.synchronize_gradients()
    assert_mean_gradients(module)
    module.zero_grad()
    replica(mine).square().mean().backward()  # nothing of the refused ones is left
    assert_mean_gradients(module)


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
def test_compiled_autograd_is_refused_by_name(ranks: Ranks, front: str) -> None:
    ranks(refused, 2, front, limit=100)


def python_reducer(front: str) -> None:
    """torch's class would leave the gradients to compiled autograd; ours need not know."""
    module = model()
    with config.patch(optimize_ddp="python_reducer"):
        replica: Any = torch.compile(make(front, module), backend=BACKEND)
        for _ in range(2):
            module.zero_grad()
            replica(batch(dist.get_rank())).square().mean().backward()
            assert_mean_gradients(module)


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
def test_torchs_python_reducer_makes_no_difference(ranks: Ranks, front: str) -> None:
    ranks(python_reducer, 2, front, limit=100)


# --- what the statistics tell ----------------------------------------------------------------------------


class Broken(nn.Module):
    """Two halves that dynamo compiles each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        out: Tensor = self.second(x)
        return out


def overlap(front: str, how: str) -> None:
    torch.manual_seed(0)
    module: Any = Broken()
    if how == "eager":
        replica = make(front, module, bucket_cap_mb=0.00001)
    elif how == "compiled first":
        half: Any = torch.compile(module, backend=BACKEND)
        replica = make(front, half, bucket_cap_mb=0.00001)
    else:
        replica = torch.compile(make(front, module, bucket_cap_mb=0.00001), backend=BACKEND)
    for _ in range(4):
        replica(torch.ones(3, 4)).square().mean().backward()
    told = gradsync.statistics(replica)
    assert told.buckets >= 6
    if how == "eager":  # all but the last
        assert told.overlapped_buckets == told.buckets - 1
    else:  # while the first half was computed, the second's were under way; then all of the first's came at once
        assert 0 < told.overlapped_buckets <= told.buckets // 2


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@pytest.mark.parametrize("how", ["eager", "compiled first", "compiled after"])
def test_overlap_is_told_where_there_is_some(ranks: Ranks, front: str, how: str) -> None:
    ranks(overlap, 2, front, how, limit=100)


def whole(front: str, before: bool) -> int:
    module: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    inner: Any = torch.compile(module, backend=BACKEND) if before else module
    replica = make(front, inner, bucket_cap_mb=0.00001)
    called = replica if before else torch.compile(replica, backend=BACKEND)
    for _ in range(3):
        called(torch.ones(3, 4)).square().mean().backward()
    assert gradsync.statistics(replica).buckets > 2
    return gradsync.statistics(replica).overlapped_buckets


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@pytest.mark.parametrize("before", [True, False])
def test_no_overlap_is_told_of_a_graph_that_is_compiled_as_a_whole(ranks: Ranks, front: str, before: bool) -> None:
    told = ranks(whole, 2, front, before, limit=100)
    if front == "DistributedDataParallel" and not before:  # dynamo makes a graph of each bucket, and they do overlap
        assert min(told) > 0
    else:
        assert told == [0, 0]
