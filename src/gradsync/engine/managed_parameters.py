"""Which parameters are managed, in which forms, and whether that is still so.

People freeze, unfreeze, convert (`module.double()`) and replace (`load_state_dict(assign=True)`)
parameters in the middle of training; prune, parametrize or refit their modules, by which parameters get other names
and new ones come. This notices at the beginning of a round, by comparing a few attributes of each parameter, and
says what the new list is, and what other ranks must have in common of what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradsync import _torch
from gradsync.engine.compute_parameter import ComputeParameter, ComputeParameters, Site
from gradsync.engine.module_names import IgnoredTensors, named_parameters
from gradsync.engine.module_snapshot import ModuleSnapshot
from gradsync.engine.parameter_policy import ParameterPolicy
from gradsync.engine.plan import Spec, gradient_stride
from gradsync.guard.fingerprint import digest


class HasGrad(Protocol):
    """A parameter, or its compute parameter: where gradients are taken from and given to."""

    grad: Tensor | None


@dataclass(slots=True)
class DetachedGrad:
    """A gradient that belongs to no parameter's `.grad`."""

    grad: Tensor | None


class Managed(NamedTuple):
    """One parameter whose gradient the engine keeps in step. Usually all three are the same object."""

    spec: Spec
    parameter: nn.Parameter  # as registered: what the optimizer has
    leaf: nn.Parameter  # what backward accumulates into
    holder: HasGrad  # where the gradient is taken from and given to


class Entry(NamedTuple):
    """One parameter, managed or frozen, as it was when it was last looked at."""

    name: str
    parameter: nn.Parameter
    compute_parameter: ComputeParameter | None
    trained: bool  # requires a gradient: it is managed


# What is compared at the beginning of each round, a row for all parameters: that is several times faster than
# one parameter after the other.
_requires_grad, _dtype = attrgetter("requires_grad"), attrgetter("dtype")
_device = Tensor.get_device  # its index: -1 for the CPU
_size = Tensor.size  # `weight.data = ...` may change it


class ManagedParameters:
    """The parameters of some modules that are not ignored, in order of registration, shared ones once."""

    def __init__(
        self, modules: Sequence[nn.Module], ignored: frozenset[str] = frozenset(), policy: ParameterPolicy | None = None
    ) -> None:
        self._modules = modules
        self._ignored = IgnoredTensors(modules, ignored)
        self._policy = policy or ParameterPolicy()
        self._known: dict[nn.Parameter, ComputeParameter | None] = {}
        self._over_mesh = self._policy.takes_mesh(())
        self.compute_parameters = ComputeParameters()
        self._read()
        self.mark_in_use()
        self.mark_agreed()

    def mark_in_use(self) -> None:
        """Rounds go on with what was read last."""
        self._in_use, self._in_use_rows = self.entries, self._rows

    def mark_agreed(self) -> None:
        """All ranks have the same as this one now."""
        self._agreed, self._agreed_rows = self.entries, self._rows
        self.is_disputed = False
        """Something was changed of which the other ranks have not said that they changed it too."""

    def _read(self) -> None:
        if self.compute_parameters.computing:
            self.compute_parameters.to_registered()
        sites: dict[nn.Parameter, list[Site]] = {}
        for module in self._modules:
            for submodule in module.modules():
                for key, parameter in submodule._parameters.items():
                    if parameter is not None:
                        sites.setdefault(parameter, []).append((submodule._parameters, key))
        self.entries = [self._enter(n, p, sites[p]) for n, p in self.not_ignored()]
        self._known = {entry.parameter: entry.compute_parameter for entry in self.entries}
        self.compute_parameters.hold(
            [entry.compute_parameter for entry in self.entries if entry.compute_parameter is not None]
        )
        self._sparse = {weight for module in self._modules for weight in _sparse_parameters(module)}
        self._parameters = [entry.parameter for entry in self.entries]
        self._rows = self._compared()
        self._structure = ModuleSnapshot(self._modules, "_modules")
        self._registered = ModuleSnapshot(self._modules, "_parameters")

    def _compared(self) -> list[list[object]]:
        return [list(map(get, self._parameters)) for get in (_requires_grad, _dtype, _device, _size)]

    def _enter(self, name: str, parameter: nn.Parameter, sites: list[Site]) -> Entry:
        """An entry, with the compute_parameter it had as long as that fits, else a new one."""
        compute_parameter = self._known.get(parameter)
        if compute_parameter is None or compute_parameter.outdated():
            compute_parameter = self._policy.compute_parameter(name, parameter, sites, self._over_mesh)
            if compute_parameter is not None:
                compute_parameter.register()
        else:
            compute_parameter.move_to(sites)
        registered = parameter if compute_parameter is None else compute_parameter.registered
        return Entry(name, registered, compute_parameter, registered.requires_grad)

    def not_ignored(self) -> list[tuple[str, nn.Parameter]]:
        """With their names; one that several modules share once, under the first one's."""
        first: dict[nn.Parameter, str] = {}
        for name, parameter in named_parameters(self._modules):
            first.setdefault(parameter, name)
        return self._ignored.without((name, parameter) for parameter, name in first.items())

    def managed(self) -> list[Managed]:
        """Those that are trained."""
        return [self._managed(entry) for entry in self.entries if entry.trained]

    def _managed(self, entry: Entry) -> Managed:
        parameter, compute_parameter = entry.parameter, entry.compute_parameter
        leaf = parameter if compute_parameter is None else compute_parameter.compute
        inner = _torch.local(leaf)
        dtype = inner.dtype if compute_parameter is None else compute_parameter.reduce_dtype
        sparse = parameter in self._sparse
        spec = Spec(entry.name, tuple(inner.shape), gradient_stride(inner), dtype, inner.device, sparse)
        return Managed(spec, parameter, leaf, parameter if compute_parameter is None else compute_parameter)

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

    def look_for_changes(self, doubt: bool) -> bool:
        """Whether parameters were frozen, converted, moved, resized or replaced, or submodules added or replaced.

        `doubt`: some did not arrive as they used to, as if others were in their place.
        """
        return (
            self.is_disputed
            or self._compared() != self._rows
            or self._structure.look_for_changes(doubt)
            # While compute parameters are in the place of registered ones there is nothing to compare.
            or (not self.compute_parameters.computing and self._registered.look_for_changes(doubt))
        )

    def left_use(self) -> bool:
        """Whether there are other parameters now, or in other forms, than those that rounds go on with."""
        computing = self.compute_parameters.computing
        if not computing and (self._structure.look_for_changes(False) or self._registered.look_for_changes(False)):
            self._read()
        elif (rows := self._compared()) != self._rows:
            self._rows = rows
        return _signature(self.entries, self._rows) != _signature(self._in_use, self._in_use_rows)

    def renew_compute_parameters(self, inputs: object) -> bool:
        """Before forward: parameters that were converted need other compute parameters at once, not only in backward.

        So do those whose inputs are of another kind than before. Whether that was so.
        """
        over_mesh = self._policy.takes_mesh(inputs)
        if over_mesh is not self._over_mesh:
            self._over_mesh = over_mesh
            self.compute_parameters.to_registered()
            self._known.clear()
        elif self.compute_parameters.computing or not self._moved():
            return False
        self._read()
        self.is_disputed = True
        return True

    def _moved(self) -> bool:
        moved = self._structure.look_for_changes(False) or self._registered.look_for_changes(False)
        return moved or any(
            entry.compute_parameter is not None and entry.compute_parameter.outdated() for entry in self.entries
        )

    def new_names(self) -> list[str]:
        """Names under which the ranks have agreed on nothing yet."""
        if not self.is_disputed:
            return []
        known = {entry.name for entry in self._agreed}
        return [entry.name for entry in self.entries if entry.name not in known]

    def refresh(self) -> bool:
        """Reads the module anew; whether anything is not what all ranks had, or not what the rounds go on with.

        These differ after a backward through a module that was frozen as a whole: there was no round in which ranks
        could agree on that, and when it is trained again, it is as they had it.
        """
        computing = self.compute_parameters.computing
        self._read()
        if computing:
            self.compute_parameters.to_compute()
        now = _signature(self.entries, self._rows)
        self.is_disputed = now != _signature(self._agreed, self._agreed_rows)
        return self.is_disputed or now != _signature(self._in_use, self._in_use_rows)


def _signature(entries: Sequence[Entry], rows: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """Equal to another one if they are the same parameters, in the same state as far as the engine cares."""
    return [
        (id(e.parameter), id(e.compute_parameter), e.trained, e.name, *row)
        for e, *row in zip(entries, *rows, strict=True)
    ]


def _sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Parameters whose gradients are sparse: those of embeddings made with `sparse=True`."""
    weights = (m.weight for m in module.modules() if _is_table(m) and getattr(m, "sparse", False))
    return {weight for weight in weights if isinstance(weight, Tensor)}


def _is_table(module: nn.Module) -> bool:
    compiled_from = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or compiled_from in ("Embedding", "EmbeddingBag")
