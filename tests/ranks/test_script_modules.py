"""Modules compiled by `torch.jit`: their parameters live in C++, and their class can't be changed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradsync
from gradsync.errors import UnsuitableModuleError
from tests.ranks.small import FRONTS, TRANSPORTS, backward, batch, make, mean_backward, same_everywhere
from tests.support.ranks import Ranks, on_ranks

# torch.jit is deprecated, and says so in many places.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def scripted() -> Any:
    return torch.jit.script(Part())


def traced() -> Any:
    return torch.jit.trace(Part().eval(), batch(5))  # the mode is traced too


def loaded() -> Any:
    saved = io.BytesIO()
    torch.jit.save(scripted(), saved)
    saved.seek(0)
    return torch.jit.load(saved)


HOW = pytest.mark.parametrize("how", [scripted, traced, loaded])


def close(found: nn.Module, expected: nn.Module) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
        torch.testing.assert_close(a.grad, b.grad, msg=f"gradient of {name}")


def load_into(oracle: nn.Module, module: nn.Module) -> None:
    """(A deep copy of a script module has parameters that are no leaves.)"""
    oracle.load_state_dict(module.state_dict())
    for parameter, same in zip(oracle.parameters(), module.parameters(), strict=True):
        parameter.requires_grad_(same.requires_grad)


def trained(front: str, how: Callable[[], Any], inside: bool, transport: str) -> None:
    """As in one process; batch norm in evaluation mode, since it would see another batch there."""
    torch.manual_seed(0)
    module, oracle = (nn.Sequential(how(), nn.Linear(4, 2)) if inside else how() for _ in range(2))
    load_into(oracle, module)
    oracle.eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(dist.get_rank())
    module.eval()
    replica = make(front, module, transport=transport, verify="every")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (module, oracle)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(replica, step)
        mean_backward(oracle, step)
        for optimizer in optimizers:
            optimizer.step()
        close(module, oracle)
    module.train()
    for _ in range(2):  # and its buffers are kept in step
        module.zero_grad()
        backward(replica)
    same_everywhere(module)
    gradsync.verify(replica)


@TRANSPORTS
@HOW
def test_the_wrapper_trains_one(ranks: Ranks, how: Callable[[], Any], transport: str) -> None:
    ranks(trained, 2, "DistributedDataParallel", how, False, transport)


@FRONTS
@TRANSPORTS
@HOW
def test_inside_of_a_plain_module(ranks: Ranks, front: str, how: Callable[[], Any], transport: str) -> None:
    ranks(trained, 2, front, how, True, transport)


@FRONTS
@on_ranks(2)
def test_frozen_and_replaced_parameters_inside(front: str) -> None:
    module = nn.Sequential(scripted(), nn.Linear(4, 2)).eval()
    replica = make(front, module)
    part: Any = module[0]
    for change in range(3):
        if change == 1:
            part.first.weight.requires_grad_(False)
        elif change == 2:
            part.last.weight = nn.Parameter(torch.ones(4, 8))
        module.zero_grad()
        oracle = nn.Sequential(scripted(), nn.Linear(4, 2)).eval()
        load_into(oracle, module)
        backward(replica)
        mean_backward(oracle)
        close(module, oracle)


@on_ranks(2)
def test_a_precision_policy() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))
    replica = gradsync.replicate(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        replica(batch(dist.get_rank(), step)).float().square().mean().backward()
        assert all(p.dtype is torch.float32 and p.grad is not None for p in module.parameters())
        optimizer.step()
    same_everywhere(module)


@TRANSPORTS
@on_ranks(2)
def test_a_sparse_embedding(transport: str) -> None:
    module = torch.jit.script(nn.Embedding(10, 4, sparse=True))
    replica = make("DistributedDataParallel", module, transport=transport)
    rank = dist.get_rank()
    for _ in range(2):
        module.zero_grad()
        replica(torch.tensor([1, 2 + rank])).sum().backward()
        assert module.weight.grad.to_dense().sum(1).tolist() == [0, 4, 2, 2, 0, 0, 0, 0, 0, 0]


@HOW
@on_ranks(2)
def test_replicate_refuses_one_as_the_root(how: Callable[[], Any]) -> None:
    for given in (how(), [how(), nn.Linear(4, 2)]):
        with pytest.raises(UnsuitableModuleError, match=r"torch\.jit.*gradsync\.DistributedDataParallel\(module\)"):
            gradsync.replicate(given)
    gradsync.replicate(nn.Sequential(how()))  # nothing was left behind
