"""A step of large tensors, block by block, to the same bits.

An optimizer that is not fused goes through all of a tensor a dozen times, and each time allocates as much again. Of a
block that stays in the cache it does so in half of the time. Each call of `step` takes as long as a few ten thousand
elements, so blocks must not be small either; figures are in docs/log.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsync.sharing.counters import copied, is_like

BLOCK = 256 * 1024  # elements


def step_in_blocks(inner: Optimizer) -> None:
    """`inner.step()`, for an optimizer that does to each element the same, whatever else is in the tensor."""
    groups = inner.param_groups
    large = [(group, tensor) for group in groups for tensor in group["params"] if _is_cut(inner, group, tensor)]
    whole = {id(tensor) for group in groups for tensor in group["params"]} - {id(tensor) for _, tensor in large}
    try:
        if whole or not large:
            inner.param_groups = [
                {**group, "params": [one for one in group["params"] if id(one) in whole]} for group in groups
            ]
            inner.step()
        for group, tensor in large:
            _step_one(inner, group, tensor)
    finally:
        inner.param_groups = groups


def _is_cut(inner: Optimizer, group: dict[str, Any], tensor: Tensor) -> bool:
    """What has no state is stepped in one go through it."""
    return (
        tensor.numel() > BLOCK and tensor.grad is not None and not group.get("fused") and bool(inner.state.get(tensor))
    )


def _step_one(inner: Optimizer, group: dict[str, Any], tensor: Tensor) -> None:
    assert tensor.grad is not None
    state, new, of_all = inner.state.pop(tensor), dict[str, list[Tensor]](), dict[str, Any]()
    gradient = tensor.grad
    try:
        for start in range(0, tensor.numel(), BLOCK):
            stop = min(start + BLOCK, tensor.numel())
            block = tensor[start:stop]
            block.grad = gradient[start:stop]
            views = {key: value[start:stop] for key, value in state.items() if is_like(key, value)}
            counters = {key: copied(value) for key, value in state.items() if key not in views}
            inner.state[block] = views | counters
            inner.param_groups = [{**group, "params": [block]}]
            inner.step()
            for key, value in inner.state.pop(block).items():
                if not is_like(key, value):
                    of_all[key] = value
                elif key not in views:
                    new.setdefault(key, []).append(value)
                elif value is not views[key]:
                    views[key].copy_(value)
        state.update(of_all, **{key: torch.cat(values) for key, values in new.items()})
    finally:
        inner.state[tensor] = state
