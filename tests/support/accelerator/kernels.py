"""All of aten on the stand-in: each operation runs on the CPU, on the same memory, and the timeline is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from tests.support.accelerator import instead
from tests.support.accelerator.timeline import Extent, Timeline

aten = torch.ops.aten
_MAY_MIX = ("aten::index", "aten::_index", "aten::_unsafe_index", "aten::nonzero")  # which take indices from the host
_CASTS = ("linear", "mm", "addmm", "matmul", "bmm")  # what autocast computes in low precision


class Kernels:
    def __init__(self, device: ModuleType, timeline: Timeline, name: str) -> None:
        self._device, self._timeline, self._name = device, timeline, name
        self._library = Library("_", "IMPL")
        self._library.fallback(self._run, "PrivateUse1")
        self._own = Library("aten", "IMPL")
        self._own.impl("_copy_from", self._copy_from, "PrivateUse1")
        for key in ("Conjugate", "Negative"):  # which copies carry out
            self._own.impl("_copy_from", torch.library.fallthrough_kernel, key)
        self._own.impl("_copy_from_and_resize", self._copy_from_and_resize, "PrivateUse1")
        self._own.impl("_local_scalar_dense", self._local_scalar_dense, "PrivateUse1")
        for op, function in instead.FUNCTIONS.items():
            self._own.impl(op.name(), partial(self._run, op, function=function), "PrivateUse1")
        self._library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for name in _CASTS:
            op = getattr(aten, name).default
            self._own.impl(name, partial(instead.in_low_precision, op), "AutocastPrivateUse1")

    # --- any operation -----------------------------------------------------------------------------------

    def _run(self, op: Any, *args: Any, function: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """`function`: what runs on the CPU instead of it."""
        call = _Call(op, self._device, args, kwargs)
        device = call.check_devices()
        self._device.await_current_stream(device.index)
        result = (function or op)(*call.args, **call.kwargs)
        made: list[Tensor] = []
        found = call.give_back(result, device, made)
        self._timeline.launch(
            self._device.stream_key(device.index),
            call.extents(written=False),
            [*call.extents(written=True), *map(extent, filter(Tensor.numel, made))],
            op._schema.name,
        )
        return found

    # --- copies, and values for the host ---------------------------------------------------------------------

    def _copy_from(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        on = [one.device for one in (source, target) if one.device.type == self._name]
        for device in on:
            self._device.await_current_stream(device.index)
        values, place = (self._device.on_host(one) for one in (source, target))
        if values is not source:
            values = values.conj() if source.is_conj() else values
            values = values.neg() if source.is_neg() else values
        assert place is target or not (target.is_conj() or target.is_neg())
        place.copy_(values)
        reads, writes = ([extent(one)] if self._is_here(one) else [] for one in (source, target))
        stream = self._device.stream_key(on[0].index)
        if len(set(on)) == 2:  # between devices: each waits for the other
            here, there = (torch.accelerator.current_stream(device) for device in on)
            here.wait_stream(there)
        self._timeline.launch(stream, reads, writes, "aten::copy_")
        if len(set(on)) == 2:
            there.wait_stream(here)
        elif len(on) == 1:
            other = target if on[0] == source.device else source
            if not (non_blocking and (other is source or other.is_pinned())):  # what the host gives is staged
                self._timeline.host_waits_for(stream)
        return target

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name and tensor.numel() > 0

    def _copy_from_and_resize(self, source: Tensor, target: Tensor) -> Tensor:
        return self._copy_from(source, target.resize_(source.shape))

    def _local_scalar_dense(self, tensor: Tensor) -> Any:
        index = tensor.device.index
        self._device.await_current_stream(index)
        stream = self._device.stream_key(index)
        self._timeline.launch(stream, [extent(tensor)], [], "aten::item")
        self._timeline.host_waits_for(stream)
        return self._device.on_host(tensor).item()


class _Call:
    """An operation with its arguments on the CPU."""

    def __init__(self, op: Any, device: ModuleType, args: Any, kwargs: dict[str, Any]) -> None:
        self._op, self._device = op, device
        self._touched: list[tuple[Tensor, bool]] = []
        self._originals: dict[int, Tensor] = {}  # by the id of what stands for them on the CPU
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._mixed = False
        self._target: torch.device | None = None
        arguments = op._schema.arguments
        by_name = {argument.name: argument for argument in arguments}
        self.args = [self._to_host(each, argument) for each, argument in zip(args, arguments, strict=False)]
        self.kwargs = {key: self._to_host(each, by_name.get(key)) for key, each in kwargs.items()}

    def _to_host(self, value: Any, argument: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor_to_host(value, argument)
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_host(each, argument) for each in value)
        if isinstance(value, (bool, int, float, complex)) and str(argument.type) in ("Tensor", "Optional[Tensor]"):
            wide = {float: torch.float64, complex: torch.complex128}.get(type(value))
            return self._device.wrapped(torch.tensor(value, dtype=wide, device="cpu"))
        if isinstance(value, torch.device) and value.type == torch._C._get_privateuse1_backend_name():
            self._target = (
                value if value.index is not None else torch.device(value.type, torch.accelerator.current_device_index())
            )
            return torch.device("cpu")
        return value

    def _tensor_to_host(self, tensor: Tensor, argument: Any) -> Tensor:
        if tensor.is_cpu:
            self._mixed = self._mixed or tensor.dim() > 0
            return tensor
        written = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        self._touched.append((tensor, written))
        host: Tensor = self._device.on_host(tensor)
        if written and not tensor.numel():
            self._outputs.append((tensor, host))  # may be given another size
        self._originals[id(host)] = tensor
        return host

    def check_devices(self) -> torch.device:
        """On which it runs; all tensors must be there, but for numbers, and indices."""
        devices = {tensor.device for tensor, _ in self._touched}
        if not devices and self._target is not None:
            devices = {self._target}
        name = self._op._schema.name
        if len(devices) > 1 or (self._mixed and not name.startswith(_MAY_MIX)):
            found = ", ".join(sorted(map(str, devices | ({torch.device("cpu")} if self._mixed else set()))))
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {found}")
        (device,) = devices
        return device

    def extents(self, written: bool) -> Iterator[Extent]:
        aliases = [one.alias_info for one in self._op._schema.arguments if one.alias_info is not None]
        views_only = any(not alias.is_write for alias in aliases)
        for tensor, is_written in self._touched:
            if is_written is written and tensor.numel() and not (views_only and not is_written):
                yield extent(tensor)

    def give_back(self, value: Any, device: torch.device, made: list[Tensor]) -> Any:
        for tensor, host in self._outputs:
            if host.numel():
                tensor.resize_(host.shape)
                self._device.on_host(tensor).copy_(host)
                made.append(tensor)
        return self._give_back(value, device, made)

    def _give_back(self, value: Any, device: torch.device, made: list[Tensor]) -> Any:
        if isinstance(value, Tensor):
            if (original := self._originals.get(id(value))) is not None:
                return original
            if (view := self._as_view(value)) is not None:
                return view
            with torch.accelerator.device_index(device.index):
                new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            self._device.on_host(new).copy_(value)
            made.append(new)
            return new
        if isinstance(value, (list, tuple)):
            return type(value)(self._give_back(each, device, made) for each in value)
        return value

    def _as_view(self, host: Tensor) -> Tensor | None:
        """Of the memory of an argument, for operations that give views."""
        for tensor, _ in self._touched:
            base = self._device.on_host(tensor)
            start = base.data_ptr() - tensor.storage_offset() * tensor.element_size()
            at = host.data_ptr() - start
            if host.numel() and 0 <= at < tensor.untyped_storage().nbytes():
                new = torch.empty(0, dtype=host.dtype, device=tensor.device)
                return new.set_(tensor.untyped_storage(), at // host.element_size(), host.shape, host.stride())
        return None


def extent(tensor: Tensor) -> Extent:
    """The addresses from a tensor's first element to its last one."""
    begin = tensor.data_ptr()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + length * tensor.element_size()
