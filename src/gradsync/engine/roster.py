"""Which parameters are managed, and whether that is still so.

People freeze, unfreeze, convert (`module.double()`) and replace (`load_state_dict(assign=True)`)
parameters in the middle of training. The roster notices at the beginning of a round, by comparing
a few attributes of each parameter, and says what the new list is.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradsync.engine.plan import Spec, gradient_stride
from gradsync.errors import RosterChangedError


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter, and the place in the module where it was found."""

    name: str
    owner: dict[str, nn.Parameter | None]  # the `_parameters` of the submodule that has it
    key: str
    parameter: nn.Parameter
    trained: bool  # requires a gradient: it is managed
    dtype: torch.dtype
    device: torch.device

    def holds(self) -> bool:
        now = self.owner.get(self.key)
        return (
            now is self.parameter
            and now.requires_grad is self.trained
            and now.dtype is self.dtype
            and now.device == self.device
        )


class Roster:
    """The parameters of one module that are not ignored, in order of registration, shared ones once."""

    def __init__(self, module: nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        self._module = module
        self._ignored = ignored
        self._read()

    def _read(self) -> None:
        owners = {
            f"{prefix}.{key}" if prefix else key: (submodule._parameters, key)
            for prefix, submodule in self._module.named_modules(remove_duplicate=False)
            for key in submodule._parameters
        }
        named = {n: p for n, p in self._module.named_parameters() if n not in self._ignored}
        self.entries = [Entry(n, *owners[n], p, p.requires_grad, p.dtype, p.device) for n, p in named.items()]
        self._sparse = _sparse_parameters(self._module)
        # A submodule that gains a parameter or a submodule shows in the sizes of its dictionaries.
        self._sizes: list[tuple[Sized, int]] = []
        for submodule in self._module.modules():
            for table in (submodule._parameters, submodule._modules):
                self._sizes.append((table, len(table)))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The managed ones: those that are trained."""
        return [entry.parameter for entry in self.entries if entry.trained]

    def specs(self) -> list[Spec]:
        """What the plan has to know of each managed parameter."""
        return [
            Spec(e.name, tuple(p.shape), gradient_stride(p), p.dtype, p.device, p in self._sparse)
            for e in self.entries
            if e.trained
            for p in [e.parameter]
        ]

    def describe(self) -> str:
        """A text that is equal on two ranks if they manage the same parameters."""
        return "\n".join(f"{spec.name}: {list(spec.shape)} {spec.dtype}" for spec in self.specs())

    def changed(self) -> bool:
        return not (
            all(entry.holds() for entry in self.entries) and all(len(table) == size for table, size in self._sizes)
        )

    def refresh(self, rank: int) -> None:
        """Reads the module anew. Parameters under new names are refused: nobody made them equal."""
        known = {entry.name for entry in self.entries}
        self._read()
        added = [entry.name for entry in self.entries if entry.name not in known]
        if added:
            raise RosterChangedError(
                f"rank {rank}: parameters were added after the module was replicated: "
                f"{', '.join(map(repr, added[:5]))}. They begin with different values on each rank. Add them "
                "before replicating, or undo it with gradsync.unreplicate(module) and replicate again."
            )


def _sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Parameters whose gradients are sparse: those of embeddings made with `sparse=True`."""
    tables = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse)
    return {table.weight for table in tables}
