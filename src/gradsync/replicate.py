"""Front 1: `replicate(module)`, in place, names unchanged. Translates arguments; the engine does the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from gradsync import contract
from gradsync.engine.engine import Engine
from gradsync.groups import resolve_group
from gradsync.options import Options
from gradsync.transport.process_group import ProcessGroupTransport

API = "replicate"

M = TypeVar("M", bound=nn.Module)


class ReplicateModule(nn.Module):
    """What a replicated module can do besides what its own class can."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the next one outside synchronises all of it."""
        with engine_of(self).no_sync():
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards from now on synchronise; `no_sync` without the indentation."""
        engine_of(self).synchronising = requires_gradient_sync


def replicate(module: M, *, process_group: dist.ProcessGroup | None = None, **options: Any) -> M:
    """Makes `module` a replica that is kept in step with those of the other ranks, and returns it.

    In place: the same object, with the same names of parameters, buffers and submodules. Its class
    becomes `Replicate<Class>`, a subclass of both its own class and `ReplicateModule`.

    All ranks of `process_group` (default: the default group, made from torchrun's environment if
    need be) call this with the same model; rank 0's values are broadcast. From then on every
    backward that reaches the module's parameters, however, leaves the gradient of the mean loss
    over all ranks in their `.grad`.

    See `gradsync.options.Options` for the options.
    """
    checked = Options(**options)
    device_type = next((p.device.type for p in module.parameters()), "cpu")
    transport = ProcessGroupTransport(resolve_group(process_group, device_type))
    contract.check_not_applied(module, API)
    engine = Engine(module, transport, checked)
    contract.enrol(module, API, engine)
    cls = type(module)
    module.__class__ = type(f"Replicate{cls.__name__}", (ReplicateModule, cls), {})
    return module


def unreplicate(module: M) -> M:
    """Undoes `replicate`: the module is again what it was, and keeps its values and gradients."""
    engine_of(module).disarm()
    contract.withdraw(module, API)
    module.__class__ = type(module).__bases__[1]
    return module


def engine_of(module: nn.Module) -> Engine:
    """The engine of a replicated module, of either front."""
    engine = contract.state_of(module, API)
    if not isinstance(engine, Engine):
        raise TypeError(
            f"{type(module).__name__} is not replicated. Call gradsync.replicate(module) first, or pass the "
            "module it was called on rather than a submodule."
        )
    return engine
