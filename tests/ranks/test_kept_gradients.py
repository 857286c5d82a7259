"""Gradients that the user has plans for: memory of their own, kept across steps, differentiated once more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.errors import GradsyncError
from tests.ranks.small import FRONTS, TRANSPORTS, backward, batch, build, make, mean_gradients, same_everywhere
from tests.support.ranks import Ranks, on_ranks

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "replicate": ("replicate", {}),
    "wrapper": ("DistributedDataParallel", {}),
    "wrapper with views": ("DistributedDataParallel", {"gradient_as_bucket_view": True}),
}


def large() -> nn.Sequential:
    """One parameter of 320 KB among small ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 10_000), nn.Tanh(), nn.Linear(10_000, 2))


BUILDS = {"small": build, "large": large}
LR = 1e-3  # the large one is not stable with more


def replica_of(variant: str, transport: str, module: nn.Module) -> Any:
    front, options = VARIANTS[variant]
    return make(front, module, transport=transport, **options)


def descend(module: nn.Module, gradients: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.sub_(LR * gradient)


def close(found: Tensor | None, wanted: Tensor, where: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        close(one, other, name)
    same_everywhere(found)


# --- memory of the user's own --------------------------------------------------------------------------


def flat_views(module: nn.Module) -> list[Tensor]:
    flat = torch.zeros(sum(p.numel() for p in module.parameters()))
    parts = flat.split([p.numel() for p in module.parameters()])
    return [part.view_as(p) for part, p in zip(parts, module.parameters(), strict=True)]


def single_tensors(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) for p in module.parameters()]


WHERE = {"flat": flat_views, "single": single_tensors}


def own_memory(variant: str, transport: str, build_name: str, where: str, how: str) -> None:
    module, alone = BUILDS[build_name](), BUILDS[build_name]()
    replica = replica_of(variant, transport, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    mine = WHERE[where](module)
    for step in range(4):
        if step == 0 or how == "set each time":
            for parameter, memory in zip(module.parameters(), mine, strict=True):
                memory.zero_()
                parameter.grad = memory
        elif how == "zero_grad":
            optimizer.zero_grad(set_to_none=False)
        else:
            for memory in mine:
                memory.zero_()
        expected = mean_gradients(alone, step)
        if how == "accumulated":
            with replica.no_sync():
                backward(replica, step + 50)
            expected = [a + b for a, b in zip(expected, mean_gradients(alone, step + 50), strict=True)]
        backward(replica, step)
        for (name, parameter), memory, wanted in zip(module.named_parameters(), mine, expected, strict=True):
            close(memory, wanted, f"{name}, step {step}")
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == memory.data_ptr(), f"{name}, step {step}"
            assert parameter.grad.stride() == memory.stride()
            assert torch.equal(parameter.grad, memory)
        optimizer.step()
        descend(alone, expected)
        assert_same(module, alone)


@TRANSPORTS
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", ["set each time", "zero_grad", "zeroed in place", "accumulated"])
def test_gradients_in_memory_of_the_user(ranks: Ranks, variant: str, transport: str, where: str, how: str) -> None:
    ranks(own_memory, 2, variant, transport, "small", where, how)


@TRANSPORTS
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_large_gradient_in_memory_of_the_user(ranks: Ranks, variant: str, transport: str) -> None:
    ranks(own_memory, 2, variant, transport, "large", "flat", "zero_grad")


@TRANSPORTS
@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks(2)
def test_memory_of_the_user_on_one_rank(variant: str, transport: str) -> None:
    """Rank 0 has a flat tensor, and sets it in every second step; rank 1 leaves all of that to us."""
    module, alone = build(), build()
    replica = replica_of(variant, transport, module)
    mine = flat_views(module)
    for step in range(4):
        module.zero_grad()
        ours = dist.get_rank() == 0 and step % 2 == 0
        if ours:
            for parameter, memory in zip(module.parameters(), mine, strict=True):
                parameter.grad = memory.zero_()
        expected = mean_gradients(alone, step)
        backward(replica, step)
        for parameter, memory, wanted in zip(module.parameters(), mine, expected, strict=True):
            assert parameter.grad is not None
            close(parameter.grad, wanted, f"step {step}")
            assert (parameter.grad.data_ptr() == memory.data_ptr()) is ours
        torch.optim.SGD(module.parameters(), lr=LR).step()
        descend(alone, expected)
        assert_same(module, alone)


# --- kept across steps ---------------------------------------------------------------------------------

KEPT: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "a row": lambda gradient: gradient[0],
    "a view": lambda gradient: gradient.view(-1),
    "an array": lambda gradient: gradient.numpy(),
}


def kept(variant: str, transport: str, build_name: str, how: str, everywhere: bool) -> None:
    module, alone = BUILDS[build_name](), BUILDS[build_name]()
    replica = replica_of(variant, transport, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    held: list[tuple[str, Any, Tensor]] = []
    for step in range(4):
        optimizer.zero_grad()
        backward(replica, step)
        if everywhere or dist.get_rank() == 0:
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                one = KEPT[how](parameter.grad)
                held.append((f"{name}, step {step}", one, torch.as_tensor(one).clone()))
                del one
        optimizer.step()
        descend(alone, mean_gradients(alone, step))
        assert_same(module, alone)
        for where, found, wanted in held:
            assert torch.equal(torch.as_tensor(found), wanted), f"{where}, looked at in step {step}"


@TRANSPORTS
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("everywhere", [True, False], ids=["all", "rank 0"])
@pytest.mark.parametrize("how", KEPT)
def test_a_kept_gradient_stays(ranks: Ranks, variant: str, transport: str, how: str, everywhere: bool) -> None:
    ranks(kept, 2, variant, transport, "small", how, everywhere)


@TRANSPORTS
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("everywhere", [True, False], ids=["all", "rank 0"])
def test_a_kept_large_gradient_stays(ranks: Ranks, variant: str, transport: str, everywhere: bool) -> None:
    ranks(kept, 2, variant, transport, "large", "a row", everywhere)


@TRANSPORTS
@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks(2)
def test_a_gradient_that_is_kept_for_a_while(variant: str, transport: str) -> None:
    """One gradient of one layer, for one step, then let go; and through rounds in which its parameter is unused."""
    module, alone = build(), build()
    replica = replica_of(variant, transport, module)
    held: Tensor | None = None
    wanted = torch.zeros(())
    for step in range(6):
        module.zero_grad()
        backward(replica, step)
        expected = mean_gradients(alone, step)
        if held is not None:
            assert torch.equal(held, wanted)
        held = None
        if step in (1, 3) and dist.get_rank() == step // 2:
            held = module.get_parameter("4.weight").grad
            assert held is not None
            wanted = held.clone()
        torch.optim.SGD(module.parameters(), lr=LR).step()
        descend(alone, expected)
        assert_same(module, alone)
        module.zero_grad()
        module[0](batch(dist.get_rank(), step)).sum().backward()  # a round without the last layer
        assert module.get_parameter("4.weight").grad is None
        assert held is None or torch.equal(held, wanted)


# --- differentiated once more --------------------------------------------------------------------------

GRAPHS = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # of the cycle that create_graph makes


def smooth(module: Any, part: int, step: int) -> Tensor:
    loss: Tensor = module(batch(part, step).double()).square().mean()
    return loss


@GRAPHS
@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_create_graph_without_a_second_order(front: str, transport: str) -> None:
    module = build().double()
    alone = copy.deepcopy(module)
    replica = make(front, module, transport=transport)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, alone))
    for step in range(4):
        optimizer.zero_grad()
        smooth(replica, dist.get_rank(), step).backward(create_graph=True)
        optimizer.step()
        expected.zero_grad()
        sum((smooth(alone, part, step) / 2 for part in range(2)), torch.zeros(())).backward()
        expected.step()
        for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-12, check_stride=False)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        same_everywhere(module)


def penalty(module: nn.Module) -> Tensor:
    return sum((p.grad.square().sum() for p in module.parameters() if p.grad is not None), torch.zeros(()))


def second_order(front: str, transport: str, how: str) -> str:
    """A loss on `.grad`: as in one process, or an error that tells the cure. Never something else in silence."""
    module = build().double()
    alone = copy.deepcopy(module)
    replica = make(front, module, transport=transport)
    for step in range(2):
        for each in (module, alone):
            each.zero_grad()
        sum((smooth(alone, part, step) / 2 for part in range(2)), torch.zeros(())).backward(create_graph=True)
        more = sum((smooth(alone, part, step + 50) / 2 for part in range(2)), torch.zeros(()))
        (penalty(alone) + more if how == "beside a loss" else penalty(alone)).backward()
        smooth(replica, dist.get_rank(), step).backward(create_graph=True)
        try:
            loss = penalty(module)
            if how == "beside a loss":
                loss = loss + smooth(replica, dist.get_rank(), step + 50)
            loss.backward()
        except GradsyncError as error:
            return str(error)
        for (name, found), wanted in zip(module.named_parameters(), alone.parameters(), strict=True):
            assert found.grad is not None
            assert wanted.grad is not None
            where = f"{name} in step {step}"
            assert torch.allclose(found.grad, wanted.grad, rtol=1e-9, atol=1e-12), where
    return "right"


@GRAPHS
@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("how", ["alone", "beside a loss"])
def test_a_loss_on_the_gradients(ranks: Ranks, front: str, transport: str, how: str) -> None:
    found = ranks(second_order, 2, front, transport, how)
    assert found == ["right"] * 2 or all("create_graph" in text for text in found)
