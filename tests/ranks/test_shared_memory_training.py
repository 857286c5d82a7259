"""Training through shared memory: the same every time, several replicas and groups, and memory that is given back."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.transport import link
from tests.ranks.memory import descriptors, links, mapped, requests, train, transport, transport_of
from tests.ranks.small import FRONTS, assert_gradients, batch, build, gradients_of, make, same_everywhere
from tests.ranks.test_several_replicas import Residual, skipped
from tests.support.ranks import Ranks, on_ranks


class Dawdling(nn.Module):
    """Takes its time at random places of backward, other ones on each rank and in each run."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self._dawdle)
        return x

    def _dawdle(self, gradient: Tensor) -> None:
        chance = random.SystemRandom()
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.003)


def dawdled_training(dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Linear(4, 4), nn.Tanh(), Dawdling())]
    module = nn.Sequential(*layers).to(dtype)
    replica = gradsync.replicate(module, bucket_cap_mb=0.00002)
    assert transport_of(replica).name == "shared_memory"
    prints = []
    for step in range(12):
        module.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 8 + dist.get_rank()))
        replica(x.to(dtype)).square().mean().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        prints.append(gradsync.fingerprint(module))
    assert gradsync.statistics(module).overlapped_buckets > 1
    return prints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_the_same_bits(ranks: Ranks, dtype: torch.dtype) -> None:
    """With three ranks the order in which they are added up matters."""
    first, second = ranks(dawdled_training, 3, dtype), ranks(dawdled_training, 3, dtype)
    assert first[0] == first[1] == first[2]
    assert first == second
    assert len(set(first[0])) == 12


# --- several replicas, several groups ----------------------------------------------------------------------


@FRONTS
@on_ranks(3)
def test_two_replicas_over_a_part_of_the_world(front: str) -> None:
    """Two replicas over the same part of the world, whose buckets leave in different orders on its ranks."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    modules = [Residual().double(), Residual().double()]
    oracles = copy.deepcopy(modules)
    first, second = (make(front, module, process_group=group) for module in modules)
    assert transport_of(second).name == "shared_memory"

    def loss(a: Any, b: Any, step: int, rank: int) -> Tensor:
        x, skip = batch(rank, step).double(), skipped(step, rank)
        out = a(x) + b(x, skip=skip) if rank == 0 else b(x, skip=skip) + a(x)
        return out.square().mean()

    for step in range(5):
        for module in (*modules, *oracles):
            module.zero_grad()
        loss(first, second, step, rank).backward()
        for part in range(2):
            (loss(oracles[0], oracles[1], step, part) / 2).backward()
        for module, oracle in zip(modules, oracles, strict=True):
            assert_gradients(module, gradients_of(oracle), rtol=1e-12, atol=1e-12)


def same_gradients(module: nn.Module, group: Any) -> None:
    flat = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, flat, group=group)
    assert all(torch.equal(row, flat) for row in rows)


@on_ranks(4)
def test_groups_that_overlap() -> None:
    """Each rank in three groups at a time, each with a replica; rounds interleaved."""
    rank = dist.get_rank()
    pairs = [dist.new_group([a, (a + 1) % 4]) for a in range(4)]
    mine = [(a, pairs[a]) for a in range(4) if rank in (a, (a + 1) % 4)]
    # c10d makes groups in the order of the world, and a replica needs all ranks of its group: one pair at a time.
    replicas: dict[int, Any] = {}
    for turn in range(4):
        for a, group in mine:
            if a == turn:
                replicas[a] = make("replicate", build(), process_group=group)
    everywhere: Any = make("replicate", build())
    assert transport_of(everywhere).name == "shared_memory"
    for step in range(10):
        x = torch.full((1, 4), rank + step + 1.0)
        outputs = [replicas[a](x).sum() for a in sorted(replicas, reverse=bool(step % 2))]
        loss = everywhere(x).sum()
        for output in outputs:
            loss = loss + output
        for replica in (everywhere, *replicas.values()):
            replica.zero_grad()
        loss.backward()
        same_gradients(everywhere, None)
        for a, group in sorted(mine, key=lambda pair: pair[0]):
            same_gradients(replicas[a], group)


@on_ranks(3)
def test_asleep_on_another_link() -> None:
    """Rank 1 waits for rank 0 while rank 2, which can't wake it, will need its share: it sleeps lightly."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = {n: transport(group=group) for n, group in enumerate(groups) if rank in (n, n + 1)}
    buffers = {n: one.allocate(requests((10, torch.float32)))[0].fill_(1) for n, one in mine.items()}
    naps: list[float] = []
    sleep = link.Link._sleep

    def noted(self: link.Link, seconds: float) -> None:
        naps.append(seconds)
        sleep(self, seconds)

    link.Link._sleep = noted  # type: ignore[method-assign]
    for light in (True, False):
        works: list[Any] = []
        dist.barrier()
        naps.clear()
        if rank == 1 and light:
            works.append(mine[1].reduce(buffers[1], 1.0))
        if rank != 1:
            time.sleep(0.1 if rank == 0 else 0.3)
        if rank != 2:
            mine[0].reduce(buffers[0], 1.0).wait()
        if rank == 1:
            assert (max(naps) <= link.POLLING_NAP) is light
        if rank == 2 and light:
            works.append(mine[1].reduce(buffers[1], 1.0))
        for work in works:
            work.wait()


@on_ranks(2)
def test_each_group_has_its_time_limit() -> None:
    """A group has the limit that it was given, also when another one with the same ranks is there."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=7))
    usual, patient = gradsync.replicate(build()), gradsync.replicate(build(), process_group=group)
    again = gradsync.replicate(build())
    limits = [transport_of(one)._host.limit for one in (usual, patient, again)]
    assert limits == [limits[0], 7, limits[0]]
    assert limits[0] != 7
    assert transport_of(usual)._host is transport_of(again)._host
    assert links() == 2


# --- memory is given back ----------------------------------------------------------------------------------


@on_ranks(2)
def test_memory_is_given_back_with_the_model() -> None:
    for _ in range(5):
        module = make("replicate", nn.Sequential(build(), nn.BatchNorm1d(2)))
        train(module)
        assert mapped() > 0
        del module
        assert (mapped(), descriptors(), links()) == (0, 0, 0)


@on_ranks(2)
def test_a_gradient_outlives_its_model() -> None:
    module = make("replicate", build())
    train(module)
    gradient = next(module.parameters()).grad
    wanted = gradient.clone()
    del module
    gc.collect()
    assert torch.equal(gradient, wanted)
    assert mapped() > 0
    del gradient
    assert (mapped(), descriptors(), links()) == (0, 0, 0)


@on_ranks(2)
def test_memory_is_given_back_when_a_plan_is_made_anew() -> None:
    module: Any = make("replicate", build())
    train(module)
    before = mapped(), descriptors()
    for turn in range(30):
        module[0].requires_grad_(bool(turn % 2))
        train(module, steps=2, first=turn)
    same_everywhere(module)
    assert (mapped(), descriptors()) == before


def a_program_started() -> str:
    """What a program that this rank starts gets to see of the memory."""
    module = make("replicate", build())
    train(module)
    shown = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert "pipe:" in shown.stdout
    return shown.stdout


def test_a_program_that_is_started_gets_no_memory(ranks: Ranks) -> None:
    for output in ranks(a_program_started, 2):
        assert "gradsync" not in output
