"""Communication hooks and optimizers in backward, on both fronts."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)

import gradsync
from gradsync.errors import HookError
from tests.ranks.small import FRONTS, batch, build, make, mean_gradients, same_everywhere
from tests.support.ranks import Ranks

# --- communication hooks -----------------------------------------------------------------------------


def stock(name: str) -> tuple[Any, Any, float]:
    """State, hook and the tolerance to which it gives the mean."""
    world = dist.group.WORLD
    power = powerSGD_hook.PowerSGDState(world, matrix_approximation_rank=2, start_powerSGD_iter=2)
    local = post_localSGD_hook.PostLocalSGDState(world, None, start_localSGD_iter=100)
    hooks: dict[str, tuple[Any, Any, float]] = {
        "allreduce": (None, default_hooks.allreduce_hook, 1e-6),
        "fp16": (None, default_hooks.fp16_compress_hook, 1e-2),
        "bf16": (None, default_hooks.bf16_compress_hook, 5e-2),
        "fp16 wrapper": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-2),
        "bf16 wrapper": (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 5e-2),
        "powerSGD": (power, powerSGD_hook.powerSGD_hook, float("inf")),
        "post local SGD": (local, post_localSGD_hook.post_localSGD_hook, 1e-6),
        "noop": (None, debugging_hooks.noop_hook, float("inf")),
    }
    return hooks[name]


STOCK = ["allreduce", "fp16", "bf16", "fp16 wrapper", "bf16 wrapper", "powerSGD", "post local SGD"]


def stock_hook(front: str, name: str) -> None:
    module = build()
    replica = make(front, module)
    state, hook, tolerance = stock(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        expected = mean_gradients(module, step)
        if step == 1:  # at any time between two rounds
            replica.register_comm_hook(state, hook)
        optimizer.zero_grad()
        with replica.no_sync():
            (replica(batch(dist.get_rank(), step)).square().mean() / 2).backward()
        (replica(batch(dist.get_rank(), step)).square().mean() / 2).backward()
        if tolerance < 1:
            for parameter, gradient in zip(module.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)
        optimizer.step()
        same_everywhere(module)
    with pytest.raises(HookError, match="can only be called once"):
        replica.register_comm_hook(state, hook)


@FRONTS
@pytest.mark.parametrize("name", STOCK)
def test_torchs_stock_hooks_run_unchanged(ranks: Ranks, front: str, name: str) -> None:
    ranks(stock_hook, 2, front, name)


def own_hook(front: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.sometimes = (nn.Linear(4, 2, bias=False) for _ in range(3))

        def forward(self, x: Tensor, more: bool) -> Tensor:
            return self.used(x) + (self.sometimes(x) if more else 0)

    module = Half()
    replica = make(front, module, bucket_cap_mb=0.00001)
    seen: list[tuple[int, bool, int]] = []

    def hook(state: Any, bucket: Any) -> Any:
        state.append((bucket.index(), bucket.is_last(), len(bucket.gradients())))
        assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] * 10)  # as it is, no division

    replica.register_comm_hook(seen, hook)
    x = torch.full((1, 4), 1.0)
    replica(x, more=dist.get_rank() == 0).sum().backward()
    assert seen == [(0, False, 1), (1, False, 1), (2, True, 1)]
    assert module.unused.weight.grad is None
    assert module.used.weight.grad is not None
    assert module.sometimes.weight.grad is not None
    assert module.used.weight.grad[0, 0] == 20
    assert module.sometimes.weight.grad[0, 0] == 10
    assert gradsync.statistics(replica).hook.endswith("hook")


@FRONTS
def test_a_hook_of_ones_own(ranks: Ranks, front: str) -> None:
    ranks(own_hook, 2, front)


def bad_hooks(front: str) -> None:
    replica = make(front, build())
    with pytest.raises(TypeError, match="Communication hook must be callable"):
        replica.register_comm_hook(None, 1)

    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[Tensor]:
        raise AssertionError

    def wrong_return(state: object, bucket: Any) -> int:
        raise AssertionError

    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        replica.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ValueError, match="return annotation should be"):
        replica.register_comm_hook(None, wrong_return)
    results: list[Any] = [3, "raise", "size", "dtype", "good"]

    def hook(state: object, bucket: Any) -> Any:
        kind = results[0]
        if kind == "raise":
            raise ZeroDivisionError("in the hook")
        if kind == 3:
            return kind
        future: Any = torch.futures.Future()
        data = bucket.buffer()
        future.set_result({"size": data[1:], "dtype": data.long(), "good": data}[kind])
        return future

    replica.register_comm_hook(None, hook)
    for pattern in (
        r"must return a torch\.futures\.Future object, but got",
        "in the hook",
        r"brought \d+ x torch\.float32",
        r"brought \d+ x torch\.int64",
    ):
        with pytest.raises(Exception, match=pattern):
            replica(batch(0)).sum().backward()
        results.pop(0)
    replica.zero_grad()
    replica(batch(0)).sum().backward()  # mended: training goes on


@FRONTS
def test_bad_hooks(ranks: Ranks, front: str) -> None:
    ranks(bad_hooks, 2, front)


def never_completes(front: str) -> None:
    replica = make(front, build(), process_group=dist.new_group(timeout=timedelta(seconds=1)))
    replica.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    rank = dist.get_rank()
    with pytest.raises(HookError, match=rf"rank {rank}: .*did not complete within 1 s"):
        replica(batch(0)).sum().backward()


@FRONTS
def test_a_hook_that_never_completes(ranks: Ranks, front: str) -> None:
    ranks(never_completes, 2, front)


def hook_state_pickles() -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    replica = gradsync.replicate(build())
    assert isinstance(replica, gradsync.ReplicateModule)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(3):
        replica(batch(dist.get_rank(), step)).sum().backward()
    loaded = pickle.loads(pickle.dumps(state))
    assert loaded.iter == state.iter > 0


@pytest.mark.filterwarnings("ignore")
def test_hook_state_pickles(ranks: Ranks) -> None:
    ranks(hook_state_pickles, 2)


def builtin() -> None:
    module = build()
    ddp = gradsync.DistributedDataParallel(module)
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    ddp(batch(dist.get_rank())).square().mean().backward()
    for parameter, gradient in zip(module.parameters(), mean_gradients(module), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-2, atol=1e-2)


def test_builtin_hooks(ranks: Ranks) -> None:
    ranks(builtin, 2)


# --- optimizers in backward --------------------------------------------------------------------------


def overlapped(front: str, how: str) -> None:
    module, plain = build(), build()
    replica = make(front, module)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.05)
    if how == "factory":
        optimizer = gradsync.overlap_optimizer(replica, lambda ps: torch.optim.AdamW(ps, lr=0.05), free_gradients=True)
    else:
        groups = [{"params": [p]} for p in module.parameters()]
        optimizer = gradsync.overlap_optimizer(replica, torch.optim.AdamW(groups, lr=0.05), clip_value=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, expected)]
    for step in range(4):
        with replica.no_sync():
            (replica(batch(dist.get_rank(), step)).square().mean() / 2).backward()
        (replica(batch(dist.get_rank(), step)).square().mean() / 2).backward()
        for parameter, gradient in zip(plain.parameters(), mean_gradients(plain, step), strict=True):
            parameter.grad = gradient.clamp(-0.01, 0.01) if how == "instance" else gradient
        expected.step()
        for schedule in schedules:
            schedule.step()
        assert all((p.grad is None) is (how == "factory") for p in module.parameters())
        module.zero_grad()
        for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(HookError, match="steps by itself during backward"):
        optimizer.step()
    with pytest.raises(HookError, match="there can be one"):
        gradsync.overlap_optimizer(replica, torch.optim.SGD(module.parameters(), lr=1.0))


@FRONTS
@pytest.mark.parametrize("how", ["factory", "instance"])
def test_an_optimizer_in_backward(ranks: Ranks, front: str, how: str) -> None:
    ranks(overlapped, 2, front, how)


def torchs_in_backward(front: str, after: bool) -> None:
    module, plain = build(), build()
    if not after:
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    replica = make(front, module)
    if after:
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    for step in range(3):
        gradients = mean_gradients(plain, step)
        replica(batch(dist.get_rank(), step)).square().mean().backward()
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            assert found.grad is None
            torch.testing.assert_close(found, wanted)


@FRONTS
@pytest.mark.parametrize("after", [False, True])
def test_torchs_optimizers_in_backward_are_honoured(ranks: Ranks, front: str, after: bool) -> None:
    ranks(torchs_in_backward, 2, front, after)


def zero(front: str) -> None:
    module, plain = build(), build()
    replica = make(front, module)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.05)
    expected = torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        replica(batch(dist.get_rank(), step)).square().mean().backward()
        for parameter, gradient in zip(plain.parameters(), mean_gradients(plain, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        expected.step()
    for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@FRONTS
def test_sharded_optimizer_state(ranks: Ranks, front: str) -> None:
    ranks(zero, 2, front)
