"""torch's `Join` context with replicas of both fronts: ranks that run out of inputs shadow the others' rounds."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import gradsync
from gradsync.errors import InvalidOptionError
from tests.ranks.small import FRONTS, TRANSPORTS, backward, batch, build, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks


def descend(module: nn.Module) -> None:
    """A step of gradient descent in one process."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad)


@FRONTS
@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("initial", [True, False])
@on_ranks(2)
def test_join(front: str, initial: bool, hook: bool, with_zero: bool) -> None:
    """Against one process that takes the same steps on the batches that are left."""
    module: Any = nn.Sequential(build(), nn.BatchNorm1d(2))
    alone: Any = copy.deepcopy(module)
    replica = make(front, module)
    if hook:
        replica.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer: Any = torch.optim.Adam(module.parameters(), lr=0.05)
    joinables: list[Any] = [replica]
    if with_zero:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.05)
        joinables.append(optimizer)
    with Join(joinables, divide_by_initial_world_size=initial):
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            replica(batch(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
    same_everywhere(module)

    expected = torch.optim.Adam(alone.parameters(), lr=0.05)
    for step in range(5):
        expected.zero_grad()
        here = [rank for rank in range(2) if step < 3 + 2 * rank]
        divisor = 2 if initial or hook else len(here)  # a hook alone decides what it divides by
        sum(alone(batch(rank, step)).square().sum() / divisor for rank in here).backward()
        expected.step()
    for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)

    # The next context starts afresh; and outside of any, a forward is a forward.
    with Join(joinables):
        backward(replica)
        optimizer.step()
    same_everywhere(module)
    if dist.get_rank() == 0:
        replica(batch(0))


def divided(front: str, initial: bool) -> list[float]:
    module = nn.Linear(1, 1, bias=False)
    replica = make(front, module)
    seen = []
    with Join([replica], divide_by_initial_world_size=initial):
        for _ in range(1 + dist.get_rank()):
            replica.zero_grad()
            replica(torch.full((1, 1), 6.0)).sum().backward()
            assert module.weight.grad is not None
            seen.append(module.weight.grad.item())
    return seen


@FRONTS
def test_what_a_joined_ranks_gradient_is_divided_by(ranks: Ranks, front: str) -> None:
    assert ranks(divided, 3, front, True) == [[6], [6, 4], [6, 4, 2]]
    assert ranks(divided, 3, front, False) == [[6], [6, 6], [6, 6, 6]]


def thrown(front: str) -> tuple[str, float]:
    module = nn.Linear(1, 1, bias=False)
    replica = make(front, module)
    found = ""
    try:
        with Join([replica], throw_on_early_termination=True):
            for _ in range(2 + dist.get_rank()):
                replica(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        found = str(error)
    replica.zero_grad()
    replica(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()  # training goes on
    assert module.weight.grad is not None
    return found, module.weight.grad.item()


@FRONTS
def test_early_termination(ranks: Ranks, front: str) -> None:
    (first, one), (second, other) = ranks(thrown, 2, front)
    assert "Rank 0 exhausted all inputs." in first
    assert "Detected at least one rank that exhausted inputs. Throwing across all ranks." in second
    assert (one, other) == (1.5, 1.5)


@FRONTS
@on_ranks(2)
def test_a_context_that_is_switched_off(front: str) -> None:
    replica = make(front, build())
    with Join([replica], enable=False):
        replica(batch(dist.get_rank())).sum().backward()
        if dist.get_rank() == 0:
            replica(batch(0))
    assert not replica._join_config.enable


# --- what a step may look like -------------------------------------------------------------------------


class Parts(nn.Module):
    """A part that all ranks use, one that only rank 1 uses, one that nobody uses; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.some, self.never = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        y: Tensor = self.common(x)
        return self.some(y) if dist.get_rank() == 1 else y


def plainly(replica: Any, x: Tensor) -> None:
    replica(x).square().sum().backward()


def accumulated(replica: Any, x: Tensor) -> None:
    with replica.no_sync():
        (replica(x).square().sum() / 2).backward()
    (replica(x).square().sum() / 2).backward()


def two_forwards(replica: Any, x: Tensor) -> None:
    (replica(x).square().sum() / 2 + replica(x).square().sum() / 2).backward()


def two_backwards(replica: Any, x: Tensor) -> None:
    first, second = replica(x).square().sum() / 2, replica(x).square().sum() / 2
    first.backward()
    second.backward()


def retained(replica: Any, x: Tensor) -> None:
    loss = replica(x).square().sum() / 2
    loss.backward(retain_graph=True)
    loss.backward()


def forward_inside(replica: Any, x: Tensor) -> None:
    with replica.no_sync():
        loss = replica(x).square().sum()
    loss.backward()


def forward_outside(replica: Any, x: Tensor) -> None:
    loss = replica(x).square().sum() / 2
    with replica.no_sync():
        loss.backward()
    (replica(x).square().sum() / 2).backward()


def without_a_backward(replica: Any, x: Tensor) -> None:
    with replica.no_sync():
        replica(x).square().sum().backward()
    replica.synchronize_gradients()


def evaluated_by_one(replica: Any, x: Tensor) -> None:
    if dist.get_rank() == 1:
        replica.eval()
        with torch.no_grad():
            replica(x)
        replica.train()
    replica(x).square().sum().backward()


def past_the_front(replica: Any, x: Tensor) -> None:
    getattr(replica, "module", replica).forward(x).square().sum().backward()


STEPS = [
    plainly,
    past_the_front,
    accumulated,
    two_forwards,
    two_backwards,
    retained,
    forward_inside,
    forward_outside,
    without_a_backward,
    evaluated_by_one,
]


@FRONTS
@pytest.mark.parametrize("step", STEPS)
@on_ranks(2)
def test_steps_of_every_kind(front: str, step: Any) -> None:
    torch.manual_seed(0)
    module = Parts()
    alone = copy.deepcopy(module)
    names = list(module.state_dict())
    replica = make(front, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with Join([replica]):
        for number in range(1 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            step(replica, batch(dist.get_rank(), number))
            optimizer.step()
    same_everywhere(module)
    assert list(module.state_dict()) == names
    assert module.never.weight.grad is None

    for number in range(3):
        alone.zero_grad()
        losses = [alone.some(alone.common(batch(1, number))).square().sum() / 2]
        if number == 0:
            losses.append(alone.common(batch(0, number)).square().sum() / 2)
        sum(losses, torch.zeros(())).backward()
        descend(alone)
    for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert module.steps >= 3  # those of the rank that went on, not of the one that stopped


def kept(front: str, transport: str, how: str) -> list[float]:
    """What an earlier round left in `.grad` stays what it is, although ranks without data bring nothing."""
    module = nn.Linear(1, 1, bias=False)
    replica = make(front, module, transport=transport, reduce="sum" if how == "sum" else "mean")
    if how == "hook":
        replica.register_comm_hook(None, default_hooks.allreduce_hook)
    seen = []
    with Join([replica], divide_by_initial_world_size=how != "of those with data"):
        for _ in range(1 + 2 * dist.get_rank()):
            replica(torch.full((1, 1), 6.0)).sum().backward()
            assert module.weight.grad is not None
            seen.append(module.weight.grad.item())
    return seen


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("mean", [6, 9, 12]),
        ("of those with data", [6, 12, 18]),
        ("sum", [12, 18, 24]),
        ("hook", [6, 9, 12]),
    ],
)
def test_gradients_that_are_kept(ranks: Ranks, front: str, transport: str, how: str, seen: list[float]) -> None:
    assert ranks(kept, 2, front, transport, how) == [seen[:1], seen]


@FRONTS
@on_ranks(2)
def test_an_optimizer_in_backward(front: str) -> None:
    module, alone = build(), build()
    replica = make(front, module)
    gradsync.overlap_optimizer(replica, torch.optim.SGD(module.parameters(), lr=0.05))
    with Join([replica]):
        for number in range(1 + 2 * dist.get_rank()):
            replica.zero_grad()
            replica(batch(dist.get_rank(), number)).square().sum().backward()
    same_everywhere(module)
    for number in range(3):
        alone.zero_grad()
        parts = range(2) if number == 0 else [1]
        sum((alone(batch(part, number)).square().sum() / 2 for part in parts), torch.zeros(())).backward()
        descend(alone)
    for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


# --- several members -----------------------------------------------------------------------------------


@FRONTS
@on_ranks(2)
def test_several_members(front: str) -> None:
    modules = [build(), nn.Linear(4, 1)]
    replicas = [make(front, module) for module in modules]
    optimizer: Any = ZeroRedundancyOptimizer(
        [*modules[0].parameters(), *modules[1].parameters()], torch.optim.SGD, lr=0.1
    )
    with Join([*replicas, optimizer]):
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            for replica in replicas:
                backward(replica, step)
            optimizer.step()
    for module in modules:
        same_everywhere(module)


def entangled(front: str) -> None:
    first, second = make(front, build()), make(front, nn.Linear(2, 1))
    with Join([first, second]):
        second(first(batch(0))).sum().backward()


@FRONTS
def test_two_replicas_in_one_backward_are_refused(ranks: Ranks, front: str) -> None:
    for outcome in ranks.outcomes(entangled, 2, front):
        assert isinstance(outcome.exception, InvalidOptionError)
        assert "run each one's forward and backward in turn" in str(outcome.exception)


@FRONTS
@on_ranks(2)
def test_another_context_after_an_exception(front: str) -> None:
    """On all ranks alike, between a forward and its backward; another replica's context is not held up by it."""
    first, second = make(front, build()), make(front, nn.Linear(4, 1))
    with pytest.raises(ZeroDivisionError), Join([first]):
        first(batch(0)).sum() / (1 // 0)
    with Join([second]):
        second(batch(dist.get_rank())).sum().backward()
    same_everywhere(second)


# --- what is particular to `replicate` -----------------------------------------------------------------


class Meta(type):
    """A class of classes, which some libraries have for their modules."""


class WithMeta(nn.Linear, metaclass=Meta):
    pass


@on_ranks(2)
def test_join_leaves_no_trace() -> None:
    module: Any = gradsync.replicate(WithMeta(4, 2))
    assert issubclass(type(module), Joinable)
    names = sorted(module.__dict__)
    with Join([module]):
        assert module._join_config.enable
        assert sorted(module.__dict__) == names
        twin = copy.deepcopy(module)
        assert not twin._join_config.enable
        assert type(pickle.loads(pickle.dumps(module))) is WithMeta
        for step in range(1 + dist.get_rank()):
            module(batch(dist.get_rank(), step)).sum().backward()
    assert not module._join_config.enable
    assert sorted(module.__dict__) == names


@on_ranks(2)
def test_modules_that_were_replicated_together() -> None:
    first: Any = nn.Linear(4, 4)
    second: Any = nn.Linear(4, 2)
    gradsync.replicate([first, second])
    with pytest.raises(InvalidOptionError, match="give Join the first of them"):
        Join([second])
    with Join([first]):
        for step in range(1 + 2 * dist.get_rank()):
            second(first(batch(dist.get_rank(), step))).sum().backward()
    same_everywhere(first)
    same_everywhere(second)


@on_ranks(2)
def test_replicas_inside_are_refused() -> None:
    module: Any = build()
    gradsync.replicate(module[0])
    gradsync.replicate(module)
    with pytest.raises(InvalidOptionError, match=r"contains 1 submodule.*Linear.*gradsync\.uneven"):
        Join([module])


@on_ranks(2)
def test_over_a_mesh_in_low_precision() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module: Any = build()
    policy = gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gradsync.replicate(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Join([module]):
        for step in range(1 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            module(batch(dist.get_rank(), step)).sum().backward()
            optimizer.step()
    same_everywhere(module)
