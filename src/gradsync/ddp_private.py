"""Private names of torch's DistributedDataParallel that frameworks, and torch's own tests, rely on.

Each does with our engine what its namesake does with torch's. Nothing else in gradsync uses them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.engine.buffers import BufferHook, BufferHookLocation
from gradsync.engine.engine import Engine
from gradsync.engine.plan import Plan, make_plan
from gradsync.errors import InvalidOptionError, UnfinishedRoundError
from gradsync.options import MIB, Options

if TYPE_CHECKING:
    from gradsync.ddp import DistributedDataParallel

_BufferCommHookLocation = BufferHookLocation


class TorchPrivate:
    """The underscored part of torch's class."""

    bucket_bytes_cap: int
    bucket_bytes_cap_list: list[int]
    bucket_bytes_cap_default: bool
    static_graph: bool
    find_unused_parameters: bool
    process_group: dist.ProcessGroup

    if TYPE_CHECKING:

        @property
        def _engine(self) -> Engine: ...

    def _init_private(self, options: Options) -> None:
        self.bucket_bytes_cap = max(options.bucket_caps)
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in options.bucket_cap_mb_list]
        self.bucket_bytes_cap_default = options.bucket_cap_mb is None and not options.bucket_cap_mb_list
        self.broadcast_bucket_size = 250 * MIB
        self._ddp_sink_clone = True
        self._logging_sample_rate = 100

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        """The wrapper whose forward runs now; torch.compile asks for it."""
        active: DistributedDataParallel | None = cls._active_ddp_module  # type: ignore[attr-defined]
        return active

    # --- what is synchronised ----------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Iterable[str]) -> None:
        """Before wrapping: parameters and buffers that each rank keeps to itself."""
        names = list(names)
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterable[Any]:
        """The parameters that are not ignored, with or without their names."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHook,
        comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """`hook(state, {name: buffer})` keeps the buffers in step instead of us."""
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        self._engine.buffers.register_hook(state, hook, BufferHookLocation(comm_hook_location.value))

    # --- the graph ---------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._engine.statistics.rounds:
            raise InvalidOptionError(
                "self.static_graph should be called before training loop starts, that is, before the first backward."
            )
        self.static_graph = True
        self._engine.promise_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will "
                "detect unused parameters automatically, so you do not need to set it.",
                stacklevel=2,
            )

    def _check_reducer_finalized(self) -> None:
        """Raises if the last backward left a round open."""
        if self._engine.reducer.open:
            raise UnfinishedRoundError(
                f"rank {self._engine.transport.rank}: Expected to have finished reduction in the prior iteration "
                "before starting a new one: the backward of this round did not come to its end."
            )

    def _remove_autograd_hooks(self) -> None:
        self._engine.disarm()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted: outputs are not cloned here, they pass unchanged."""
        self._ddp_sink_clone = val

    # --- logging -----------------------------------------------------------------------------------

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted: times are taken in every round, which costs next to nothing here."""
        if sample_rate < 1:
            raise InvalidOptionError("DDP runtime logging sample rate should be equal or greater than 1")
        self._logging_sample_rate = sample_rate

    def _build_debug_param_to_name_mapping(self, parameters: list[Tensor]) -> dict[int, str]:
        names = {id(p): name for name, p in self._engine.module.named_parameters()}
        unknown = [index for index, p in enumerate(parameters) if id(p) not in names]
        if unknown:
            raise InvalidOptionError(f"Param with name not found in module: parameters at index {unknown}.")
        return {index: names[id(p)] for index, p in enumerate(parameters)}

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        """The managed parameters, and for each whether a sparse gradient is expected."""
        reducer = self._engine.reducer
        return list(reducer.parameters), [spec.sparse for spec in reducer.specs]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What torch's logger tells, under the same keys where they make sense here."""
        return logging_data(self)  # type: ignore[arg-type]


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    engine = ddp._engine
    reducer, statistics = engine.reducer, engine.statistics
    unlearned = make_plan(reducer.specs, (), engine.options.bucket_caps)
    data: dict[str, Any] = {
        "world_size": engine.transport.size,
        "rank": engine.transport.rank,
        "module_name": type(engine.module).__name__,
        "backend_name": dist.get_backend(ddp.process_group),
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "dtypes": ", ".join(sorted({_c_name(spec.dtype) for spec in reducer.specs})),
        "num_parameter_tensors": len(reducer.specs),
        "total_parameter_size_bytes": sum(spec.nbytes for spec in reducer.specs),
        "bucket_sizes": _sizes(unlearned),
        "iteration": statistics.rounds,
        "has_rebuilt_buckets": int(reducer.plan is not None and (ddp.static_graph or not ddp.find_unused_parameters)),
        "comm_hook": engine.statistics.hook,
    }
    if reducer.plan is not None:
        data["rebuilt_bucket_sizes"] = _sizes(reducer.plan)
        places = [", ".join(str(p.index) for p in bucket.places) for bucket in reducer.plan.buckets]
        data["rebuilt_per_bucket_param_indices"] = ", ".join(places)
        data["num_buckets_reduced"] = len(reducer.plan.buckets)
    data.update(_environment())
    return data


def _sizes(plan: Plan) -> str:
    return ", ".join(str(bucket.nbytes) for bucket in plan.buckets)


def _c_name(dtype: torch.dtype) -> str:
    """torch's logger gives dtypes their C names."""
    names = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _environment() -> dict[str, Any]:
    def text(name: str) -> str:
        return os.environ.get(name, "N/A")

    return {
        "master_addr": text("MASTER_ADDR"),
        "master_port": text("MASTER_PORT"),
        "cuda_visible_devices": text("CUDA_VISIBLE_DEVICES"),
        "torch_distributed_debug": text("TORCH_DISTRIBUTED_DEBUG"),
        "gloo_socket_ifname": text("GLOO_SOCKET_IFNAME"),
        "gloo_device_transport": text("GLOO_DEVICE_TRANSPORT"),
        "nccl_socket_ifname": text("NCCL_SOCKET_IFNAME"),
        "nccl_blocking_wait": text("TORCH_NCCL_BLOCKING_WAIT"),
        "nccl_async_error_handling": text("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        "nccl_debug": text("NCCL_DEBUG"),
        "nccl_nthreads": text("NCCL_NTHREADS"),
        "nccl_ib_timeout": text("NCCL_IB_TIMEOUT"),
    }
