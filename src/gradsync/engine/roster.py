"""Which parameters are managed, in which forms, and whether that is still so.

People freeze, unfreeze, convert (`module.double()`) and replace (`load_state_dict(assign=True)`)
parameters in the middle of training. The roster notices at the beginning of a round, by comparing
a few attributes of each parameter, and says what the new list is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from gradsync import _torch
from gradsync.engine.face import Face, Faces, Site
from gradsync.engine.form import Form
from gradsync.engine.plan import Spec, gradient_stride
from gradsync.errors import RosterChangedError


class HasGrad(Protocol):
    """A parameter, or a face of one: where gradients are taken from and given to."""

    grad: Tensor | None


@dataclass(slots=True)
class Held:
    """A gradient that belongs to no parameter's `.grad`."""

    grad: Tensor | None


@dataclass(frozen=True, slots=True)
class Managed:
    """One parameter whose gradient the engine keeps in step. Usually all three are the same object."""

    spec: Spec
    parameter: nn.Parameter  # as registered: what the optimizer has
    computing: nn.Parameter  # what backward accumulates into
    slot: HasGrad


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter, managed or frozen, and how it was when it was last looked at."""

    name: str
    site: Site
    parameter: nn.Parameter
    face: Face | None
    trained: bool  # requires a gradient: it is managed
    dtype: torch.dtype
    device: torch.device

    def holds(self) -> bool:
        owner, key = self.site
        now, was = owner.get(key), self.parameter
        return (
            (now is was or (self.face is not None and now is self.face.compute))
            and was.requires_grad is self.trained
            and was.dtype is self.dtype
            and was.device == self.device
        )


class Roster:
    """The parameters of some modules that are not ignored, in order of registration, shared ones once."""

    def __init__(
        self, modules: Sequence[nn.Module], ignored: frozenset[str] = frozenset(), form: Form | None = None
    ) -> None:
        self._modules = modules
        self._ignored = ignored
        self._form = form or Form()
        self._known: dict[nn.Parameter, Face | None] = {}
        self._renewed = False
        self.faces = Faces(())
        self._read()

    def _read(self) -> None:
        self.faces.to_registered()
        sites: dict[nn.Parameter, list[Site]] = {}
        for module in self._modules:
            for submodule in module.modules():
                for key, parameter in submodule._parameters.items():
                    if parameter is not None:
                        sites.setdefault(parameter, []).append((submodule._parameters, key))
        self.entries = [self._enter(n, p, sites[p]) for n, p in self.named() if n not in self._ignored]
        self._known = {entry.parameter: entry.face for entry in self.entries}
        self.faces = Faces([entry.face for entry in self.entries if entry.face is not None])
        self.faces.to_registered()
        self._sparse = {weight for module in self._modules for weight in _sparse_parameters(module)}
        # A submodule that gains a parameter or a submodule shows in the sizes of its dictionaries.
        self._sizes: list[tuple[Sized, int]] = [
            (table, len(table))
            for module in self._modules
            for submodule in module.modules()
            for table in (submodule._parameters, submodule._modules)
        ]

    def _enter(self, name: str, parameter: nn.Parameter, sites: list[Site]) -> Entry:
        """An entry, with the face it had as long as that fits, else a new one."""
        face = self._known.get(parameter)
        if face is None or face.outdated():
            face = self._form.face(name, parameter, sites)
        registered = parameter if face is None else face.registered
        trained, dtype, device = registered.requires_grad, registered.dtype, registered.device
        return Entry(name, sites[0], registered, face, trained, dtype, device)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters with their names; those of several modules begin with the module's number."""
        seen: set[nn.Parameter] = set()
        for number, module in enumerate(self._modules):
            prefix = f"{number}." if len(self._modules) > 1 else ""
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield prefix + name, parameter

    def managed(self) -> list[Managed]:
        """Those that are trained."""
        return [self._managed(entry) for entry in self.entries if entry.trained]

    def _managed(self, entry: Entry) -> Managed:
        parameter, face = entry.parameter, entry.face
        computing = parameter if face is None else face.compute
        inner = _torch.local(computing)
        dtype = inner.dtype if face is None else face.reduce_dtype
        sparse = parameter in self._sparse
        spec = Spec(entry.name, tuple(inner.shape), gradient_stride(inner), dtype, inner.device, sparse)
        return Managed(spec, parameter, computing, parameter if face is None else face)

    def describe(self) -> str:
        """A text that is equal on two ranks if they manage the same parameters."""
        rows = ((m.spec.name, list(m.spec.shape), m.parameter.dtype) for m in self.managed())
        return "\n".join(f"{name}: {shape} {dtype}" for name, shape, dtype in rows)

    def changed(self) -> bool:
        return self._renewed or not (
            all(entry.holds() for entry in self.entries) and all(len(table) == size for table, size in self._sizes)
        )

    def renew_faces(self) -> None:
        """Before forward: parameters that were converted need other faces at once, not only in backward."""
        if any(entry.face is not None and entry.face.outdated() for entry in self.entries):
            self._read()
            self._renewed = True

    def refresh(self, rank: int) -> None:
        """Reads the module anew. Parameters under new names are refused: nobody made them equal."""
        known = {entry.name for entry in self.entries}
        computing = self.faces.computing
        self._read()
        self._renewed = False
        if computing:
            self.faces.to_compute()
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
