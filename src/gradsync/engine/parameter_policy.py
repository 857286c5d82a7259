"""In which forms a module's parameters are registered and compute: by mesh, precision and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradsync import _torch
from gradsync.engine.compute_parameter import ComputeParameter, Site
from gradsync.engine.outputs import tensors_in
from gradsync.errors import InvalidOptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class ParameterPolicy:
    """What a front was asked for. Nothing of it: parameters stay what they are, and have no compute parameters."""

    mesh: DeviceMesh | None = None  # over which parameters are registered as DTensors
    whole_mesh: DeviceMesh | None = None  # of which that is a part, if inputs are DTensors over all of it
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    compute_device: torch.device | None = None  # where the parameters are not, if they are offloaded

    def settings(self) -> dict[str, str]:
        """What all ranks must have set alike."""
        mesh = "None" if self.mesh is None else f"{tuple(self.mesh.shape)} {self.mesh.mesh_dim_names}"
        names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        return {"mesh": mesh} | {name: repr(getattr(self, name)) for name in names}

    def takes_mesh(self, inputs: Any) -> bool:
        """Whether parameters have to compute as DTensors over the whole mesh.

        If it has other dimensions than the replicated ones; else only if inputs are DTensors.
        """
        if self.whole_mesh is None or self.mesh is None:
            return False
        return self.whole_mesh.ndim > self.mesh.ndim or any(_torch.is_dtensor(tensor) for tensor in tensors_in(inputs))

    def compute_parameter(
        self, name: str, parameter: nn.Parameter, sites: Sequence[Site], as_registered: bool
    ) -> ComputeParameter | None:
        """The compute parameter of one parameter, made at the first sight of it; None if it needs none.

        `as_registered`: a DTensor over the whole mesh computes as such.
        """
        apart: tuple[str, ...] = ()
        if self.mesh is not None and as_registered and _torch.is_dtensor(parameter):
            registered, computing = parameter, nn.Parameter(parameter.detach(), parameter.requires_grad)
            apart = self.mesh.mesh_dim_names or ()
        elif self.mesh is not None:
            registered, computing = _on_mesh(name, parameter, self.mesh)
        elif _torch.is_dtensor(parameter):  # computes as it is, but its gradient is taken apart
            registered, computing = parameter, nn.Parameter(parameter.detach(), parameter.requires_grad)
        elif self._converts(parameter):
            registered = computing = parameter
        else:
            return None
        if self._converts(computing):
            device = self.compute_device or _torch.local(computing).device
            copied = computing.detach().to(device=device, dtype=self._compute_dtype(computing))
            computing = nn.Parameter(copied, computing.requires_grad)
        return ComputeParameter(registered, computing, sites, self._reduced_dtype(registered), apart)

    @_torch.outside_of_graphs
    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Floating inputs in the dtype in which the parameters compute."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return args, kwargs
        return _cast((args, kwargs), self.param_dtype)  # type: ignore[no-any-return]

    @_torch.outside_of_graphs
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


def _on_mesh(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> tuple[nn.Parameter, nn.Parameter]:
    """A DTensor over `mesh` to register for `parameter`, and what computes with its local tensor.

    A plain parameter computes itself and gets a DTensor to be registered instead. A DTensor, of
    tensor parallelism, stays the same object and becomes one over both meshes.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter, DTensor):
        local = parameter.detach()
        spread = _torch.as_dtensor(local, mesh, [Replicate()] * mesh.ndim, local.shape, local.stride())
        registered = nn.Parameter(spread, parameter.requires_grad)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            registered.grad = _torch.in_form_of(registered, gradient)
        return registered, parameter
    if _covers(parameter.device_mesh, mesh):
        return parameter, _without_dimensions(parameter, mesh)
    computing = nn.Parameter(parameter.detach(), parameter.requires_grad)
    placements = [*[Replicate()] * mesh.ndim, *parameter.placements]
    whole = _torch.joined_mesh(mesh, parameter.device_mesh, name)
    inner, shape, stride = _torch.local(parameter).detach(), parameter.shape, parameter.stride()
    spread = _torch.as_dtensor(inner, whole, placements, shape, stride)
    gradient, parameter.grad = parameter.grad, None
    torch.utils.swap_tensors(parameter, nn.Parameter(spread, parameter.requires_grad))
    if gradient is not None:
        parameter.grad = _torch.in_form_of(parameter, _torch.local(gradient))
    return parameter, computing


def _covers(whole: DeviceMesh, mesh: DeviceMesh) -> bool:
    return whole == mesh or set(mesh.mesh_dim_names or ("",)) <= set(whole.mesh_dim_names or ())


def _without_dimensions(parameter: Any, mesh: DeviceMesh) -> nn.Parameter:
    """What computes for a DTensor that is registered over the mesh's dimensions and perhaps others."""

    names = parameter.device_mesh.mesh_dim_names or ()
    others = [name for name in names if name not in (mesh.mesh_dim_names or ())]
    local = _torch.local(parameter).detach()
    if not others:
        return nn.Parameter(local, parameter.requires_grad)
    placements = [placement for name, placement in zip(names, parameter.placements, strict=True) if name in others]
    part = parameter.device_mesh[tuple(others)]
    shape, stride = parameter.shape, parameter.stride()
    return nn.Parameter(
        _torch.as_dtensor(local, part, placements, shape, stride),
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
