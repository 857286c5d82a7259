"""A model of blocks that count their forwards, and what is compared of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class Block(nn.Module):
    """Counts its forwards, which hooks can't: they run around it."""

    def __init__(self, size: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(size, size)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.second(self.dropout(torch.tanh(self.first(x)))).sin()


def stack(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(dropout=dropout), Block(dropout=dropout), nn.Linear(4, 2))


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    plain = make()
    return plain, copy.deepcopy(plain)


def assert_same_gradients(first: nn.Module, second: nn.Module) -> None:
    for (name, a), (other, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert name == other
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert torch.equal(a.grad, b.grad), name


def step(module: Callable[..., Any], *args: Any, seed: int = 1, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    output = module(*args, **kwargs)
    loss = sum(tensor.square().sum() for tensor in torch.utils._pytree.tree_leaves(output))
    assert isinstance(loss, Tensor)
    loss.backward()
    return output


@contextlib.contextmanager
def counting_saved() -> Iterator[list[int]]:
    """How many elements autograd keeps for backward, in distinct tensors."""
    found = [0]
    seen = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def alive_after_forward(module: nn.Module, x: Tensor) -> int:
    """How many of the activations inside are still in memory when forward is over."""
    outputs: list[StorageWeakRef] = []
    hooks = [
        part.register_forward_hook(lambda _, args, output: outputs.append(StorageWeakRef(output.untyped_storage())))
        for part in module.modules()
        if not list(part.children())
    ]
    result = module(x)
    for hook in hooks:
        hook.remove()
    alive = sum(not output.expired() for output in outputs)
    result.sum().backward()
    return alive


class Sometimes(nn.Module):
    """Raises, or does something else, in the forward of the given number."""

    def __init__(self, odd_one: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.odd_one, self.how, self.forwards = odd_one, how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        odd = self.forwards == self.odd_one
        if odd and self.how == "raise":
            raise KeyError("on purpose")
        if odd and self.how == "interrupt":
            raise KeyboardInterrupt
        hidden = self.linear(x[:1] if odd and self.how == "shape" else x)
        if odd and self.how == "fewer":
            return hidden
        return hidden.tanh().sin()
