"""Parameters that are stepped as a whole, each by one rank of the host: for optimizers that are not elementwise.

What such an optimizer keeps of a parameter may be of any shape. Its rank tells the others of it once, when it is new,
and puts it into common memory, numbers too: so all of it can be read on any rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.errors import NotSupportedError
from gradsync.transport.base import SharedOnce, Transport
from gradsync.transport.shares import LINE, round_up

_NUMBER = torch.float64  # in which numbers are kept; whole ones up to 2**53


class Kept(NamedTuple):
    """One thing that an optimizer keeps of one parameter, and where it lies, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str  # "tensor", or the type of a number
    offset: int


def owners(parameters: Sequence[nn.Parameter], ranks: int) -> list[int]:
    """The local rank that steps each parameter: the largest first, each to whom has least."""
    loads, found = [0] * ranks, [0] * len(parameters)
    for index in sorted(range(len(parameters)), key=lambda index: (-parameters[index].numel(), index)):
        owner = loads.index(min(loads))
        found[index] = owner
        loads[owner] += parameters[index].numel() + 1
    return found


class WholeParameters:
    """Those of one optimizer in one replica."""

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str], memory: SharedOnce) -> None:
        self.parameters, self._names, self._memory = list(parameters), list(names), memory
        self._owners = owned_by = owners(parameters, memory.size)
        self.mine = [p for p, owner in zip(parameters, owned_by, strict=True) if owner == memory.local_rank]
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._described: dict[str, dict[str, list[Any]]] = {}  # what this rank has told
        self._kept: dict[int, dict[str, Kept]] = {}  # of all ranks
        self._state_memory: SharedOnce | None = None

    def has_news(self, inner: Optimizer) -> bool:
        """Whether this rank keeps something of which the others do not know."""
        return self._describe(inner) != self._described

    def _describe(self, inner: Optimizer) -> dict[str, dict[str, list[Any]]]:
        return {
            str(self._index[id(p)]): {key: self._described_as(p, key, value) for key, value in inner.state[p].items()}
            for p in self.mine
            if p in inner.state
        }

    def _described_as(self, parameter: nn.Parameter, key: str, value: object) -> list[Any]:
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
        if isinstance(value, (bool, int, float)):
            return [type(value).__name__, "float64", []]
        if value is None:
            return ["None", "float64", []]
        name = self._names[self._index[id(parameter)]]
        raise NotSupportedError(
            f"the optimizer keeps a {type(value).__name__} as '{key}' of '{name}', which other ranks can't see. Use it "
            "without gradsync.share_optimizer()."
        )

    def tell(self, inner: Optimizer, transport: Transport) -> None:
        """What is new on any rank gets a place in common memory. All ranks together."""
        self._described = self._describe(inner)
        told = transport.gather_text(json.dumps(self._described))
        merged: dict[str, dict[str, list[Any]]] = {}
        for rank in self._memory.ranks:
            merged |= json.loads(told[rank])
        end, self._kept = 0, {}
        for index in sorted(map(int, merged)):
            for key, (kind, dtype_name, shape) in merged[str(index)].items():
                dtype = getattr(torch, dtype_name)
                self._kept.setdefault(index, {})[key] = kept = Kept(dtype, tuple(shape), kind, end)
                end = round_up(end + dtype.itemsize * torch.Size(kept.shape).numel(), LINE)
        self._state_memory = transport.allocate_once(end)
        for parameter in self.mine:
            for key, kept in self._kept.get(self._index[id(parameter)], {}).items():
                if kept.kind == "tensor":
                    state = inner.state[parameter]
                    state[key] = self._place(kept).copy_(state[key])

    def write_numbers(self, inner: Optimizer) -> None:
        """Those of this rank's parameters, after a step."""
        for parameter in self.mine:
            for key, kept in self._kept.get(self._index[id(parameter)], {}).items():
                value = inner.state[parameter].get(key)
                if kept.kind not in ("tensor", "None") and value is not None:
                    self._place(kept).fill_(value)
                elif kept.kind == "tensor" and isinstance(value, Tensor):
                    place = self._place(kept)
                    if value.data_ptr() != place.data_ptr():  # replaced, not written to
                        inner.state[parameter][key] = place.copy_(value)

    def _place(self, kept: Kept) -> Tensor:
        assert self._state_memory is not None
        numel = torch.Size(kept.shape).numel()
        return self._state_memory.tensor(kept.offset, numel, kept.dtype).view(kept.shape)

    def spread(self, transport: Transport) -> None:
        """Brings what was stepped to the other ranks, if they do not see it. All ranks together."""
        self._send(transport, {index: [p.detach()] for index, p in enumerate(self.parameters) if p.grad is not None})

    def spread_state(self, transport: Transport) -> None:
        """The same for what is kept."""
        self._send(transport, {index: list(map(self._place, keys.values())) for index, keys in self._kept.items()})

    def _send(self, transport: Transport, tensors: dict[int, list[Tensor]]) -> None:
        if self._memory.is_common:
            return
        for owner in range(self._memory.size):
            of_owner = [one for index, some in tensors.items() if self._owners[index] == owner for one in some]
            if of_owner:
                transport.broadcast(of_owner, owner)

    def plain_state(self) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        """Of all of them, as the plain optimizer would have it."""
        return [
            (self.parameters[index], {key: self._value(kept) for key, kept in keys.items()})
            for index, keys in self._kept.items()
        ]

    def _value(self, kept: Kept) -> Any:
        if kept.kind == "None":
            return None
        place = self._place(kept)
        if kept.kind == "tensor":
            return place
        return {"bool": bool, "int": int, "float": float}[kept.kind](place.item())
