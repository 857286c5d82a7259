"""Before the first step: is this a module that can be replicated, and is it the same on all ranks?"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from gradsync.errors import (
    ModelMismatchError,
    OptionsMismatchError,
    ReplicaDivergedError,
    UnsuitableModuleError,
)
from gradsync.guard.fingerprint import digest
from gradsync.guard.replicas import of_all
from gradsync.transport.base import Transport

_SHOWN = 5  # differences listed in an error


def check_module(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses what can't be kept in step, before anything is communicated or changed."""
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsuitableModuleError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel` or "
                f"`replicate`, and '{name}' is one. Run a dummy forward pass to correctly initialize the modules."
            )
    types = {parameter.device.type: name for name, parameter in parameters.items()}
    if "meta" in types:
        raise UnsuitableModuleError(
            f"parameter '{types['meta']}' is on the meta device and has no values. Materialize the module "
            "first: module.to_empty(device=...), then initialize or load its parameters."
        )
    if len(types) > 1:
        where = ", ".join(f"'{name}' on {kind}" for kind, name in sorted(types.items()))
        raise UnsuitableModuleError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {set(types)}: {where}. Move the module to one with module.to(...)."
        )


def check_layers(module: nn.Module) -> None:
    """Refuses layers that would refuse their inputs: torch's SyncBatchNorm computes on GPUs only.

    A subclass with a forward of its own may do better.
    """
    norms = ((name, type(m)) for name, m in module.named_modules() if isinstance(m, nn.SyncBatchNorm))
    names = [name for name, cls in norms if cls.forward is nn.SyncBatchNorm.forward]
    if names and all(tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers())):
        raise UnsuitableModuleError(
            f"SyncBatchNorm layers only work with GPU modules, and {', '.join(map(repr, names[:3]))}"
            f"{', ...' * (len(names) > 3)} of {type(module).__name__} is on the CPU, where it refuses to train. Move "
            "the module to a GPU first, or use nn.BatchNorm, whose statistics are kept in step (with "
            "buffers='average' they are the mean over the ranks)."
        )


def check_same_model(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    settings: str,
    transport: Transport,
    serial: int,
) -> Agreed:
    """Compares options, names, shapes, dtypes, strides and `requires_grad` over all ranks.

    One small exchange of digests; only if they differ are the descriptions themselves exchanged, so
    that every rank can raise the same error.
    """
    mine = _describe(parameters, buffers)
    model, set_alike = _number("\n".join(mine)), _number(settings)
    rows = transport.gather([model, set_alike, serial, of_all(list(parameters.values()))])
    if len({row[1] for row in rows}) > 1:
        raise different_settings(transport.rank, transport.gather_text(settings))
    if len({row[0] for row in rows}) > 1:
        described = transport.gather_text("\n".join(mine))
        raise ModelMismatchError(_differences([text.split("\n") for text in described], transport.rank))
    return Agreed(rows[0][2], model, [row[3] for row in rows])


class Agreed(NamedTuple):
    """What all ranks know after they have compared their models."""

    serial: int
    """Rank 0's number for this replicated module, by which all can call it."""
    model: int
    """A digest of names and shapes."""
    values: list[int]
    """A digest of the values with which each rank came."""


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def different_settings(rank: int, settings: Sequence[str]) -> OptionsMismatchError:
    """Lists what is set differently, by rank. Each text has a line `name: value` for everything; "": not known."""
    tables = [dict(line.split(": ", 1) for line in text.split("\n") if line) for text in settings]
    lines = []
    for name in dict.fromkeys(name for table in tables for name in table):
        by_value: dict[str, list[int]] = {}
        for r, table in enumerate(tables):
            if table:
                by_value.setdefault(table.get(name, "nothing"), []).append(r)
        if len(by_value) > 1:
            said = ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            lines.append(f"  {name}: {said}")
    listed = "\n".join(lines)
    return OptionsMismatchError(
        f"rank {rank}: the ranks were given different options or hooks, so that they would send each other different "
        f"things, or make different things of them:\n{listed}\nGive all ranks the same, before the same backward."
    )


def crossed(rank: int, name: str, positions: Sequence[int]) -> ModelMismatchError:
    """Modules with equal parameters are in one backward, and at different places of it on different ranks."""
    places = ", ".join(f"{position + 1}. on rank {r}" for r, position in enumerate(positions))
    return ModelMismatchError(
        f"rank {rank}: several modules with the same parameters are trained in one backward, and this {name} comes as "
        f"the {places}. They were replicated in another order on some rank, so that one module's gradients would be "
        "added to another's. Replicate them in the same order on all ranks (a set has none), or with one call, "
        "gradsync.replicate([first, second]). If only their use differs, seed all ranks alike before building them."
    )


class Beginnings:
    """With which values replicated modules began on each rank, before rank 0's were broadcast.

    Ranks that were seeded alike hold the same ones. Two modules of which one rank has in one place what others have in
    the other were replicated in another order there.
    """

    def __init__(self) -> None:
        self._of: list[tuple[weakref.ref[object], int, list[int]]] = []

    def add(self, module: nn.Module, model: int, values: Sequence[int], rank: int) -> None:
        """`model`: a digest of names and shapes; `values`: of the values, by rank."""
        self._of = [one for one in self._of if one[0]() is not None]
        mine = list(values)
        for _, other, theirs in self._of:
            if other != model or len(theirs) != len(mine) or theirs[0] == mine[0]:
                continue
            for r in range(1, len(mine)):
                if mine[r] == theirs[0] and theirs[r] == mine[0]:
                    raise ModelMismatchError(
                        f"rank {rank}: rank {r} has replicated two modules with the same parameters, of class "
                        f"{type(module).__name__}, in another order than rank 0: each of them held the values of the "
                        "other. Replicate them in the same order on all ranks (a set has none), or with one call, "
                        "gradsync.replicate([first, second])."
                    )
        self._of.append((weakref.ref(module), model, mine))


def check_same_values(tensors: Mapping[str, Tensor], transport: Transport) -> None:
    """Compares all values over all ranks, to the last bit, by a digest of each tensor."""
    mine = {name: int(digest(tensor)[:14], 16) for name, tensor in tensors.items()}
    rows = transport.gather(list(mine.values()))
    differing = [name for at, name in enumerate(mine) if len({row[at] for row in rows}) > 1]
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ReplicaDivergedError(
            f"rank {transport.rank}: init_sync=False, but the ranks begin with different values of "
            f"{', '.join(map(repr, differing[:_SHOWN]))}{more}. Seed all ranks alike, load the same checkpoint, or "
            "leave init_sync out to broadcast rank 0's values."
        )


def _describe(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[str]:
    rows = []
    for name, parameter in parameters.items():
        kind = "parameter" if parameter.requires_grad else "frozen parameter"
        shape = list(parameter.shape)
        rows.append(f"{name}: {kind} {shape} {parameter.dtype} strides {list(parameter.stride())}")
    for name, buffer in buffers.items():
        rows.append(f"{name}: buffer {list(buffer.shape)} {buffer.dtype}")
    return rows


def _differences(described: list[list[str]], rank: int) -> str:
    lines = []
    for other, rows in enumerate(described[1:], start=1):
        if rows != described[0]:
            lines += _compare(described[0], rows, f"on rank {other}")
    return (
        f"rank {rank}: the ranks hold different models, so their gradients can't be averaged. DDP expects same "
        f"model across all ranks. Differences from rank 0:\n{_shown(lines)}\n"
        "Build the module from the same configuration on every rank."
    )


def list_differences(first: str, second: str, where: str) -> str:
    """What differs between two texts with a line `name: description` for each parameter."""
    return _shown(_compare(first.split("\n"), second.split("\n"), where))


def _compare(first: list[str], second: list[str], where: str) -> list[str]:
    ours = dict(row.split(": ", 1) for row in first if row)
    theirs = dict(row.split(": ", 1) for row in second if row)
    found = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in theirs:
            found.append(f"'{name}' is missing {where} (elsewhere: {ours[name]})")
        elif name not in ours:
            found.append(f"'{name}' exists only {where} ({theirs[name]})")
        elif ours[name] != theirs[name]:
            found.append(f"'{name}' is {theirs[name]} {where}, but {ours[name]} elsewhere")
    return found or [f"the same parameters in another order {where}"]


def _shown(lines: list[str]) -> str:
    more = len(lines) - _SHOWN
    return "\n".join(f"  {line}" for line in lines[:_SHOWN]) + (f"\n  and {more} more" if more > 0 else "")
