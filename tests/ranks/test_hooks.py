"""Communication hooks and optimizers in backward, on both fronts. Hooks that go wrong: tests/faults/test_hooks.py."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)

import gradsync
from gradsync.errors import HookError
from gradsync.hooks.comm_hook import name_of
from tests.ranks.small import (
    FRONTS,
    TRANSPORTS,
    assert_gradients,
    backward,
    batch,
    build,
    make,
    mean_gradients,
    same_everywhere,
)
from tests.support.ranks import on_ranks

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
        "per tensor": (None, quantization_hooks.quantization_pertensor_hook, 2e-2),
        "per channel": (world, quantization_hooks.quantization_perchannel_hook, 2e-2),
        "noop": (None, debugging_hooks.noop_hook, float("inf")),
    }
    return hooks[name]


STOCK = ["allreduce", "fp16", "bf16", "fp16 wrapper", "bf16 wrapper", "powerSGD", "post local SGD"]
STOCK += ["per tensor", "per channel"]


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("name", STOCK)
@on_ranks(2)
def test_torchs_stock_hooks_run_unchanged(front: str, transport: str, name: str) -> None:
    module = build()
    replica = make(front, module, transport=transport)
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
            assert_gradients(module, expected, rtol=tolerance, atol=tolerance)
        optimizer.step()
        same_everywhere(module)
    with pytest.raises(HookError, match="can only be called once"):
        replica.register_comm_hook(state, hook)


@on_ranks(2)
def test_quantized_gradients() -> None:
    """What is far from the rest loses little with a scale for every 512 elements; zero stays zero."""
    module = nn.Linear(2048, 1, bias=False, dtype=torch.float64)
    errors = []
    for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
        replica = gradsync.DistributedDataParallel(module)
        replica.register_comm_hook(None, hook)
        replica.zero_grad()
        x = torch.linspace(-1, 1, 2048, dtype=torch.float64)[None] * (dist.get_rank() + 1)
        x[0, :512] *= 100
        x[0, -1] = 0
        replica(x).sum().backward()
        gradient = module.weight.grad
        assert gradient is not None
        assert gradient[0, -1] == 0
        errors.append((gradient[0, 512:] - x[0, 512:] * 1.5 / (dist.get_rank() + 1)).abs().max().item())
        assert name_of(hook) in gradsync.statistics(replica).hook
    assert errors[0] > 0.1
    assert errors[1] < 0.01


@FRONTS
@on_ranks(2)
def test_a_hook_of_ones_own(front: str) -> None:
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


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_hook_state_pickles() -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    replica = gradsync.replicate(build())
    assert isinstance(replica, gradsync.ReplicateModule)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(3):
        replica(batch(dist.get_rank(), step)).sum().backward()
    loaded = pickle.loads(pickle.dumps(state))
    assert loaded.iter == state.iter > 0


@on_ranks(2)
def test_builtin_hooks() -> None:
    module = build()
    ddp = gradsync.DistributedDataParallel(module)
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    backward(ddp)
    assert_gradients(module, mean_gradients(module), rtol=0.01, atol=0.01)


# --- optimizers in backward --------------------------------------------------------------------------


@FRONTS
@pytest.mark.parametrize("how", ["factory", "instance"])
@on_ranks(2)
def test_an_optimizer_in_backward(front: str, how: str) -> None:
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


class Grows(nn.Module):
    """Of which each step uses one part more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, used: int) -> Tensor:
        for part in self.parts[-used:]:
            x = part(x)
        return x


@FRONTS
@on_ranks(2)
def test_an_optimizer_in_backward_waits_for_what_comes_for_the_first_time(front: str) -> None:
    module, plain = Grows(), Grows()
    replica = make(front, module)
    gradsync.overlap_optimizer(replica, torch.optim.SGD(module.parameters(), lr=0.1), free_gradients=True)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for part in range(2):
            (plain(batch(part, step), 1 + step).square().mean() / 2).backward()
        replica(batch(dist.get_rank(), step), 1 + step).square().mean().backward()
        expected.step()
        expected.zero_grad()
        for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)


@FRONTS
@pytest.mark.parametrize("after", [False, True])
@on_ranks(2)
def test_torchs_optimizers_in_backward_are_honored(front: str, after: bool) -> None:
    module, plain = build(), build()
    if not after:
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    replica = make(front, module)
    if after:
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    for step in range(3):
        gradients = mean_gradients(plain, step)
        backward(replica, step)
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            assert found.grad is None
            torch.testing.assert_close(found, wanted)


@FRONTS
@on_ranks(2)
def test_sharded_optimizer_state(front: str) -> None:
    module, plain = build(), build()
    replica = make(front, module)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.05)
    expected = torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        backward(replica, step)
        for parameter, gradient in zip(plain.parameters(), mean_gradients(plain, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        expected.step()
    for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def layers(module: nn.Module) -> list[dict[str, Any]]:
    """A parameter group for each layer, with learning rates of their own."""
    parts = [part for part in module if isinstance(part, nn.Linear)]  # type: ignore[attr-defined]
    return [{"params": list(part.parameters()), "lr": 0.05 * (1 + number)} for number, part in enumerate(parts)]


@FRONTS
@pytest.mark.parametrize("how", ["plain", "freed", "bucket view"])
@on_ranks(2)
def test_sharded_optimizer_in_backward(front: str, how: str) -> None:
    module, plain = build(), build()
    replica = make(front, module)
    optimizer = ZeroRedundancyOptimizer(
        layers(module), torch.optim.AdamW, lr=0.05, parameters_as_bucket_view=how == "bucket view"
    )
    gradsync.overlap_optimizer(replica, optimizer, clip_value=0.05, free_gradients=how == "freed")
    expected = torch.optim.AdamW(layers(plain), lr=0.05)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, expected)]
    for step in range(4):
        with replica.no_sync():
            (replica(batch(dist.get_rank(), step)).square().mean() / 2).backward()
        (replica(batch(dist.get_rank(), step)).square().mean() / 2).backward()
        assert all((p.grad is None) is (how == "freed") for p in module.parameters())
        for parameter, gradient in zip(plain.parameters(), mean_gradients(plain, step), strict=True):
            parameter.grad = gradient.clamp(-0.05, 0.05)
        expected.step()
        for schedule in schedules:
            schedule.step()
        module.zero_grad()
        same_everywhere(module)
        for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    own: Any = optimizer.optim
    assert 0 < len(own.state) < len(list(module.parameters()))  # this rank's shard only
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(module.parameters()))
    with pytest.raises(HookError, match="steps by itself during backward"):
        optimizer.step()


def gloo_by_another_name(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@on_ranks(2, backend=None)
def test_torchs_hooks_for_a_sharded_optimizer(interleaved: bool, shard_buckets: bool) -> None:
    """They refuse gloo by its name, for hangs that ours, which waits for one hook before the next, does not have."""
    dist.Backend.register_backend("other", gloo_by_another_name, devices=["cpu"])
    dist.init_process_group("other")
    module, plain = build(), build()
    ddp = make("DistributedDataParallel", module)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    wrap = ddp_zero_hook.hook_with_zero_step_interleaved if interleaved else ddp_zero_hook.hook_with_zero_step
    ddp.register_comm_hook(None, wrap(default_hooks.allreduce_hook, ddp, optimizer, shard_buckets=shard_buckets))
    for step in range(6):
        gradients = mean_gradients(plain, step)
        optimizer.zero_grad()
        backward(ddp, step)
        if step >= 2:  # two rounds in which it looks at the buckets
            with torch.no_grad():
                for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                    parameter.sub_(0.1 * gradient)
        for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)
    dist.destroy_process_group()


@on_ranks(2)
def test_a_sharded_optimizer_that_was_made_for_torchs_hooks() -> None:
    replica: Any = gradsync.replicate(build())
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(HookError, match="overlap_with_ddp=True, for torch's own hooks"):
        gradsync.overlap_optimizer(replica, optimizer)
