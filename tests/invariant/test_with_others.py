"""Shards together with what else gradsync does: one model a host, optimizers in backward, hosts, guards, faults."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import gradsync
from gradsync.errors import NonFiniteGradientError, ReplicaLostError, ShardsError
from tests.invariant.test_equality import digest
from tests.ranks.memory import be_on_host, transport_of
from tests.ranks.small import batch, build, make, same_everywhere
from tests.ranks.test_compiled_graphs import WIDTH, Deep
from tests.support.patience import crowding
from tests.support.ranks import Ranks, on_ranks

SHARDS, STEPS = 6, 4


def plain() -> list[str]:
    return train("plain")


def train(how: str, shape: tuple[int, ...] = ()) -> list[str]:
    """Adam on a small model, with the same gradients in all of these ways."""
    if shape:
        be_on_host(shape[dist.get_rank()])
    module = build()
    replica = make("replicate", module, share_parameters=how == "shared")
    if shape:
        assert transport_of(module).name == "hierarchical"
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    shards = gradsync.Shards(replica, SHARDS)
    if how == "shared":
        gradsync.share_optimizer(optimizer)
    if how == "in backward":
        gradsync.overlap_optimizer(replica, optimizer)
    found = []
    for step in range(STEPS):
        for shard in shards.each(shards.mine):
            replica(batch(shard, step)).square().mean().backward()
        if how != "in backward":
            optimizer.step()
        optimizer.zero_grad()
        found.append(digest(nn.ParameterList(one.detach().clone() for one in module.parameters())))
    gradsync.verify(replica, optimizer if how != "shared" else None)
    return found


@pytest.mark.parametrize(("how", "shape"), [("shared", ()), ("in backward", ()), ("hosts", (0, 0, 1))], ids=str)
def test_the_same_as_without(ranks: Ranks, how: str, shape: tuple[int, ...]) -> None:
    alone = ranks(plain, 1)[0]
    for size in (len(shape),) if shape else (2, 3):
        assert all(found == alone for found in ranks(train, size, how, shape)), f"{size} ranks"


def compiled() -> list[str]:
    module = Deep()
    replica = gradsync.replicate(module, bucket_cap_mb=1)
    graphs: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(len(example))
        return lookup_backend("aot_eager")(graph, example)

    called: Any = torch.compile(replica, backend=backend)
    shards, found = gradsync.Shards(replica, SHARDS), []
    for step in range(2):
        for shard in shards.each(shards.mine):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(8 * step + shard))
            called(x).square().mean().backward()
        found.append(digest(module))
        module.zero_grad()
    return [*found, str(graphs)]


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_model(ranks: Ranks) -> None:
    """Its graphs are split alike on any number of ranks, as other graphs would round differently."""
    alone = ranks(compiled, 1, limit=60)[0]
    assert alone[-1].count(",") > 0
    for size in (2, 3):
        assert all(found == alone for found in ranks(compiled, size, limit=60)), f"{size} ranks"


@on_ranks(2)
def test_not_with_shares_stepped_in_backward() -> None:
    replica = make("replicate", build(), share_parameters=True)
    gradsync.overlap_optimizer(replica, torch.optim.SGD(replica.parameters(), lr=0.1))
    with pytest.raises(ShardsError, match=r"Use gradsync\.share_optimizer\(\)"):
        gradsync.Shards(replica, 4)


@on_ranks(2)
def test_buckets_leave_while_the_last_shard_computes() -> None:
    replica = make("replicate", build())
    shards = gradsync.Shards(replica, 8)
    for step in range(3):
        for shard in shards.each(shards.mine):
            replica(batch(shard, step)).square().mean().backward()
        replica.zero_grad()
        early = gradsync.statistics(replica).overlapped_buckets
        assert (early > 0) == (step > 0)  # in the first one nobody knows which come when


@on_ranks(2)
def test_what_is_not_finite_is_named() -> None:
    replica = make("replicate", build(), on_nonfinite="raise")
    shards = gradsync.Shards(replica, 4)
    with pytest.raises(NonFiniteGradientError, match=r"'4\.bias'") as caught:
        spoil(replica, shards)
    assert caught.value.ranks == [1]


def spoil(replica: Any, shards: gradsync.Shards) -> None:
    for shard in shards.each(shards.mine):
        (replica(batch(shard)).sum() * (float("nan") if shard == 3 else 1)).backward()


def killed_in_a_shard() -> str:
    replica = make("replicate", build())
    shards = gradsync.Shards(replica, 6)
    for step in range(3):
        for at, shard in enumerate(shards.each(shards.mine)):
            if (step, at, dist.get_rank()) == (1, 1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            replica(batch(shard)).sum().backward()
        replica.zero_grad()
    return "whole"


def test_a_rank_that_is_killed_in_a_shard_is_named(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(killed_in_a_shard, 3, limit=30.0)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.exception, ReplicaLostError), outcome
        assert outcome.exception.ranks == [1]
        assert outcome.when - outcomes[1].when < 2 * crowding()


@on_ranks(2)
def test_goes_on_over_another_group() -> None:
    replica = make("replicate", build())
    shards = gradsync.Shards(replica, 4)
    for step in range(4):
        if step == 2:
            alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
            replica.change_process_group(alone)
            assert list(shards.mine) == [0, 1, 2, 3]
        for shard in shards.each(shards.mine):
            replica(batch(shard, step)).sum().backward()
        with torch.no_grad():
            for parameter in replica.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    same_everywhere(replica)
