"""What torch's DDP logger tells, under the same keys where they make sense here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.engine.plan import Plan, make_plan
from gradsync.events import Event, RoundClosed

if TYPE_CHECKING:
    from gradsync.ddp import DistributedDataParallel

ALWAYS = 10  # rounds that are logged whatever the sample rate
NANOSECONDS = 1e9


class RuntimeLog:
    """Times of the sampled rounds, in nanoseconds, as torch has them."""

    def __init__(self) -> None:
        self.sample_rate = 100
        self.data: dict[str, Any] = {"iteration": 0}
        self._samples = 0

    def record(self, event: Event) -> None:
        if not isinstance(event, RoundClosed):
            return
        if event.round >= ALWAYS and event.round % self.sample_rate:
            return
        self.data["iteration"] = event.round
        self.data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, event.order))
        self.data |= {
            "forward_compute_time_start": _ns(event.forward_at),
            "backward_compute_time_start": _ns(event.opened_at),
            "backward_compute_time_end": _ns(event.backward_ended_at),
            "backward_comm_time_start": _ns(event.first_launch_at),
            "backward_comm_time_end": _ns(event.reduced_at),
        }
        times = {
            "forward_compute_time": event.opened_at - event.forward_at,
            "backward_compute_time": event.backward_ended_at - event.opened_at,
            "backward_comm_time": event.reduced_at - event.first_launch_at,
            "backward_compute_comm_overlap_time": max(0.0, event.backward_ended_at - event.first_launch_at),
        }
        self._samples += 1
        for key, seconds in times.items():
            mean = self.data.get(f"avg_{key}", 0)
            self.data[key] = _ns(seconds)
            self.data[f"avg_{key}"] = mean + (self.data[key] - mean) // self._samples


def _ns(seconds: float) -> int:
    return int(seconds * NANOSECONDS)


def configuration(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What does not change from round to round, or only when the plan does."""
    engine = ddp._engine
    reducer = engine.reducer
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
        "has_sync_bn": int(any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in ddp.modules())),
        "join_uneven_inputs": int(engine.statistics.joined),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "dtypes": ", ".join(sorted({_c_name(spec.dtype) for spec in reducer.specs})),
        "num_parameter_tensors": len(reducer.specs),
        "total_parameter_size_bytes": sum(spec.nbytes for spec in reducer.specs),
        "bucket_sizes": _sizes(make_plan(reducer.specs, (), engine.options.bucket_caps())),
        "has_rebuilt_buckets": int(reducer.plan is not None and (ddp.static_graph or not ddp.find_unused_parameters)),
    }
    if engine.statistics.hook:
        data["comm_hook"] = engine.statistics.hook
    return data | _plan(reducer.plan) | _environment(data["backend_name"])


def _plan(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    buckets = [" ".join(str(place.index) for place in bucket.places) for bucket in plan.buckets]
    return {
        "rebuilt_bucket_sizes": _sizes(plan),
        "rebuilt_per_bucket_param_indices": ", ".join(buckets),
        "num_buckets_reduced": len(plan.buckets),
    }


def _sizes(plan: Plan) -> str:
    return ", ".join(str(bucket.nbytes) for bucket in plan.buckets)


def _c_name(dtype: torch.dtype) -> str:
    """torch's logger gives dtypes their C names."""
    names = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _environment(backend: str) -> dict[str, Any]:
    """Variables that decide how the ranks find and reach each other."""
    names = ["MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG"]
    if backend == "gloo":
        names += ["GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"]
    if backend == "nccl":
        names += ["NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"]
        names += ["NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"]  # torch's logger drops their prefix TORCH_
    found: dict[str, Any] = {
        name.lower(): os.environ.get(name, os.environ.get(f"TORCH_{name}", "N/A")) for name in names
    }
    return found | ({"gloo_num_threads": 2} if backend == "gloo" else {})
