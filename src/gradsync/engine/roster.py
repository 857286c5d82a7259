"""Which parameters are managed, in which forms, and whether that is still so.

People freeze, unfreeze, convert (`module.double()`) and replace (`load_state_dict(assign=True)`)
parameters in the middle of training; prune, parametrize or refit their modules, by which parameters get other names
and new ones come. The roster notices at the beginning of a round, by comparing a few attributes of each parameter, and
says what the new list is, and what other ranks must have in common of what is new.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradsync import _torch
from gradsync.engine.face import Face, Faces, Site
from gradsync.engine.form import Form
from gradsync.engine.left_out import LeftOut
from gradsync.engine.plan import Spec, gradient_stride
from gradsync.engine.tables import Tables
from gradsync.guard.fingerprint import digest


class HasGrad(Protocol):
    """A parameter, or a face of one: where gradients are taken from and given to."""

    grad: Tensor | None


@dataclass(slots=True)
class Held:
    """A gradient that belongs to no parameter's `.grad`."""

    grad: Tensor | None


class Managed(NamedTuple):
    """One parameter whose gradient the engine keeps in step. Usually all three are the same object."""

    spec: Spec
    parameter: nn.Parameter  # as registered: what the optimizer has
    computing: nn.Parameter  # what backward accumulates into
    slot: HasGrad


class Entry(NamedTuple):
    """One parameter, managed or frozen, as it was when it was last looked at."""

    name: str
    parameter: nn.Parameter
    face: Face | None
    trained: bool  # requires a gradient: it is managed


# What is compared at the beginning of each round, a row for all parameters: that is several times faster than
# one parameter after the other.
_requires_grad, _dtype = attrgetter("requires_grad"), attrgetter("dtype")
_device = Tensor.get_device  # its index: -1 for the CPU
_size = Tensor.size  # `weight.data = ...` may change it


class Roster:
    """The parameters of some modules that are not ignored, in order of registration, shared ones once."""

    def __init__(
        self, modules: Sequence[nn.Module], ignored: frozenset[str] = frozenset(), form: Form | None = None
    ) -> None:
        self._modules = modules
        self._ignored = LeftOut(modules, ignored)
        self._form = form or Form()
        self._known: dict[nn.Parameter, Face | None] = {}
        self._over_mesh = self._form.takes_mesh(())
        self.faces = Faces()
        self._read()
        self.agreed()

    def agreed(self) -> None:
        """All ranks have the same as this one now."""
        self._agreed, self._agreed_rows = self.entries, self._rows
        self.unsettled = False
        """Something was changed of which the other ranks have not said that they changed it too."""

    def _read(self) -> None:
        if self.faces.computing:
            self.faces.to_registered()
        sites: dict[nn.Parameter, list[Site]] = {}
        for module in self._modules:
            for submodule in module.modules():
                for key, parameter in submodule._parameters.items():
                    if parameter is not None:
                        sites.setdefault(parameter, []).append((submodule._parameters, key))
        self.entries = [self._enter(n, p, sites[p]) for n, p in list(self.not_ignored())]
        self._known = {entry.parameter: entry.face for entry in self.entries}
        self.faces.hold([entry.face for entry in self.entries if entry.face is not None])
        self._sparse = {weight for module in self._modules for weight in _sparse_parameters(module)}
        self._parameters = [entry.parameter for entry in self.entries]
        self._rows = self._compared()
        self._structure = Tables(self._modules, "_modules")
        self._registered = Tables(self._modules, "_parameters")

    def _compared(self) -> list[list[object]]:
        return [list(map(get, self._parameters)) for get in (_requires_grad, _dtype, _device, _size)]

    def _enter(self, name: str, parameter: nn.Parameter, sites: list[Site]) -> Entry:
        """An entry, with the face it had as long as that fits, else a new one."""
        face = self._known.get(parameter)
        if face is None or face.outdated():
            face = self._form.face(name, parameter, sites, self._over_mesh)
            if face is not None:
                face.register()
        else:
            face.sites = sites
        registered = parameter if face is None else face.registered
        return Entry(name, registered, face, registered.requires_grad)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters with their names; those of several modules begin with the module's number."""
        seen: set[nn.Parameter] = set()
        for number, module in enumerate(self._modules):
            prefix = f"{number}." if len(self._modules) > 1 else ""
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield prefix + name, parameter

    def not_ignored(self) -> list[tuple[str, nn.Parameter]]:
        return self._ignored.without(self.named())

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
        """A text that is equal on two ranks if they manage the same parameters, and have made the same change."""
        before = {e.parameter: (e.name, size) for e, size in zip(self._agreed, self._agreed_rows[-1], strict=True)}
        rows = []
        for entry in self.entries:
            name, size = before.get(entry.parameter, ("", None))
            news = "" if name == entry.name else f" formerly '{name}'"
            if size != entry.parameter.size():
                news = f" with values {digest(entry.parameter)[:12]}"
            if entry.trained or news:
                shape = "" if entry.trained else "frozen "
                shape += str(list(self._managed(entry).spec.shape))
                rows.append(f"{entry.name}: {shape} {entry.parameter.dtype}{news}")
        return "\n".join(rows)

    def changed(self, doubt: bool) -> bool:
        """Whether parameters were frozen, converted, moved, resized or replaced, or submodules added or replaced.

        `doubt`: some did not arrive as they used to, as if others were in their place.
        """
        return (
            self.unsettled
            or self._compared() != self._rows
            or self._structure.changed(doubt)
            # While computing faces are in the place of registered ones there is nothing to compare.
            or (not self.faces.computing and self._registered.changed(doubt))
        )

    def renew_faces(self, inputs: object) -> bool:
        """Before forward: parameters that were converted need other faces at once, not only in backward.

        So do those whose inputs are of another kind than before. Whether that was so.
        """
        over_mesh = self._form.takes_mesh(inputs)
        if over_mesh is not self._over_mesh:
            self._over_mesh = over_mesh
            self.faces.to_registered()
            self._known.clear()
        elif self.faces.computing or not self._moved():
            return False
        self._read()
        self.unsettled = True
        return True

    def _moved(self) -> bool:
        moved = self._structure.changed(False) or self._registered.changed(False)
        return moved or any(entry.face is not None and entry.face.outdated() for entry in self.entries)

    def new_names(self) -> list[str]:
        """Names under which the ranks have agreed on nothing yet."""
        if not self.unsettled:
            return []
        known = {entry.name for entry in self._agreed}
        return [entry.name for entry in self.entries if entry.name not in known]

    def refresh(self) -> bool:
        """Reads the module anew; whether anything is not what all ranks had."""
        computing = self.faces.computing
        self._read()
        if computing:
            self.faces.to_compute()
        self.unsettled = _signature(self.entries, self._rows) != _signature(self._agreed, self._agreed_rows)
        return self.unsettled


def _signature(entries: Sequence[Entry], rows: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """Equal to another one if they are the same parameters, in the same state as far as the engine cares."""
    return [(id(e.parameter), id(e.face), e.trained, e.name, *row) for e, *row in zip(entries, *rows, strict=True)]


def _sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Parameters whose gradients are sparse: those of embeddings made with `sparse=True`."""
    weights = (m.weight for m in module.modules() if _is_table(m) and getattr(m, "sparse", False))
    return {weight for weight in weights if isinstance(weight, Tensor)}


def _is_table(module: nn.Module) -> bool:
    compiled_from = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or compiled_from in ("Embedding", "EmbeddingBag")
