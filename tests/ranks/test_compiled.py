"""Under torch.compile: what works, what is refused by name, and what the statistics then tell."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd, config

import gradsync
from gradsync.errors import NotSupportedError
from tests.ranks.small import FRONTS, assert_gradients, gradients_of, make
from tests.support.ranks import on_ranks

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
    assert_gradients(module, gradients_of(oracle))


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


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@on_ranks(2, limit=100)
def test_compiled_autograd_is_refused_by_name(front: str) -> None:
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
@on_ranks(2, limit=100)
def test_torchs_python_reducer_makes_no_difference(front: str) -> None:
    """torch's class would leave the gradients to compiled autograd; ours need not know."""
    module = model()
    with config.patch(optimize_ddp="python_reducer"):
        replica: Any = torch.compile(make(front, module), backend=BACKEND)
        for _ in range(2):
            module.zero_grad()
            replica(batch(dist.get_rank())).square().mean().backward()
            assert_mean_gradients(module)


@FRONTS
@on_ranks(2, limit=100)
def test_nothing_of_ours_is_traced(front: str) -> None:
    """It would take longer, and dynamo warns of calls that it does not know."""
    module = model()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        replica: Any = torch.compile(make(front, module), backend=BACKEND)
        replica(batch(dist.get_rank())).square().mean().backward()
    assert_mean_gradients(module)
    assert not [str(one.message) for one in told if "Dynamo does not know how to trace" in str(one.message)]


# --- what the statistics tell ----------------------------------------------------------------------------


class Halves(nn.Module):
    """Two halves; `apart`, so that dynamo compiles each by itself."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2))
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.apart:
            torch._dynamo.graph_break()
        out: Tensor = self.second(x)
        return out


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("how", ["eager", "compiled first", "compiled after"])
@on_ranks(2, limit=100)
def test_overlap_is_told_where_there_is_some(front: str, how: str, apart: bool) -> None:
    module: Any = Halves(apart)
    if how == "compiled first":
        module = torch.compile(module, backend=BACKEND)
    replica = make(front, module, bucket_cap_mb=0.00001)
    called: Any = torch.compile(replica, backend=BACKEND) if how == "compiled after" else replica
    for _ in range(3):
        output = called(torch.ones(3, 4))
        assert output._backward_hooks, "backward would pass this output unnoticed"
        output.square().mean().backward()
    told = gradsync.statistics(called)
    assert told.buckets == 12
    if how == "eager":  # all but the last
        assert told.overlapped_buckets == 11
    elif apart:  # while the first half was computed, the second's were under way; then all of the first's came at once
        assert told.overlapped_buckets == 6
    else:
        assert told.overlapped_buckets == 0
