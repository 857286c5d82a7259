"""Front 1: `replicate(module)`, in place, names unchanged. Translates arguments; the engine does the rest."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from gradsync import _torch, contract
from gradsync.engine.engine import Engine
from gradsync.groups import resolve_group
from gradsync.options import Options
from gradsync.replica import API, Replica, engine_of
from gradsync.transport.process_group import ProcessGroupTransport

M = TypeVar("M", bound=nn.Module)


class ReplicateModule(Replica, nn.Module):
    """What a replicated module can do besides what its own class can.

    No hook is put on the module: `__call__` of this class surrounds the original one. So copies,
    pickles and the order of the user's own hooks are as if it were not there.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        engine.before_forward()
        output = super().__call__(*args, **kwargs)
        engine.after_forward(output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicateModule:
        """A working replica of its own, in step over the same group, without communicating.

        Good for an exponential moving average, and a copy that is trained on is not trained alone.
        """
        engine = self._engine
        duplicate: nn.Module = copy.deepcopy(copy.copy(self), memo)  # a shallow copy is a plain module
        memo[id(self)] = duplicate
        options = dataclasses.replace(engine.options, init_sync=False)
        _attach(duplicate, Engine([duplicate], engine.transport, options, engine.ignored))
        return cast(ReplicateModule, duplicate)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain module it was: a saved model loads anywhere, without gradsync."""
        original = _original_class(self)
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key not in _torch.composable_keys()}
        return copyreg._reconstructor, (original, object, None), state  # type: ignore[attr-defined]


def replicate(module: M, *, process_group: dist.ProcessGroup | None = None, **options: Any) -> M:
    """Makes `module` a replica that is kept in step with those of the other ranks, and returns it.

    In place: the same object, with the same names of parameters, buffers and submodules. Its class
    becomes `Replicate<Class>`, a subclass of both its own class and `ReplicateModule`.

    All ranks of `process_group` (default: the default group, made from torchrun's environment if
    need be) call this with the same model; rank 0's values are broadcast. From then on every
    backward that reaches the module's parameters, however, leaves the gradient of the mean loss
    over all ranks in their `.grad`.

    See `gradsync.Options` for the options.
    """
    checked = Options(**options)
    contract.check_not_applied(module, API)
    device_type = next((p.device.type for p in module.parameters()), "cpu")
    transport = ProcessGroupTransport(resolve_group(process_group, device_type))
    _attach(module, Engine([module], transport, checked))
    return module


def unreplicate(module: M) -> M:
    """Undoes `replicate`: the module is again what it was, and keeps its values and gradients."""
    engine_of(module).disarm()
    contract.withdraw(module, API)
    module.__class__ = _original_class(module)  # type: ignore[assignment]
    return module


def _attach(module: nn.Module, engine: Engine) -> None:
    contract.enrol(module, API, engine)
    cls = type(module)
    module.__class__ = type(f"Replicate{cls.__name__}", (ReplicateModule, cls), {"__module__": cls.__module__})


def _original_class(module: nn.Module) -> type[nn.Module]:
    return cast("type[nn.Module]", type(module).__bases__[1])
