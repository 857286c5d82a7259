"""Mistakes that people make: each gives a clear error at once, on every rank, or just works."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync import errors
from tests.ranks.small import FRONTS, Fails, assert_gradients, gradients_of, short_group
from tests.support.outcome import assert_raised
from tests.support.ranks import Ranks, on_ranks


def make(front: str, module: nn.Module, **options: Any) -> Any:
    return getattr(gradsync, front)(module, **options)


# --- the process group ---------------------------------------------------------------------------------


@FRONTS
def test_no_process_group(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "0")  # half a description; without any it is a world of one
    with pytest.raises(errors.NoProcessGroupError, match=r"WORLD_SIZE.*torchrun"):
        make(front, nn.Linear(2, 2))


def from_environment(front: str) -> int:
    replica = make(front, nn.Linear(2, 2))
    replica(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    return gradsync.statistics(replica).rounds


@FRONTS
def test_the_group_is_made_from_the_environment(ranks: Ranks, front: str) -> None:
    assert ranks(from_environment, 2, front, backend=None) == [1, 1]


@FRONTS
@on_ranks(2)
def test_a_group_without_this_rank(front: str) -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        make(front, nn.Linear(2, 2), process_group=group)
    else:
        with pytest.raises(errors.NoProcessGroupError, match="not a member"):
            make(front, nn.Linear(2, 2), process_group=group)


@FRONTS
@on_ranks(1)
def test_a_world_of_one(front: str) -> None:
    module = nn.Linear(2, 2, dtype=torch.float64)
    replica = make(front, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(3, 2, dtype=torch.float64)
        optimizer.zero_grad()
        replica(x).square().sum().backward()
        expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        assert_gradients(module, expected)
        optimizer.step()


# --- the module ----------------------------------------------------------------------------------------


@FRONTS
@on_ranks(2)
def test_nothing_to_train(front: str) -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    if front == "DistributedDataParallel":
        with pytest.raises(errors.UnsuitableModuleError, match=r"is not needed when .* Linear has none"):
            make(front, module)
    else:  # broadcast like any other, and trained once it is unfrozen
        replica = make(front, module)
        replica.requires_grad_(True)
        replica(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad[0, 0] == 0.5
        make(front, nn.ReLU())(torch.ones(2))


class Elsewhere(nn.Parameter):
    """A parameter that says it is on a GPU: there is none here to put a real one on."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@FRONTS
@on_ranks(2)
def test_unsuitable_modules(front: str) -> None:
    mixed = nn.Linear(2, 2)
    mixed.bias = Elsewhere(torch.zeros(2))
    with pytest.raises(ValueError, match=r"same type of devices.*'weight' on cpu, 'bias' on cuda"):
        make(front, mixed)
    with pytest.raises(errors.UnsuitableModuleError, match=r"'weight' is on the meta device.*to_empty"):
        make(front, nn.Linear(2, 2, bias=False, device="meta"))
    lazy = nn.LazyLinear(2)
    with pytest.raises(RuntimeError, match=r"uninitialized parameters.*'weight'.*dummy forward"):
        make(front, lazy)
    lazy(torch.ones(1, 3))
    make(front, lazy)  # nothing of the failure is left


@on_ranks(1)
def test_replicating_twice_and_bad_options() -> None:
    module = gradsync.replicate(nn.Linear(2, 2))
    with pytest.raises(
        AssertionError, match=r"only be applied to a module once. (?s:replicate has already.*unreplicate)"
    ):
        gradsync.replicate(module)
    with pytest.raises(errors.InvalidOptionError, match="reduce must be one of 'mean', 'sum'"):
        gradsync.replicate(nn.Linear(2, 2), reduce="max")
    with pytest.raises(errors.InvalidOptionError, match="bucket_cap_mb"):
        gradsync.replicate(nn.Linear(2, 2), bucket_cap_mb=-1)
    with pytest.raises(TypeError, match="not replicated"):
        gradsync.statistics(nn.Linear(2, 2))


def mismatched(front: str, how: str) -> None:
    first = dist.get_rank() == 0
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    if how == "shape" and not first:
        module[1] = nn.Linear(3, 4)
    elif how == "dtype" and not first:
        module[0].double()
    elif how == "number" and not first:
        module.append(nn.Linear(2, 2))
    elif how == "strides" and not first:
        module[0].weight = nn.Parameter(torch.zeros(2, 3).t())
    elif how == "frozen" and not first:
        module[0].bias.requires_grad_(False)
    make(front, module)


@FRONTS
@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ("shape", r"'1.weight' is parameter \[4, 3\].* on rank 1, but parameter \[2, 3\]"),
        ("dtype", r"'0.weight' is parameter \[3, 2\] torch.float64"),
        ("number", r"'2.weight' exists only on rank 1"),
        ("strides", r"'0.weight' .*strides \[1, 3\] on rank 1"),
        ("frozen", r"'0.bias' is frozen parameter"),
    ],
)
def test_different_models(ranks: Ranks, front: str, how: str, pattern: str) -> None:
    outcomes = ranks.outcomes(mismatched, 2, front, how)
    assert_raised(outcomes, errors.ModelMismatchError, pattern, "same configuration")


# --- training ------------------------------------------------------------------------------------------


@FRONTS
@on_ranks(2)
def test_a_step_on_local_gradients(front: str) -> None:
    module = nn.Linear(2, 2)
    replica = make(front, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with replica.no_sync():
        replica(torch.ones(1, 2)).sum().backward()
    rank = dist.get_rank()
    with pytest.raises(errors.UnsynchronizedStepError, match=rf"rank {rank}: SGD.*'weight', 'bias'.*no_sync"):
        optimizer.step()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()  # others are not our business
    with gradsync.allow_unsynchronized_steps():
        optimizer.step()
    optimizer.zero_grad()  # thrown away: nothing is left to complain about
    optimizer.step()
    replica(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@FRONTS
@on_ranks(2)
def test_an_optimizer_in_a_hook(front: str) -> None:
    module = nn.Linear(2, 2)
    replica = make(front, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(errors.UnsynchronizedStepError, match="step after backward has ended"):
        replica(torch.ones(1, 2)).sum().backward()


@FRONTS
@on_ranks(2)
def test_training_goes_on_after_a_backward_that_raised(front: str) -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2)).double()
    replica = make(front, module, bucket_cap_mb=0.00001)
    for step in range(4):
        x = torch.full((1, 2), float(dist.get_rank() + step), dtype=torch.float64)
        if step == 2:
            hidden = torch.tanh(module[0](x))
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                module[3](module[2](Fails.apply(hidden))).sum().backward()
        module.zero_grad()
        replica(x).square().sum().backward()
        both = sum(
            torch.autograd.grad(module(torch.full_like(x, r + step)).square().sum(), module[0].weight)[0]
            for r in range(2)
        )
        torch.testing.assert_close(module[0].weight.grad, both / 2)


@FRONTS
@on_ranks(2)
def test_another_backward_right_after_one_that_raised(front: str) -> None:
    """Two forwards, the first one's backward raises after buckets have left, the second one's follows at once."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2)).double()
    oracle = copy.deepcopy(module)
    replica = make(front, module, bucket_cap_mb=0.00001)
    rank = dist.get_rank()
    for step in range(4):
        xs = [torch.full((1, 2), float(part + step), dtype=torch.float64) for part in range(2)]
        bad = module[3](module[2](Fails.apply(torch.tanh(module[0](xs[rank])))))
        good = replica(xs[rank]).square().sum()
        if step >= 2:
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                bad.sum().backward()
        module.zero_grad()
        oracle.zero_grad()
        good.backward()
        for x in xs:
            (oracle(x).square().sum() / 2).backward()
        assert_gradients(module, gradients_of(oracle))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        if not twice:
            return self.used(x)
        x = checkpoint(self.used, self.unused(x), use_reentrant=True)
        return checkpoint(self.used, x, use_reentrant=True)


@on_ranks(2)
def test_torchs_strictness_when_asked_for() -> None:
    replica = gradsync.DistributedDataParallel(Half(), find_unused_parameters=False)
    replica(torch.ones(1, 2)).sum().backward()
    rank = dist.get_rank()
    with pytest.raises(
        RuntimeError,
        match=rf"Expected to have finished reduction.*for rank {rank}: unused.weight, unused.bias.*leave the argument",
    ):
        replica(torch.ones(1, 2))
    replica(torch.ones(1, 2), twice=True)
    with pytest.raises(RuntimeError, match=r"ready only once.*Parameter at index 1 with name used.bias"):
        replica(torch.ones(1, 2), twice=True).sum().backward()


@FRONTS
@on_ranks(2)
def test_parameters_added_later(front: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    replica = make(front, module)
    module.append(nn.Linear(2, 2))
    with pytest.raises(errors.ParametersChangedError, match=r"(?s)added.*'1.weight' is .* with values.*unreplicate"):
        replica(torch.ones(1, 2)).sum().backward()


def frozen_on_one_rank(front: str) -> None:
    group = short_group(2)
    module = nn.Linear(2, 2)
    replica = make(front, module, process_group=group)
    replica(torch.ones(1, 2)).sum().backward()
    module.bias.requires_grad_(dist.get_rank() == 0)
    replica(torch.ones(1, 2)).sum().backward()


@FRONTS
def test_frozen_on_one_rank_only(ranks: Ranks, front: str) -> None:
    outcomes = ranks.outcomes(frozen_on_one_rank, 2, front)
    assert_raised(outcomes, errors.ParametersChangedError, r"'bias' is missing on rank 1")


def frozen_differently(front: str) -> None:
    module = nn.Linear(2, 2)
    replica = make(front, module)
    (module.bias if dist.get_rank() == 0 else module.weight).requires_grad_(False)
    replica(torch.ones(1, 2)).sum().backward()


@FRONTS
def test_frozen_differently(ranks: Ranks, front: str) -> None:
    outcomes = ranks.outcomes(frozen_differently, 2, front)
    assert_raised(outcomes, errors.ParametersChangedError, r"'bias' exists only on rank 1", "same change on all ranks")


def submodule_replaced(front: str, same: bool) -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replica = make(front, module)
    replica(torch.ones(1, 2)).sum().backward()
    torch.manual_seed(0 if same else dist.get_rank())
    module[1] = nn.Linear(2, 2)
    replica(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    assert torch.equal(module[1].bias.grad, torch.ones(2))
    gradients: list[Any] = [None] * 2
    dist.all_gather_object(gradients, module[1].weight.grad)
    assert torch.equal(*gradients)


@FRONTS
def test_a_submodule_replaced_by_another(ranks: Ranks, front: str) -> None:
    ranks(submodule_replaced, 2, front, True)
    outcomes = ranks.outcomes(submodule_replaced, 2, front, False)
    assert_raised(
        outcomes, errors.ParametersChangedError, r"'1.weight' is \[2, 2\] torch.float32 with values", "different values"
    )


@FRONTS
@on_ranks(1)
def test_bad_weights(front: str) -> None:
    replica = make(front, nn.Linear(2, 2))
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(errors.InvalidOptionError, match="finite number"):
            replica.set_round_weight(weight)
    with pytest.raises(errors.InvalidOptionError, match="reduce='mean'"):
        make(front, nn.Linear(2, 2), reduce="sum").set_round_weight(2)


@on_ranks(1)
def test_the_wrappers_arguments() -> None:
    ddp = gradsync.DistributedDataParallel
    module: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="single element"):
        ddp(module, device_ids=[0, 1])
    with pytest.raises(ValueError, match=r"device_ids and output_device.*Leave both out"):
        ddp(module, device_ids=[0])
    with pytest.raises(ValueError, match="at the same time"):
        ddp(module, delay_all_reduce_named_params=[("weight", module.weight)])
    with pytest.raises(ValueError, match="both bucket_cap_mb and bucket_cap_mb_list"):
        ddp(module, bucket_cap_mb=1, bucket_cap_mb_list=[1, 2])
    mesh = init_device_mesh("cpu", (1, 1))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        ddp(module, device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        ddp(module, device_mesh=mesh, process_group=dist.group.WORLD)
    with pytest.warns(FutureWarning, match="check_reduction"):
        ddp(module, check_reduction=True)
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        ddp(module, broadcast_buffers=False)
    assert ddp(module, bucket_cap_mb_list=[10, 25, 50]).bucket_bytes_cap == 50 * 1024 * 1024
