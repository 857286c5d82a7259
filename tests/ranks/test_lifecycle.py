"""Copies, pickles, evaluation, undoing: what surrounds training."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.ranks.small import same_everywhere
from tests.support.ranks import Ranks, on_ranks


def make(front: str, module: nn.Module, **options: Any) -> Any:
    torch.manual_seed(dist.get_rank())  # from here on ranks have different data
    if front == "ddp":
        return gradsync.DistributedDataParallel(module, **options)
    return gradsync.replicate(module, **options)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def train(front: Any, module: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        front(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


FRONTS = pytest.mark.parametrize("front", ["replicate", "ddp"])


@FRONTS
@on_ranks(2)
def test_a_deepcopy_is_a_working_replica(front: str) -> None:
    replica = make(front, model())
    train(replica, replica)
    duplicate = copy.deepcopy(replica)
    assert type(duplicate).__name__ == type(replica).__name__
    before = gradsync.fingerprint(replica)
    assert gradsync.fingerprint(duplicate) == before
    train(duplicate, duplicate)  # a working replica of its own
    same_everywhere(duplicate)
    assert gradsync.fingerprint(replica) == before
    train(replica, replica)
    same_everywhere(replica)
    if dist.get_rank() == 0:  # an average kept by one rank alone does not communicate
        average = copy.deepcopy(replica).eval()
        with torch.no_grad():
            average(torch.randn(6, 4))


@FRONTS
@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@on_ranks(2)
def test_one_rank_may_copy_alone_whatever_the_transport(front: str, transport: str) -> None:
    replica = make(front, model(), transport=transport)
    train(replica, replica)
    if dist.get_rank() == 0:
        copy.deepcopy(replica)
    train(replica, replica)
    same_everywhere(replica)


@on_ranks(2)
def test_without_a_start_up_exchange_nothing_is_communicated() -> None:
    if dist.get_rank() == 0:
        for transport in ("auto", "process_group"):
            gradsync.replicate(model(), init_sync="none", transport=transport)


@FRONTS
@on_ranks(2)
def test_pickles(front: str) -> None:
    replica = make(front, model())
    train(replica, replica)
    buffer = io.BytesIO()
    torch.save(replica, buffer)
    for loaded in (
        pickle.loads(pickle.dumps(replica)),
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=False),
    ):
        if front == "replicate":
            assert type(loaded) is nn.Sequential
            assert loaded.state_dict().keys() == model().state_dict().keys()
            loaded = gradsync.replicate(loaded)
        assert gradsync.fingerprint(loaded) == gradsync.fingerprint(replica)
        train(loaded, loaded)
        same_everywhere(loaded)


@on_ranks(2)
def test_the_wrapped_module_copies_as_a_plain_one() -> None:
    replica = gradsync.DistributedDataParallel(model())
    plain = copy.deepcopy(replica.module)
    pickle.loads(pickle.dumps(replica.module))
    assert not plain._forward_hooks
    assert not plain._forward_pre_hooks
    if dist.get_rank() == 0:
        train(plain, plain)  # an ordinary module: nobody else takes part


@FRONTS
@on_ranks(2)
def test_one_rank_may_evaluate_alone(front: str) -> None:
    replica = make(front, model())
    for _ in range(2):
        train(replica, replica, steps=2)
        if dist.get_rank() == 1:
            replica.eval()
            replica(torch.randn(6, 4))
            with torch.no_grad():
                replica(torch.randn(6, 4))
            replica.train()
            with torch.no_grad():
                replica(torch.randn(6, 4))
    train(replica, replica)
    same_everywhere(replica)


@on_ranks(2)
def test_state_dicts_and_attributes() -> None:
    plain = model()
    keys = list(plain.state_dict())
    replica = gradsync.replicate(plain)
    assert replica is plain
    assert isinstance(replica, nn.Sequential)
    assert isinstance(replica, gradsync.ReplicateModule)
    assert list(replica.state_dict()) == keys
    assert type(replica).__name__ == "Sequential"
    wrapper = gradsync.DistributedDataParallel(model())
    assert list(wrapper.state_dict()) == [f"module.{key}" for key in keys]
    wrapper.load_state_dict(replica.state_dict())
    wrapper.load_state_dict(wrapper.state_dict())
    assert gradsync.fingerprint(wrapper.module) == gradsync.fingerprint(replica)
    wrapper.module.marker = "inside"  # type: ignore[assignment]
    assert wrapper.marker == "inside"
    with pytest.raises(AttributeError, match="nowhere"):
        _ = wrapper.nowhere


@on_ranks(2)
def test_unreplicate_leaves_no_trace() -> None:
    plain = model()
    before = set(plain.__dict__)
    gradsync.replicate(plain)
    train(plain, plain)
    assert gradsync.unreplicate(plain) is plain
    assert type(plain) is nn.Sequential
    assert set(plain.__dict__) == before
    assert all(not p._post_accumulate_grad_hooks for p in plain.parameters())
    if dist.get_rank() == 0:
        train(plain, plain)
    gradsync.replicate(plain)
    train(plain, plain)
    same_everywhere(plain)


@on_ranks(2)
def test_nothing_keeps_an_engine_alive() -> None:
    module = model()
    wrapper = gradsync.DistributedDataParallel(module)
    train(wrapper, module)
    engine = weakref.ref(wrapper._engine)
    del wrapper
    if dist.get_rank() == 0:  # the wrapper is gone, and with it the replica
        train(module, module)
    gc.collect()
    assert engine() is None
    replica = gradsync.replicate(model())
    assert isinstance(replica, gradsync.ReplicateModule)
    engine = weakref.ref(replica._engine)
    train(replica, replica)
    del replica
    gc.collect()
    assert engine() is None


@FRONTS
@on_ranks(2)
def test_two_replicas_of_one_module_take_turns(front: str) -> None:
    module = model()
    older = make("ddp", module)
    newer = make(front, module)
    for replica in (newer, older, older, newer):  # whose forward ran last has the parameters
        train(replica, module, steps=2)
        same_everywhere(module)


def buffers_in_step(front: str, mode: str) -> list[list[float]]:
    replica = make(front, model(), buffers=mode, buffers_from=1 if mode == "round" else 0)
    seen = []
    for _ in range(2):
        train(replica, replica, steps=1)
        norm = replica[1] if front == "replicate" else replica.module[1]
        seen.append([norm.running_mean.tolist(), int(norm.num_batches_tracked)])
    if mode == "evaluation":
        replica.eval()(torch.randn(6, 4))
        seen.append(norm.running_mean.tolist())
    return seen


@FRONTS
@pytest.mark.parametrize("mode", ["round", "average", "evaluation", "never"])
def test_buffers(ranks: Ranks, front: str, mode: str) -> None:
    first, second = ranks(buffers_in_step, 2, front, mode)
    if mode in ("round", "average"):
        assert first == second
    elif mode == "evaluation":
        assert first[:2] != second[:2]
        assert first[2] == second[2]
    else:
        assert first != second


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2, limit=90)
def test_compiled(front: str, when: str) -> None:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    oracle = copy.deepcopy(module)
    backend = "aot_eager"
    if when == "before":
        half: Any = torch.compile(module, backend=backend)
        replica = make(front, half)
    else:
        replica = torch.compile(make(front, module), backend=backend)
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 8 + r)) for r in range(size)]
        replica(batches[rank]).square().mean().backward()
        for batch in batches:
            (oracle(batch).square().mean() / size).backward()
        for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
            found.grad = expected.grad = None
    same_everywhere(module)
