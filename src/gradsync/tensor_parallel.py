"""DTensor parameters of a module: localized, reconstructed, found and replaced.

`replicate` and `DistributedDataParallel` handle DTensor parameters by themselves: gradients are
reduced over the data-parallel ranks only and come back as DTensors, parameters never vanish. The
functions here are for those who use another data-parallel layer, or want to do it by hand; they do
what `torch.distributed.tensor.parallel.ddp` does in private.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from gradsync import _torch
from gradsync.errors import InvalidOptionError


class _Layout(NamedTuple):
    """What a local tensor was part of."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]


# Beside the parameters, never on them.
_layouts: MutableMapping[nn.Parameter, _Layout] = WeakTensorKeyDictionary()


def find_parameter(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The submodule that holds the parameter with this full name, and its name there."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = module.get_submodule(owner_path)
    except AttributeError as error:
        raise InvalidOptionError(f"no submodule '{owner_path}' in {type(module).__name__}: {error}") from None
    if name not in owner._parameters:
        raise InvalidOptionError(f"no parameter '{name}' in submodule '{owner_path}' of {type(module).__name__}")
    return owner, name


def replace_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Puts other parameters into a module, by full names; each name must exist. Order stays."""
    found = [(*find_parameter(module, path), parameter) for path, parameter in parameters.items()]
    for owner, name, parameter in found:
        owner._parameters[name] = parameter


def localize(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """Replaces DTensor parameters by plain ones that share their local memory."""
    replaced = {}
    for path, parameter in module.named_parameters():
        if _torch.is_dtensor(parameter) and all(parameter is not one for one in ignored):
            plain = nn.Parameter(_torch.local(parameter).detach(), parameter.requires_grad)
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            _layouts[plain] = _Layout(mesh, placements, parameter.shape, parameter.stride())
            if parameter.grad is not None:
                plain.grad = _torch.local_gradient(parameter.grad, parameter)
            replaced[path] = plain
    replace_parameters(module, replaced)


def reconstruct(module: nn.Module) -> None:
    """Undoes `localize`, so that a forward computes with DTensors.

    A reconstructed parameter is made from the plain one by an operation that backward goes through:
    gradients arrive on the plain parameter. It is therefore an ordinary attribute, not a leaf.
    """
    from torch.distributed.tensor import DTensor

    for path, parameter in list(module.named_parameters()):
        layout = _layouts.get(parameter)
        if layout is None:
            continue
        owner, name = find_parameter(module, path)
        whole = DTensor.from_local(
            parameter,
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride,
        )
        # Under the same name, in front of the registered one, which stays in the module.
        owner.__dict__[name] = whole


def _forget_reconstructed(module: nn.Module) -> None:
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and parameter in _layouts:
                submodule.__dict__.pop(name, None)


def pre_dp_module_transform(module: nn.Module) -> Callable[[], None]:
    """Localizes DTensor parameters for good, and reconstructs them around each forward.

    For a data-parallel layer that knows plain parameters only: it sees those, before, during and
    after a step, and `named_parameters()` is never empty. Returns a function that undoes it.
    """
    localize(module)
    handles = [
        module.register_forward_pre_hook(lambda m, _: reconstruct(m)),
        module.register_forward_hook(lambda m, *_: _forget_reconstructed(m), always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        replace_parameters(module, _registered_again(module))

    return undo


def _registered_again(module: nn.Module) -> dict[str, nn.Parameter]:
    """DTensor parameters for those that `localize` made plain."""
    from torch.distributed.tensor import DTensor

    found = {}
    for path, parameter in module.named_parameters():
        layout = _layouts.get(parameter)
        if layout is not None:
            inner, shape, stride = parameter.detach(), layout.shape, layout.stride
            whole = DTensor.from_local(
                inner, layout.mesh, layout.placements, run_check=False, shape=shape, stride=stride
            )
            found[path] = nn.Parameter(whole, parameter.requires_grad)
    return found
