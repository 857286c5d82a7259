"""Replicas are compared in programs that are right, and nobody raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import gradsync
from gradsync.ddp_private import _MixedPrecision
from gradsync.errors import ReplicaDivergedError
from tests.ranks.replicas import Alarm, Training, data_replaced, train, until_alarm, with_norm
from tests.ranks.small import FRONTS, TRANSPORTS, backward, batch, build, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_long_training(front: str, transport: str) -> None:
    module = with_norm()
    replica = make(front, module, transport=transport)
    training = Training(replica, module, torch.optim.AdamW(module.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 150)
    for step in range(150):
        training.backward(step)
        training.optimizer.step()
        schedule.step()
    gradsync.verify(replica, training.optimizer)
    same_everywhere(module)


def steps(replica: Any, module: nn.Module, optimizer: Any, number: int = 6, first: int = 0) -> None:
    for step in range(first, first + number):
        optimizer.zero_grad()
        replica(batch(dist.get_rank(), step).to(next(module.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def buffers_apart(front: str, options: dict[str, Any]) -> None:
    for mode in ("round", "average", "evaluation", "never"):
        module = with_norm()
        replica = make(front, module, buffers=mode, **options)
        steps(replica, module, torch.optim.AdamW(module.parameters()))


def joined(front: str, options: dict[str, Any]) -> None:
    """A rank that has run out does not step: it is behind until the context ends."""
    module = with_norm()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    contexts: list[Callable[[], Any]] = [
        lambda: Join([replica]),
        lambda: Join([replica], divide_by_initial_world_size=False),
        lambda: replica.join() if front != "replicate" else Join([replica]),
    ]
    for number, context in enumerate(contexts):
        with context():
            steps(replica, module, optimizer, 3 + 6 * ((dist.get_rank() + number) % 2))
        same_everywhere(module)
    steps(replica, module, optimizer, 4)
    gradsync.verify(replica)


def uneven(front: str, options: dict[str, Any]) -> None:
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    for number in range(2):
        loader = [batch(dist.get_rank(), step) for step in range(3 + 4 * ((dist.get_rank() + number) % 2))]
        for x in gradsync.uneven(loader, replica):
            optimizer.zero_grad()
            replica(x).square().mean().backward()
            optimizer.step()
    steps(replica, module, optimizer, 4)
    gradsync.verify(replica, optimizer)


def sharded(front: str, options: dict[str, Any]) -> None:
    for in_backward in (False, True):
        module = build()
        replica = make(front, module, **options)
        optimizer: Any = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01)
        if in_backward:
            gradsync.overlap_optimizer(replica, optimizer)
        for step in range(6):
            module.zero_grad()
            backward(replica, step)
            if not in_backward:
                optimizer.step()
        gradsync.verify(replica)


def in_backward(front: str, options: dict[str, Any]) -> None:
    for free in (False, True):
        module = build()
        replica = make(front, module, **options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        gradsync.overlap_optimizer(replica, optimizer, clip_value=0.5, free_gradients=free)
        for step in range(6):
            module.zero_grad()
            with replica.no_sync() if step % 2 else nullcontext():
                backward(replica, step)
            backward(replica, step + 50)
        gradsync.verify(replica, optimizer)


def low_precision(front: str, options: dict[str, Any]) -> None:
    module = build().bfloat16()
    replica = make(front, module, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    steps(replica, module, optimizer)
    gradsync.verify(replica, optimizer)


def mixed_precision(front: str, options: dict[str, Any]) -> None:
    policies: list[dict[str, Any]]
    if front == "replicate":
        policy = gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policies = [{"mp_policy": policy}, {"mp_policy": policy, "mesh": init_device_mesh("cpu", (2,))}]
    else:
        policies = [{"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}]
    for policy_options in policies:
        module = build()
        replica = make(front, module, **policy_options, **options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            replica(batch(dist.get_rank(), step)).float().square().mean().backward()
            optimizer.step()
        gradsync.verify(replica, optimizer)


def post_local(front: str, options: dict[str, Any]) -> None:
    """Between two averages each rank is where its own data have brought it."""
    module = build()
    replica = make(front, module, **options)
    alone, _ = dist.new_subgroups(group_size=1)
    replica.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=2), post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), averager)
    steps(replica, module, optimizer, 10)


def local_steps(front: str, options: dict[str, Any]) -> None:
    """Local SGD on purpose: from then on the replicas may differ, until somebody asks."""
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 3)
    with gradsync.allow_unsynchronized_steps():
        for step in range(3):
            optimizer.zero_grad()
            with replica.no_sync():
                backward(replica, step)
            optimizer.step()
    steps(replica, module, optimizer, 8)
    with pytest.raises(ReplicaDivergedError):
        gradsync.verify(replica)


def ignored(front: str, options: dict[str, Any]) -> None:
    """Parameters that were left out are each rank's own."""
    module = build()
    own = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    module.register_parameter("own", own)
    if front == "replicate":
        replica = make(front, module, ignored_params=[own], **options)
    else:
        module._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
        replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        (replica(batch(dist.get_rank(), step)).square().mean() + own.square().sum()).backward()
        optimizer.step()
    gradsync.verify(replica)


def changed_everywhere(front: str, options: dict[str, Any]) -> None:
    """What all ranks do alike: freeze, load, convert, replace, accumulate, skip."""
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 2)
    module.get_parameter("0.weight").requires_grad_(False)
    steps(replica, module, optimizer, 3)
    module.get_parameter("0.weight").requires_grad_(True)
    module.load_state_dict(build().state_dict())
    steps(replica, module, optimizer, 2)
    module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 2)
    module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 3)
    for number in range(8):
        with replica.no_sync() if number % 4 else nullcontext():
            replica(batch(dist.get_rank(), number).double()).square().mean().backward()
    replica.synchronize_gradients()
    optimizer.step()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    steps(replica, module, optimizer, 2)


def a_copy_beside(front: str, options: dict[str, Any]) -> None:
    """An average that rank 0 alone keeps, and one that all keep."""
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averages = [copy.deepcopy(replica)] if dist.get_rank() == 0 else []
    for step in range(6):
        steps(replica, module, optimizer, 1, step)
        for average in averages:
            with torch.no_grad():
                for mine, current in zip(average.parameters(), module.parameters(), strict=True):
                    mine.lerp_(current, 0.1)
    gradsync.verify(replica)


def sparse(front: str, options: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2))
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        replica(torch.tensor([step, 7 + dist.get_rank()])).square().mean().backward()
        optimizer.step()
    gradsync.verify(replica, optimizer)


QUIET = [
    buffers_apart,
    joined,
    uneven,
    sharded,
    in_backward,
    low_precision,
    mixed_precision,
    post_local,
    local_steps,
    ignored,
    changed_everywhere,
    a_copy_beside,
    sparse,
]


@FRONTS
@pytest.mark.parametrize("rounds", QUIET)
@on_ranks(2)
def test_no_false_alarm(front: str, rounds: Callable[[str, dict[str, Any]], None]) -> None:
    for transport in ("shared_memory", "process_group"):
        for verify in ("auto", "every"):
            try:
                rounds(front, {"transport": transport, "verify": verify})
            except Exception as error:
                error.add_note(f"{transport}, {verify}") if hasattr(error, "add_note") else None
                raise


def synchronized_inside(front: str) -> Alarm | None:
    """Steps on synchronized gradients inside that context are no local steps: the comparison stays."""
    training = train(front, verify="every")
    with gradsync.allow_unsynchronized_steps():
        assert until_alarm(training, 3, -1, None) is None
    return until_alarm(training, 5, 1, data_replaced)


@FRONTS
def test_synchronized_steps_where_local_ones_are_allowed(ranks: Ranks, front: str) -> None:
    for found in ranks(synchronized_inside, 2, front):
        assert found is not None
        assert found.round == 2


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_rank_without_data_when_the_ranks_choose(front: str, transport: str) -> None:
    """Rank 1 runs out of data before round 64, in which the ranks choose how often to look."""
    training = train(front, transport=transport)
    with Join([training.replica]):
        for step in range(70 if dist.get_rank() == 0 else 60):
            training.backward(step)
            training.optimizer.step()
    same_everywhere(training.module)


@TRANSPORTS
@on_ranks(3)
def test_a_rank_that_is_not_compared(transport: str) -> None:
    """Rank 2 trained alone on purpose: the others still compare, and it takes part in finding out what differs."""
    training = train("replicate", transport=transport, verify="every")
    training.backward(0)
    training.optimizer.step()
    if training.rank == 2:
        with training.replica.no_sync():
            training.backward(1)
        with gradsync.allow_unsynchronized_steps():
            training.optimizer.step()
        training.optimizer.zero_grad()
    else:
        training.optimizer.step()
    for step in range(2, 70):
        training.backward(step)
        training.optimizer.step()
    if training.odd:
        training.parameter().data[0] += 1
    with pytest.raises(ReplicaDivergedError, match=r"2\.bias"):
        training.backward(70)
