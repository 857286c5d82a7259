"""Errors that a loop catches and goes on from: nothing is lost without a word, and the cure that is named cures."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.errors import GradsyncError, ReplicaDivergedError, RoundMismatchError, UnsynchronizedStepError
from tests.faults.test_bad_ends import Mean, train_on
from tests.ranks.small import (
    FRONTS,
    TRANSPORTS,
    Fails,
    assert_gradients,
    backward,
    batch,
    build,
    make,
    mean_backward,
    same_everywhere,
    short_group,
)
from tests.support.ranks import on_ranks


class Stumbling(nn.Sequential):
    """Raises in the middle of backward, when it is told to: what is behind the second layer is done by then."""

    stumbles = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            x = layer(x)
            if number == 1 and self.stumbles:
                x = Fails.apply(x)
        return x


def stumbling() -> Stumbling:
    return Stumbling(*build())


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_hook_that_raises_keeps_what_was_accumulated(front: str, transport: str) -> None:
    """In the first bucket: nothing has left, so what an earlier backward without synchronization brought is there."""
    module, hook, plain = build(), Mean(), build()
    replica = make(front, module, transport=transport)
    replica.register_comm_hook(None, hook)
    train_on(module, replica, 0)
    replica.zero_grad()
    with replica.no_sync():
        backward(replica, 10)
    held = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    hook.fails = lambda bucket: True
    if dist.get_rank() == 0:
        with pytest.raises(ZeroDivisionError, match="in the hook"):
            backward(replica, 11)
        hook.fails = None
        assert all(parameter.grad is not None for parameter in module.parameters())
        for parameter, before in zip(module.parameters(), held, strict=True):  # of the backward that raised too
            assert parameter.grad is not None
            parameter.grad.copy_(before)
        backward(replica, 12)
    else:
        backward(replica, 12)
    mean_backward(plain, 10)
    mean_backward(plain, 12)
    assert_gradients(module, [parameter.grad for parameter in plain.parameters()])


@TRANSPORTS
@on_ranks(2)
def test_no_step_on_a_round_that_was_left(transport: str) -> None:
    """Something of it is under way, and gradients of an earlier round are still there."""
    module = stumbling()
    replica = make("replicate", module, transport=transport)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, replica, 0)
    optimizer.step()
    x = batch(dist.get_rank(), 9).requires_grad_()
    other = replica(x).sum()
    if dist.get_rank() == 1:
        module.stumbles = True
        with pytest.raises(ZeroDivisionError):
            backward(replica, 3)
        module.stumbles = False
        torch.autograd.grad(other, x)  # another backward: the one before is known to be over
        with pytest.raises(UnsynchronizedStepError, match=r"lost with a backward that raised.*zero_grad\(\)"):
            optimizer.step()
        with pytest.raises(RoundMismatchError):
            replica(batch(1, 4))
    else:
        with pytest.raises(RoundMismatchError):
            backward(replica, 3)
    train_on(module, replica, 5)
    optimizer.step()
    same_everywhere(module)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_sum_is_not_divided_for_a_backward_that_raised(front: str, transport: str) -> None:
    module = build()
    replica = make(front, module, transport=transport, reduce="sum")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        backward(replica, step)
        optimizer.step()
    optimizer.zero_grad()
    backward(replica, 3)
    held = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    if dist.get_rank() == 1:

        def fails(gradient: Tensor) -> None:
            raise ZeroDivisionError("on purpose")

        handles = [module.get_parameter(name).register_hook(fails) for name in ("4.weight", "4.bias")]
        with replica.no_sync(), pytest.raises(ZeroDivisionError):
            backward(replica, 4)
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert_gradients(module, held, rtol=0, atol=0)
    same_everywhere(module)
    optimizer.zero_grad()
    backward(replica, 5)


@TRANSPORTS
@on_ranks(2)
def test_replicas_that_have_diverged_do_not_train_on(transport: str) -> None:
    """However often the error is caught, until they are the same again."""
    module = build()
    replica = make("replicate", module, transport=transport)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(20):
        if step == 3:
            good = module.get_parameter("4.bias").data.clone()
        if step == 3 and dist.get_rank() == 1:
            module.get_parameter("4.bias").data.add_(1)
        if step == 15:
            module.get_parameter("4.bias").data.copy_(good)
        optimizer.zero_grad()
        if 3 <= step < 15:
            with pytest.raises(ReplicaDivergedError):
                backward(replica, step)
        else:
            backward(replica, step)
            optimizer.step()


def two(transport: str, group: Any) -> tuple[Any, Any, torch.optim.Optimizer]:
    first, second = stumbling(), stumbling()
    second[4] = nn.Linear(8, 4)
    for module in (first, second):
        gradsync.replicate(module, process_group=group, transport=transport, bucket_cap_mb=0.0001)
    return first, second, torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)


@pytest.mark.parametrize("skips", [("second",), ("first",), ("second", "first"), ("first", "second")])
@TRANSPORTS
@on_ranks(2)
def test_skipping_one_replica_skips_all_of_the_backward(transport: str, skips: tuple[str, ...]) -> None:
    """Whose backward has raised: the others have rounds of all of them open."""
    first, second, optimizer = two(transport, short_group(10))
    for step in range(7):
        optimizer.zero_grad()
        x = batch(dist.get_rank(), step)
        fails = step == 3 and dist.get_rank() == 1
        first.stumbles = fails
        loss = first(second(x)).sum()
        if not fails:
            loss.backward()
        else:
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            for name in skips:
                {"first": first, "second": second}[name].skip_round()
        if step == 3:
            parts = nn.Sequential(*copy.deepcopy([*second]), *copy.deepcopy([*first]))
            parts.zero_grad()
            parts(batch(0, step)).sum().backward()
            late = list(parts[:5].parameters())  # of what had left before it raised, half is this rank's
            for parameter, alone in zip([*second.parameters(), *first[:2].parameters()], late, strict=False):
                torch.testing.assert_close(parameter.grad, alone.grad)
        optimizer.step()
        same_everywhere(nn.ModuleList([*first, *second]))


@contextlib.contextmanager
def interrupted(seconds: float) -> Any:
    """Ctrl-C after so many seconds, as Python sees it."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("replicas", [1, 2])
@TRANSPORTS
@on_ranks(2)
def test_an_interrupt_while_waiting(transport: str, replicas: int) -> None:
    """One rank leaves the end of a backward that the other one comes to: that is told, and then they are in step."""
    first, second, optimizer = two(transport, short_group(20))
    modules = [first, second][:replicas]
    seen: list[str] = []
    for step in range(8):
        optimizer.zero_grad()
        x = batch(dist.get_rank(), step)
        try:
            if step == 3 and dist.get_rank() == 1:
                with interrupted(0.5):
                    sum(module(x).square().mean() for module in modules).backward()
                continue
            if step == 3:
                time.sleep(1.5)
            sum(module(x).square().mean() for module in modules).backward()
            optimizer.step()
        except GradsyncError as error:
            seen.append(f"{step} {type(error).__name__}")
            if isinstance(error, ReplicaDivergedError):
                for module in (first, second):
                    for parameter in module.parameters():
                        dist.broadcast(parameter.data, 0)
    # Rank 0 has stepped, and rank 1 has not.
    assert seen == ["4 RoundMismatchError", "5 ReplicaDivergedError"], seen
    same_everywhere(nn.ModuleList([*first, *second]))


@TRANSPORTS
@on_ranks(2)
def test_an_interrupt_after_which_nobody_steps(transport: str) -> None:
    """The ranks go on as if the round had never been."""
    first, _, optimizer = two(transport, short_group(20))
    for step in range(6):
        optimizer.zero_grad()
        loss = first(batch(dist.get_rank(), step)).square().mean()
        if step == 3 and dist.get_rank() == 1:
            with interrupted(0.5):
                loss.backward()
            continue
        if step == 3:
            loss.register_hook(lambda gradient: time.sleep(1.5))
            loss.backward()
            continue
        loss.backward()
        optimizer.step()
    same_everywhere(first)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_zero_grad_cures(front: str, transport: str) -> None:
    """As the error says."""
    module = stumbling()
    replica = make(front, module, transport=transport)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_on(module, replica, 0)
    optimizer.zero_grad()
    module.stumbles = dist.get_rank() == 1
    if module.stumbles:
        with pytest.raises(ZeroDivisionError):
            backward(replica, 3)
        module.stumbles = False
        with pytest.raises(RoundMismatchError, match=r"zero_grad\(\)"):
            replica(batch(1, 3))
    else:
        with pytest.raises(RoundMismatchError, match=r"zero_grad\(\)"):
            backward(replica, 3)
    optimizer.zero_grad()
    optimizer.step()
    same_everywhere(module)
    backward(replica, 4)
    optimizer.step()
    same_everywhere(module)
