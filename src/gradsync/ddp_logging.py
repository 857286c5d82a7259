"""What torch's DDP logger tells, under the same keys: what is true here, and nothing else.

Where there is nothing true to tell (a round without a forward, a group without gloo), the key is left out.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync import _torch
from gradsync.engine.plan import Plan, make_plan
from gradsync.events import Event, RoundClosed

if TYPE_CHECKING:
    from gradsync.ddp import DistributedDataParallel

ALWAYS = 10  # rounds that are logged whatever the sample rate
NANOSECONDS = 1e9
# Variables that decide how the ranks find and reach each other.
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
GLOO_VARIABLES = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
NCCL_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT")
PREFIXED_VARIABLES = ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING")  # TORCH_ before them, or as they once were
# torch's logger gives dtypes their C names.
C_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


class RuntimeLog:
    """Times of the sampled rounds, in nanoseconds, as torch has them."""

    def __init__(self) -> None:
        self._sample_rate = 100
        self._sampled: dict[str, Any] = {"iteration": 0}
        self._totals: Counter[str] = Counter()
        self._samples: Counter[str] = Counter()
        self._closed_at = time.perf_counter()

    def sample_one_in(self, rounds: int) -> None:
        self._sample_rate = rounds

    @property
    def data(self) -> dict[str, Any]:
        averages = {f"avg_{key}": total // self._samples[key] for key, total in self._totals.items()}
        return self._sampled | averages

    def record(self, event: Event) -> None:
        if not isinstance(event, RoundClosed):
            return
        had_forward = event.forward_at > self._closed_at
        self._closed_at = event.closed_at
        if event.round >= ALWAYS and event.round % self._sample_rate:
            return
        times = {key: _ns(seconds) for key, seconds in _times(event, had_forward).items()}
        self._totals.update(times)
        self._samples.update(times.keys())
        self._sampled = {
            "iteration": event.round,
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, event.order)),
            "num_buckets_reduced": len(event.buckets),
            **times,
            **_moments(event, had_forward),
        }


def _times(event: RoundClosed, had_forward: bool) -> dict[str, float]:
    """Seconds. A round without a forward of its own, a second backward through a graph say, has no time of one."""
    overlap = min(event.backward_ended_at, event.reduced_at) - event.first_launch_at
    forward = {"forward_compute_time": event.opened_at - event.forward_at} if had_forward else {}
    return forward | {
        "backward_compute_time": event.backward_ended_at - event.opened_at,
        "backward_comm_time": event.reduced_at - event.first_launch_at,
        "backward_compute_comm_overlap_time": max(0.0, overlap) if event.overlapped_buckets else 0.0,
    }


def _moments(event: RoundClosed, had_forward: bool) -> dict[str, int]:
    """On the clock of the day, as torch has them."""
    offset = time.time_ns() - time.perf_counter_ns()
    moments = {
        "backward_compute_time_start": event.opened_at,
        "backward_compute_time_end": event.backward_ended_at,
        "backward_comm_time_start": event.first_launch_at,
        "backward_comm_time_end": event.reduced_at,
    }
    if had_forward:
        moments["forward_compute_time_start"] = event.forward_at
    return {key: offset + _ns(seconds) for key, seconds in moments.items()}


def _ns(seconds: float) -> int:
    return int(seconds * NANOSECONDS)


def configuration(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What does not change from round to round, or only when the plan does."""
    engine = ddp._engine
    group = engine.reducer.group
    data: dict[str, Any] = {
        "world_size": engine.transport.size,
        "rank": engine.transport.rank,
        "module_name": type(engine.module).__name__,
        "has_sync_bn": int(any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in ddp.modules())),
        "join_uneven_inputs": int(engine.statistics.joined),
        "dtypes": ", ".join(sorted({C_NAMES.get(spec.dtype, str(spec.dtype)) for spec in group.specs})),
        "num_parameter_tensors": len(group.specs),
        "total_parameter_size_bytes": sum(spec.nbytes for spec in group.specs),
        # What follows from the parameters alone. The first round, which tells their order, needs no buckets.
        "bucket_sizes": _sizes(make_plan(group.specs, (), engine.options.bucket_caps(engine.transport.usual_caps))),
    }
    if engine.statistics.hook:
        data["comm_hook"] = engine.statistics.hook
    # With `find_unused_parameters` torch keeps its first buckets. Ours follow the order of arrival with it too: neither
    # of torch's answers would tell what its readers take it for.
    if ddp.static_graph or not ddp.find_unused_parameters:
        data["has_rebuilt_buckets"] = int(group.plan is not None)
    return data | _arguments(ddp) | _plan(group.plan) | _environment(ddp.process_group)


def _arguments(ddp: DistributedDataParallel) -> dict[str, Any]:
    """As the constructor was given them, or torch's defaults; not what the engine makes of them."""
    return {
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
    }


def _plan(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    buckets = [" ".join(str(place.index) for place in bucket.places) for bucket in plan.buckets]
    return {"rebuilt_bucket_sizes": _sizes(plan), "rebuilt_per_bucket_param_indices": ", ".join(buckets)}


def _sizes(plan: Plan) -> str:
    return ", ".join(str(bucket.nbytes) for bucket in plan.buckets)


def _environment(group: dist.ProcessGroup) -> dict[str, Any]:
    backend = dist.get_backend(group)
    more = {"gloo": GLOO_VARIABLES, "nccl": NCCL_VARIABLES}.get(backend, ())
    found: dict[str, Any] = {name.lower(): os.environ.get(name, "N/A") for name in (*VARIABLES, *more)}
    found["backend_name"] = backend
    if backend == "nccl":
        for name in PREFIXED_VARIABLES:
            found[name.lower()] = os.environ.get(f"TORCH_{name}", os.environ.get(name, "N/A"))
    if backend == "gloo" and (threads := _torch.gloo_threads(group)) is not None:
        found["gloo_num_threads"] = threads
    return found
