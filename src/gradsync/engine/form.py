"""In which forms a module's parameters are registered and compute: by mesh, precision and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradsync import _torch
from gradsync.engine.face import Face, Site
from gradsync.errors import InvalidOptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a front was asked for. Nothing of it: parameters stay what they are, and have no faces."""

    mesh: DeviceMesh | None = None  # over which parameters are registered as DTensors
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    compute_device: torch.device | None = None  # where the parameters are not, if they are offloaded

    def face(self, name: str, parameter: nn.Parameter, sites: Sequence[Site]) -> Face | None:
        """The face of one parameter, made at the first sight of it; None if it needs none."""
        if self.mesh is not None:
            computing = _register_on_mesh(name, parameter, self.mesh)
        elif _torch.is_dtensor(parameter) or self._converts(parameter):
            computing = parameter
        else:
            return None
        if self._converts(computing):
            device = self.compute_device or _torch.local(computing).device
            dtype = self._compute_dtype(computing)
            copied = computing.detach().to(device=device, dtype=dtype)
            computing = nn.Parameter(copied, computing.requires_grad)
        elif computing is parameter:  # a DTensor that computes as it is
            computing = nn.Parameter(parameter.detach(), parameter.requires_grad)
        return Face(parameter, computing, sites, self._reduced_dtype(parameter))

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Floating inputs in the dtype in which the parameters compute."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return args, kwargs
        return _cast((args, kwargs), self.param_dtype)  # type: ignore[no-any-return]

    def cast_outputs(self, output: Any) -> Any:
        return output if self.output_dtype is None else _cast(output, self.output_dtype)

    def _converts(self, parameter: Tensor) -> bool:
        local = _torch.local(parameter)
        moved = self.compute_device is not None and local.device != self.compute_device
        return moved or self._compute_dtype(parameter) is not parameter.dtype

    def _compute_dtype(self, parameter: Tensor) -> torch.dtype:
        return self.param_dtype if self.param_dtype and parameter.is_floating_point() else parameter.dtype

    def _reduced_dtype(self, parameter: Tensor) -> torch.dtype:
        if not parameter.is_floating_point():
            return parameter.dtype
        return self.reduce_dtype or self.param_dtype or parameter.dtype


def _register_on_mesh(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Makes `parameter` itself a DTensor over `mesh`, and returns one that computes with its local tensor.

    The object stays the same, so an optimizer that was built before keeps working.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(parameter, DTensor) and _covers(parameter.device_mesh, mesh):  # registered there already
        computing = _without_dimensions(parameter, mesh)
    else:
        computing = nn.Parameter(parameter.detach(), parameter.requires_grad)
        placements = [Replicate()] * mesh.ndim
        whole = mesh
        if isinstance(parameter, DTensor):
            whole = _torch.joined_mesh(mesh, parameter.device_mesh, name)
            placements = [*placements, *parameter.placements]  # type: ignore[list-item]
        spread = DTensor.from_local(
            _torch.local(parameter).detach(),
            whole,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        registered = nn.Parameter(spread, parameter.requires_grad)
        gradient, parameter.grad = parameter.grad, None
        torch.utils.swap_tensors(parameter, registered)
        if gradient is not None:
            parameter.grad = _torch.in_form_of(parameter, _torch.local(gradient))
    return computing


def _covers(whole: DeviceMesh, mesh: DeviceMesh) -> bool:
    return set(mesh.mesh_dim_names or ("",)) <= set(whole.mesh_dim_names or ())


def _without_dimensions(parameter: Any, mesh: DeviceMesh) -> nn.Parameter:
    """What computes for a DTensor that is registered over the mesh's dimensions and perhaps others."""
    from torch.distributed.tensor import DTensor

    names = parameter.device_mesh.mesh_dim_names
    others = [name for name in names if name not in (mesh.mesh_dim_names or ())]
    local = parameter.to_local().detach()
    if not others:
        return nn.Parameter(local, parameter.requires_grad)
    placements = [placement for name, placement in zip(names, parameter.placements, strict=True) if name in others]
    part = parameter.device_mesh[tuple(others)]
    shape, stride = parameter.shape, parameter.stride()
    return nn.Parameter(
        DTensor.from_local(local, part, placements, run_check=False, shape=shape, stride=stride),
        parameter.requires_grad,
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in a nested value in another dtype; everything else as it is."""
    return _torch.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, value)


def check_replicated(name: str, parameter: Any, mesh: DeviceMesh) -> None:
    """A parameter that is a DTensor over the replicated dimensions already must be whole there."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names is None:
        return
    for dimension, placement in zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True):
        if dimension in (mesh.mesh_dim_names or ()) and not isinstance(placement, Replicate):
            raise InvalidOptionError(
                f"parameter '{name}' is placed {placement} over mesh dimension '{dimension}', which replicate() is "
                "to keep whole. Use fully_shard() for sharding, or another dimension."
            )
