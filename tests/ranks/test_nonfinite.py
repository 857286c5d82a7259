"""NaN and Inf in gradients are named, on request: which parameter's, and which rank they came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync.errors import InvalidOptionError, NonFiniteGradientError
from tests.ranks.small import FRONTS, TRANSPORTS, backward, build, make, mean_gradients, same_everywhere
from tests.ranks.test_repair import Heard
from tests.support.ranks import Ranks, on_ranks


def spoil(module: nn.Module, name: str, value: float) -> Any:
    """From now on the gradient of a parameter has such a value in one place, on this rank."""

    def hook(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    return module.get_parameter(name).register_hook(hook)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@on_ranks(2)
def test_is_raised_by_all_ranks(front: str, transport: str, value: float) -> None:
    module = build()
    replica = make(front, module, transport=transport, on_nonfinite="raise")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        handle = spoil(module, "2.weight", value) if step in (0, 2) and dist.get_rank() == 1 else None
        if step in (0, 2):
            pattern = (
                rf"^rank {dist.get_rank()}: NaN or Inf in gradients of round {step}, .*: '2\.weight', from rank 1\. "
            )
            with pytest.raises(NonFiniteGradientError, match=pattern) as caught:
                backward(replica, step)
            assert (caught.value.ranks, caught.value.parameters) == ([1], ["2.weight"])
            assert not torch.isfinite(module.get_parameter("2.weight").grad).all()  # type: ignore[arg-type]
        else:
            wanted = mean_gradients(module, step)
            backward(replica, step)
            for parameter, gradient in zip(module.parameters(), wanted, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
            optimizer.step()
            same_everywhere(module)
        if handle is not None:
            handle.remove()


def warned(front: str) -> list[str]:
    heard = Heard()
    module = build()
    replica = make(front, module, on_nonfinite="warn")
    for step in range(3):
        module.zero_grad()
        if step == 1 and dist.get_rank() >= 1:
            spoil(module, "2.weight", float("inf"))
            spoil(module, ("4.bias", "0.bias")[dist.get_rank() - 1], float("nan"))
        backward(replica, step)
    return heard.texts


@FRONTS
def test_is_warned_about(ranks: Ranks, front: str) -> None:
    found = ranks(warned, 3, front)
    for rank, texts in enumerate(found):
        assert len(texts) == 2
        for number, text in enumerate(texts, start=1):
            assert f"rank {rank}: NaN or Inf in gradients of round {number}" in text
            assert "'4.bias', from rank 1; '2.weight', from rank 1, 2; '0.bias', from rank 2." in text


@TRANSPORTS
@on_ranks(2)
def test_a_sum_that_overflows(transport: str) -> None:
    module = nn.Linear(4, 2).half()
    replica = make("replicate", module, transport=transport, reduce="sum", on_nonfinite="raise")
    loss = (replica(torch.ones(1, 4).half()) * 40000).sum()
    with pytest.raises(NonFiniteGradientError, match="'weight', which no rank had: the sum is too large for its dtype"):
        loss.backward()


class Embeds(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5000, 8, sparse=sparse)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.table(x))
        return found


@TRANSPORTS
@pytest.mark.parametrize("sparse", [True, False])
@on_ranks(2)
def test_in_tables(transport: str, sparse: bool) -> None:
    """Rows that travel by themselves, and sparse gradients."""
    module = Embeds(sparse)
    replica = make("replicate", module, transport=transport, on_nonfinite="raise")
    for step in range(4):
        module.zero_grad()
        x = torch.tensor([step, 7 + dist.get_rank()])
        factor = float("nan") if step == 2 and dist.get_rank() == 0 else 1.0
        loss = replica(x).sum() * factor
        if step == 2:
            with pytest.raises(NonFiniteGradientError, match=r"'table\.weight', from rank 0"):
                loss.backward()
        else:
            loss.backward()


@on_ranks(2)
def test_with_a_hook_of_ones_own() -> None:
    module = build()
    replica = make("DistributedDataParallel", module, on_nonfinite="raise")
    replica.register_comm_hook(None, default_hooks.allreduce_hook)
    backward(replica)
    if dist.get_rank() == 0:
        spoil(module, "0.weight", float("nan"))
    with pytest.raises(NonFiniteGradientError, match=r"'0\.weight', from rank 0"):
        backward(replica)


@on_ranks(2)
def test_with_an_optimizer_in_backward() -> None:
    module = build()
    replica = make("replicate", module, on_nonfinite="raise")
    gradsync.overlap_optimizer(replica, torch.optim.SGD(module.parameters(), lr=0.1), free_gradients=True)
    backward(replica)
    if dist.get_rank() == 0:
        spoil(module, "0.weight", float("nan"))
    with pytest.raises(NonFiniteGradientError, match=r"'0\.weight'"):
        backward(replica)


class Again(nn.Module):
    """Reentrant checkpointing brings a parameter as often as its forward was called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.out = nn.Linear(4, 8), nn.Linear(8, 8)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for _ in range(self.times):
            x = checkpoint(self.out, x, use_reentrant=True)
        return x


@on_ranks(2)
def test_late_gradients() -> None:
    """A parameter that comes more often than ever before, after its bucket has left: the last one is spoiled."""
    module = Again()
    replica = make("replicate", module, on_nonfinite="raise")
    replica(torch.ones(2, 4, requires_grad=True)).sum().backward()
    module.times = 3
    count = 0

    def third(gradient: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return gradient * float("nan") if count == 3 and dist.get_rank() == 1 else gradient

    module.out.bias.register_hook(third)
    with pytest.raises(NonFiniteGradientError, match=r"'out\.bias', from rank 1"):
        replica(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert gradsync.statistics(replica).corrected_rounds == 1


@on_ranks(2)
def test_bad_input() -> None:
    with pytest.raises(InvalidOptionError, match=r"on_nonfinite must be one of 'ignore', 'warn', 'raise', but is 'no'"):
        gradsync.replicate(build(), on_nonfinite="no")
