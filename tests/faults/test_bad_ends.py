"""Rounds that end badly on one rank: all ranks learn of it, or go on with the same gradients; never in silence.

After each fault the ranks train on, and have again what one process has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync.engine import without_backward
from gradsync.errors import (
    GradsyncError,
    HookError,
    ReplicaDivergedError,
    RoundMismatchError,
    UnfinishedRoundError,
    UnsynchronizedStepError,
)
from gradsync.replica import engine_of
from tests.ranks.small import (
    FRONTS,
    TRANSPORTS,
    assert_gradients,
    backward,
    build,
    make,
    mean_gradients,
    same_everywhere,
)
from tests.support.ranks import on_ranks


def train_on(module: nn.Module, replica: Any, first: int, plain: nn.Module | None = None) -> None:
    """Each of three rounds gives the mean of one process again; `plain`: the same module, if it is not plain itself."""
    for step in range(first, first + 3):
        wanted = mean_gradients(module if plain is None else plain, step)
        replica.zero_grad()
        backward(replica, step)
        assert_gradients(module, wanted)


def same_gradients(module: nn.Module) -> None:
    """On both ranks, to the bit, and none is missing."""
    gradients = [parameter.grad for parameter in module.parameters()]
    flat = torch.cat([one.flatten() for one in gradients if one is not None])
    assert flat.numel() == sum(parameter.numel() for parameter in module.parameters())
    every = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(every, flat)
    assert torch.equal(*every)


class Mean:
    """A communication hook that fails in one bucket on rank 0, when it is told to."""

    def __init__(self) -> None:
        self.fails: Callable[[Any], bool] | None = None
        self.later = False

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        fails = dist.get_rank() == 0 and self.fails is not None and self.fails(bucket)
        if fails and not self.later:
            raise ZeroDivisionError("in the hook")

        def mean(future: Any) -> Tensor:
            if fails:
                raise ZeroDivisionError("in the hook's future")
            total: Tensor = future.value()[0]
            return total / 2

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(mean)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_hook_that_raises_in_the_last_bucket_on_one_rank(front: str, transport: str) -> None:
    """Other buckets have left: nobody gets a sum of different buckets, or of different batches."""
    module, hook = build(), Mean()
    replica = make(front, module, transport=transport)
    replica.register_comm_hook(None, hook)
    train_on(module, replica, 0)
    hook.fails = lambda bucket: bucket.is_last()
    replica.zero_grad()
    if dist.get_rank() == 0:
        with pytest.raises(ZeroDivisionError, match="in the hook"):
            backward(replica, 3)
        hook.fails = None
        with pytest.raises(RoundMismatchError, match=r"rank 0: in round 3 .*whose backward had raised"):
            backward(replica, 4)  # whose forward has the hook send the rest
    else:
        with pytest.raises(RoundMismatchError, match=r"rank 0: in round 3 .*whose backward had raised"):
            backward(replica, 3)
    hook.fails = None
    train_on(module, replica, 5)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("buckets", [1, 5])
@on_ranks(2)
def test_a_hook_that_raises_before_anything_has_left(front: str, transport: str, buckets: int) -> None:
    """That rank has sent nothing, so its next backward is in the round that the other one is in."""
    module, hook = build(), Mean()
    replica = make(front, module, transport=transport, bucket_cap_mb=100 if buckets == 1 else 0.0001)
    replica.register_comm_hook(None, hook)
    train_on(module, replica, 0)
    hook.fails = lambda bucket: bucket.index() == 0
    replica.zero_grad()
    parts = [mean_gradients(module, 4, [0]), mean_gradients(module, 3, [1])]
    if dist.get_rank() == 0:
        with pytest.raises(ZeroDivisionError, match="in the hook"):
            backward(replica, 3)
        hook.fails = None
        replica.zero_grad()
        backward(replica, 4)
    else:
        backward(replica, 3)
    assert_gradients(module, [(first + second) / 2 for first, second in zip(*parts, strict=True)])
    hook.fails = None
    train_on(module, replica, 5)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_hook_s_future_that_fails_on_one_rank_of_a_module_with_buffers(front: str, transport: str) -> None:
    """That rank goes on to the end of what the ranks do together, and raises there."""
    torch.manual_seed(0)
    module, hook = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), Mean()
    replica = make(front, module, transport=transport)
    replica.register_comm_hook(None, hook)
    hook.later = True
    for step in range(3):
        replica.zero_grad()
        backward(replica, step)
    hook.fails = lambda bucket: bucket.is_last()
    replica.zero_grad()
    if dist.get_rank() == 0:
        with pytest.raises(HookError, match="in the hook's future"):
            backward(replica, 3)
    else:
        backward(replica, 3)
    hook.fails = None
    for step in range(4, 7):
        replica.zero_grad()
        backward(replica, step)
        same_gradients(module)


class Twice(nn.Module):
    """Its second layer may be used more often than ever before, so that a gradient comes late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.second, x, use_reentrant=True)
        return x


@TRANSPORTS
@on_ranks(2)
def test_a_late_gradient_that_one_rank_removes(transport: str) -> None:
    module = Twice()
    replica: Any = make("replicate", module, transport=transport)
    train_on(module, replica, 0)
    module.times = 3
    x = torch.ones(3, 4, requires_grad=True)
    if dist.get_rank() == 0:
        x.register_hook(lambda gradient: replica.zero_grad())
    replica.zero_grad()
    with pytest.raises(GradsyncError, match="was removed during backward" if dist.get_rank() == 0 else "had raised"):
        replica(x).sum().backward()
    module.times = 1
    train_on(module, replica, 5)


class Fussy(torch.optim.SGD):
    """Raises on rank 0 when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails and dist.get_rank() == 0:
            raise ZeroDivisionError("in the optimizer")
        return super().step(closure)


@TRANSPORTS
@pytest.mark.parametrize("buffers", [False, True])
@on_ranks(2)
def test_two_replicas_and_an_optimizer_in_backward_that_raises(transport: str, buffers: bool) -> None:
    """The other replica's round, in the same backward, ends as it does on the other rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)] if buffers else [nn.Linear(4, 4)]
    body: Any = make("replicate", nn.Sequential(*layers), transport=transport)
    head: Any = make("replicate", nn.Linear(4, 4), transport=transport)
    gradsync.overlap_optimizer(head, Fussy(head.parameters(), lr=0.1))

    def step() -> None:
        body.zero_grad()
        head(body(torch.randn(4, 4))).square().sum().backward()

    for _ in range(3):
        step()
    Fussy.fails = True
    if dist.get_rank() == 0:
        with pytest.raises(ZeroDivisionError, match="in the optimizer"):
            step()
    else:
        step()
    same_gradients(body)


class Fails(torch.autograd.Function):
    """In backward, on rank 0, when it is told to."""

    on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Fails.on and dist.get_rank() == 0:
            raise ValueError("on purpose")
        return gradients[0]


class TwoParts(nn.Module):
    """Its backward may raise between the two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Fails.apply(self.first(x)))


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_nothing_is_delivered_of_a_round_that_another_rank_has_left(front: str, transport: str) -> None:
    module = TwoParts()
    replica = make(front, module, transport=transport)
    train_on(module, replica, 0)
    Fails.on = True
    replica.zero_grad()
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="on purpose"):
            backward(replica, 3)
        Fails.on = False
        with pytest.raises(RoundMismatchError):
            backward(replica, 4)
    else:
        with pytest.raises(RoundMismatchError, match="nothing was delivered"):
            backward(replica, 3)
        Fails.on = False
    assert all(parameter.grad is None for parameter in module.parameters())
    train_on(module, replica, 5)


@TRANSPORTS
@on_ranks(2)
def test_weights_that_are_set_after_a_backward_that_raised(transport: str) -> None:
    module = TwoParts()
    replica: Any = make("replicate", module, transport=transport)

    def mean_of_ranks(weight: float) -> float:
        """Each rank's loss is its number plus one."""
        replica.zero_grad()
        replica.set_round_weight(weight)
        (replica(torch.ones(1, 4)).sum() * 0 + module.first.weight.sum() * (dist.get_rank() + 1)).backward()
        assert module.first.weight.grad is not None
        return module.first.weight.grad[0, 0].item()

    weight = [1.0, 3.0][dist.get_rank()]
    assert [mean_of_ranks(weight) for _ in range(3)] == [1.75] * 3
    replica.zero_grad()
    output = replica(torch.ones(1, 4, requires_grad=True))
    output.register_hook(_raise)
    with pytest.raises(ValueError, match="on all ranks"):
        output.sum().backward()
    assert [mean_of_ranks(weight) for _ in range(2)] == [1.75] * 2


def _raise(gradient: Tensor) -> None:
    raise ValueError("on all ranks")


@on_ranks(2)
def test_a_weight_that_is_set_during_backward_is_for_the_next_round() -> None:
    module = nn.Linear(4, 1, bias=False)
    replica: Any = make("replicate", module)
    x = torch.full((1, 4), dist.get_rank() + 1.0)

    def mean() -> float:
        replica.zero_grad()
        replica(x).sum().backward()
        assert module.weight.grad is not None
        return module.weight.grad[0, 0].item()

    assert [mean(), mean()] == [1.5, 1.5]
    handle = module.weight.register_hook(lambda _: replica.set_round_weight([1.0, 3.0][dist.get_rank()]))
    assert mean() == 1.5
    handle.remove()
    assert [mean(), mean()] == [1.75, 1.5]


@on_ranks(2)
def test_grad_after_a_backward_that_raised_is_no_round() -> None:
    module = TwoParts()
    replica: Any = make("replicate", module)
    train_on(module, replica, 0)
    x = torch.ones(1, 4, requires_grad=True)
    broken, fine = replica(x), replica(x)
    broken.register_hook(_raise)
    with pytest.raises(ValueError, match="on all ranks"):
        broken.sum().backward()
    before = gradsync.statistics(replica).rounds
    if dist.get_rank() == 0:
        torch.autograd.grad(fine.sum(), x)
    assert gradsync.statistics(replica).rounds == before
    train_on(module, replica, 3)


@on_ranks(2)
def test_a_second_pass_does_not_vouch_for_gradients_that_it_did_not_carry() -> None:
    module = Twice()
    module.unused = nn.Parameter(torch.zeros(4))
    replica: Any = make("replicate", module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for times in (1, 3):
        module.times = times
        optimizer.zero_grad()
        module.unused.grad = torch.full((4,), dist.get_rank() + 1.0)
        replica(torch.ones(2, 4, requires_grad=True)).sum().backward()
        with pytest.raises(UnsynchronizedStepError, match="unused"):
            optimizer.step()
    assert gradsync.statistics(replica).corrected_rounds == 1
    same_everywhere(module)


class Aside(torch.autograd.Function):
    """Does something in backward."""

    action: Callable[[], None] | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Aside.action is not None:
            with torch.enable_grad():
                Aside.action()
        return gradients[0]


@TRANSPORTS
@on_ranks(2)
def test_a_backward_without_synchronization_inside_one_with_it(transport: str) -> None:
    """The round is open: what comes in it is part of it, also behind a bucket that has left."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            return second(Aside.apply(first(x)))

    replica: Any = make("replicate", Model(), transport=transport)

    def gradient() -> float:
        replica.zero_grad()
        replica(torch.ones(1, 4)).sum().backward()
        assert second.weight.grad is not None
        return second.weight.grad[0, 0].item()

    def inside() -> None:
        with replica.no_sync():
            (second.weight.sum() * 100).backward()

    usual = [gradient() for _ in range(3)][-1]
    Aside.action = inside
    assert gradient() - usual == pytest.approx(100)
    Aside.action = None
    assert gradient() == usual


@on_ranks(2)
def test_gradients_that_are_kept_elsewhere_leave_dirty_ones_dirty() -> None:
    """As distributed autograd does: what is in `.grad` was not carried, and an optimizer must not step on it."""
    module = build()
    replica: Any = make("replicate", module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backward(replica)
    optimizer.zero_grad()
    with replica.no_sync():
        backward(replica, 1)
    elsewhere = [torch.full_like(parameter, dist.get_rank() + 1.0) for parameter in module.parameters()]
    without_backward.synchronize_tensors(engine_of(replica), elsewhere)
    assert all(torch.equal(one, torch.full_like(one, 1.5)) for one in elsewhere)
    with pytest.raises(UnsynchronizedStepError):
        optimizer.step()


@pytest.mark.parametrize("over_mesh", [False, True])
@on_ranks(2)
def test_a_backward_that_only_accumulates_after_one_that_raised(over_mesh: bool) -> None:
    """It ends for itself, and not the round that was left."""
    module, plain = TwoParts(), TwoParts()
    where: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))} if over_mesh else {}
    replica: Any = make("replicate", module, **where)
    train_on(module, replica, 0, plain)
    x = torch.ones(3, 4)
    kept, fails = replica(x).sum(), replica(x).sum()
    Fails.on = True
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="on purpose"):
            fails.backward()
        Fails.on = False
        with replica.no_sync():
            kept.backward()
        with pytest.raises(RoundMismatchError):
            replica(x)
    else:
        with pytest.raises(RoundMismatchError):
            fails.backward()
        Fails.on = False
    train_on(module, replica, 3, plain)


# --- backwards that raise on all ranks -------------------------------------------------------------------


@TRANSPORTS
@on_ranks(2)
def test_gradients_of_before_a_backward_that_raised(transport: str) -> None:
    """Those of buckets that had left are lost, and nobody steps without them, or adds to the others only."""
    module = build()
    replica: Any = make("replicate", module, transport=transport)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, replica, 0)
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    handle = module[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(replica, 3)
    handle.remove()
    for _ in range(2):
        with pytest.raises(UnsynchronizedStepError):
            optimizer.step()
        replica(torch.ones(3, 4))  # abandons it
    kept = [p.grad for p in module.parameters()]
    assert any(one is None for one in kept)
    assert all(one is None or torch.equal(one, two) for one, two in zip(kept, before, strict=True) if two is not None)
    with pytest.raises(UnfinishedRoundError, match=r"Call zero_grad\(\) first"):
        backward(replica, 4)
    train_on(module, replica, 5)
    optimizer.step()
    same_everywhere(module)


@on_ranks(2)
def test_a_sum_that_was_divided_for_a_gradient_that_never_came() -> None:
    module = nn.Linear(4, 1, bias=False)
    replica: Any = make("replicate", module, reduce="sum")
    x = torch.full((1, 4), dist.get_rank() + 1.0)
    replica(x).sum().backward()
    handle = module.weight.register_hook(_raise)
    with pytest.raises(ValueError, match="on all ranks"):
        replica(x).sum().backward()
    handle.remove()
    replica(x).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[0, 0].item() == 6.0


@TRANSPORTS
@on_ranks(2)
def test_a_backward_that_is_met_inside_a_checkpoint_after_one_that_raised(transport: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    replica: Any = make("replicate", module, transport=transport)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x = (torch.ones(2, 8) * (dist.get_rank() + 1)).requires_grad_()

    def through_submodules() -> None:
        optimizer.zero_grad()
        y = x
        for layer in module:
            y = checkpoint(layer, y, use_reentrant=True)
        y.sum().backward()
        optimizer.step()

    through_submodules()
    handle = module[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replica(x).sum().backward()
    handle.remove()
    replica(x.detach())
    for _ in range(2):
        through_submodules()
    same_everywhere(module)


# --- several replicas, optimizers, skipping --------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("buffers", [False, True])
@on_ranks(2)
def test_two_replicas_of_which_one_can_not_be_launched_on_one_rank(transport: str, buffers: bool) -> None:
    """It is abandoned in its turn: nobody waits for the buffers of the other one meanwhile."""
    twice = Twice()
    first: Any = make("replicate", twice, transport=transport)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8)] if buffers else [nn.Linear(8, 8)]
    second: Any = make("replicate", nn.Sequential(*layers), transport=transport)

    def step(removes: bool = False) -> None:
        first.zero_grad()
        second.zero_grad()
        x = torch.randn(4, 4, requires_grad=True)
        if removes:
            x.register_hook(lambda gradient: first.zero_grad())
        second(first(x)).square().sum().backward()

    for _ in range(3):
        step()
    twice.times = 3
    with pytest.raises(GradsyncError, match="was removed during backward" if dist.get_rank() else "had raised"):
        step(removes=dist.get_rank() == 1)
    twice.times = 1
    for _ in range(3):
        step()
        same_gradients(first)
        same_gradients(second)


@TRANSPORTS
@on_ranks(2)
def test_an_optimizer_that_raises_while_backward_runs(transport: str) -> None:
    """That rank goes on to the end of the round, and the replicas, of which one has not stepped, are found out."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    replica: Any = make("replicate", module, transport=transport, verify="every")
    gradsync.overlap_optimizer(replica, Fussy(module.parameters(), lr=0.1))

    def step() -> None:
        replica.zero_grad()
        replica(torch.randn(4, 8)).square().sum().backward()

    for _ in range(4):
        step()
    Fussy.fails = True
    if dist.get_rank() == 0:
        with pytest.raises(ZeroDivisionError, match="in the optimizer"):
            step()
    else:
        step()
    Fussy.fails = False
    for _ in range(2):
        with pytest.raises(ReplicaDivergedError):
            step()


@TRANSPORTS
@on_ranks(2)
def test_a_backward_that_raises_on_one_rank_with_an_optimizer_in_it(transport: str) -> None:
    """The other one may find out in the middle of its backward, or at its end; then they are in step again."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    replica: Any = make("replicate", module, transport=transport, verify="never")
    gradsync.overlap_optimizer(replica, torch.optim.SGD(module.parameters(), lr=0.1))

    def step() -> None:
        replica.zero_grad()
        replica(torch.randn(4, 8)).square().sum().backward()

    for _ in range(4):
        step()
    for layer in (module[1], module[2]):
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.05))
    if dist.get_rank() == 0:
        handle = module[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step()
        handle.remove()
        with pytest.raises(RoundMismatchError):
            step()
    else:
        with pytest.raises(RoundMismatchError):
            step()
    for _ in range(2):
        step()
        same_gradients(module)


@TRANSPORTS
@on_ranks(2)
def test_skipping_after_a_late_gradient(transport: str) -> None:
    class Model(Twice):
        def forward(self, x: Tensor) -> Tensor:
            x = Fails.apply(self.first(x))
            for _ in range(self.times):
                x = checkpoint(self.second, x, use_reentrant=True)
            return x

    module = Model()
    replica: Any = make("replicate", module, transport=transport)
    train_on(module, replica, 0)
    module.times, Fails.on = 3, True
    replica.zero_grad()
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="on purpose"):
            backward(replica, 3)
        replica.skip_round()
    else:
        backward(replica, 3)
    module.times, Fails.on = 1, False
    train_on(module, replica, 4)


@on_ranks(2)
def test_a_wrapper_in_eval_mode_whose_loss_has_a_parameter_beside_the_output() -> None:
    """It may arrive before the output is passed."""
    module = nn.Linear(4, 1, bias=False)
    module.extra = nn.Parameter(torch.zeros(3))
    replica = gradsync.DistributedDataParallel(module)
    x = torch.full((1, 4), dist.get_rank() + 1.0)
    for training in (True, True, False, False):
        replica.train(training)
        replica.zero_grad()
        (replica(x).sum() + module.extra.sum() * (dist.get_rank() + 1)).backward()
        assert module.weight.grad is not None
        assert module.extra.grad is not None
        assert module.weight.grad[0, 0].item() == module.extra.grad[0].item() == 1.5
