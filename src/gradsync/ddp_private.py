"""Private names of torch's DistributedDataParallel that frameworks, and torch's own tests, rely on.

Each does with our engine what its namesake does with torch's. Nothing else in gradsync uses them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync import _torch
from gradsync.arguments import shown
from gradsync.ddp_logging import RuntimeLog, configuration
from gradsync.engine.buffers import BufferHook, BufferHookLocation
from gradsync.engine.engine import Engine
from gradsync.engine.parameter_policy import ParameterPolicy
from gradsync.errors import InvalidOptionError, UnfinishedRoundError, WrongTypeError
from gradsync.groups import check_group
from gradsync.options import MIB, Options

_BufferCommHookLocation = BufferHookLocation


@dataclass
class _MixedPrecision:
    """torch's private settings for `mixed_precision`. None: as it is."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True

    def policy(self) -> ParameterPolicy:
        """The same for the engine. Gradients always come back in full precision."""
        casts = self.cast_forward_inputs or self.cast_root_forward_inputs
        return ParameterPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=casts)

    def cast_buffers(self, module: nn.Module, ignored: Iterable[str]) -> None:
        if self.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and name not in ignored:
                    buffer.data = buffer.to(self.buffer_dtype)


class ReducerView:
    """What pipelines and tests ask torch's reducer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare_for_backward(self, outputs: object) -> None:
        """Nothing to prepare: hooks are armed from construction on."""

    def _delay_all_reduce(self) -> None:
        """Lightning calls it after the first backward of a static graph: ours has reduced by then."""

    def _rebuild_buckets(self) -> bool:
        """Whether there are new buckets: they are laid out once, at the end of the first round."""
        return False

    def _get_local_used_map(self) -> Tensor:
        """By how many ranks each parameter was used in the latest round (with equal weights)."""
        group = self._engine.reducer.group
        counts = [0] * len(group.parameters)
        for bucket in group.buckets:
            for place, share in zip(bucket.plan.places, bucket.usage_shares(), strict=True):
                counts[place.index] = round(share * self._engine.transport.size)
        return torch.tensor(counts, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        """Whether all rounds so far used the same parameters on this rank."""
        return len(self._engine.statistics.used) <= 1


class TorchPrivate:
    """The underscored part of torch's class."""

    _active_ddp_module: ClassVar[Any] = None  # a wrapper of torch's own, made before, says so in the same place
    bucket_bytes_cap: int
    bucket_bytes_cap_list: list[int]
    bucket_bytes_cap_default: bool
    static_graph: bool
    find_unused_parameters: bool
    process_group: dist.ProcessGroup

    if TYPE_CHECKING:

        @property
        def _engine(self) -> Engine: ...

        def change_process_group(self, group: dist.ProcessGroup) -> None: ...

    def _init_private(self, options: Options) -> None:
        self.bucket_bytes_cap = max(options.bucket_caps())
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in options.bucket_cap_mb_list]
        self.bucket_bytes_cap_default = options.bucket_cap_mb is None and not options.bucket_cap_mb_list
        self.broadcast_bucket_size = 250 * MIB
        self._ddp_sink_clone = True
        self._error = ""
        self._log = RuntimeLog()
        self._engine.add_recorder(self._log.record)

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """For whose forward torch.compile splits graphs: it asks this class, if it is in the place of torch's."""
        return cls._active_ddp_module or _torch.graphs_are_split()

    # --- what is synchronized ----------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Before wrapping: parameters and buffers that each rank keeps to itself, by name."""
        names = list(params_and_buffers_to_ignore)
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

    def register_comm_hook(self, state: object, hook: Any) -> None:
        with self._errors_noted():
            self._engine.register_comm_hook(state, hook)

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHook,
        comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """`hook(state, {name: buffer})` keeps the buffers in step instead of us."""
        if not callable(hook):
            raise WrongTypeError(f"Communication hook must be callable, with (state, buffers), but is {shown(hook)}.")
        self._engine.register_buffer_hook(state, hook, BufferHookLocation(comm_hook_location.value))

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Broadcasts the buffers, or those given, from one rank."""
        tensors = list(bufs) if bufs is not None else [buffer for _, buffer in self._engine.buffers.named()]
        self._engine.transport.broadcast(tensors, authoritative_rank)

    @property
    def reducer(self) -> ReducerView:
        """A few methods of torch's reducer, for those who look."""
        return ReducerView(self._engine)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether a round has passed: from then on buckets are what they will be."""
        return self._engine.reducer.rounds > 0

    @property
    def _distributed_rank(self) -> int:
        return self._engine.transport.rank

    # --- communication -----------------------------------------------------------------------------

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._engine.register_comm_hook(None, _torch.builtin_hook(comm_hook_type), known_as=str(comm_hook_type))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """An optimizer that steps in a communication hook; `gradsync.overlap_optimizer` is the public way."""
        _torch.overlapped_optimizer(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """torch's name for `set_sparse_rows`. The ids need not be sorted, and parameters may be left out."""
        self._engine.know_sparse_rows(global_unique_ids)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """torch's name for `change_process_group`, called on all ranks, also those that are not in the group.

        There it is no mistake yet; a backward before the module is moved again would be, and says so.
        """
        check_group("new_process_group", new_process_group)
        if dist.get_rank(new_process_group) < 0:
            self._engine.stay_outside()
        else:
            self.change_process_group(new_process_group)

    @property
    def _authoritative_rank(self) -> int:
        """Whose model all ranks took over at the end of a `join`."""
        return self._engine.final_source

    # --- the graph ---------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._engine.statistics.rounds:
            self._error = "_set_static_graph should be called before training loop starts: before the first backward."
            raise InvalidOptionError(self._error)
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
        if self._engine.reducer.is_unfinished:
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
        """Of the rounds after the tenth, which are logged: one in `sample_rate`."""
        if sample_rate < 1:
            raise InvalidOptionError("DDP runtime logging sample rate should be equal or greater than 1")
        self._log.sample_one_in(sample_rate)

    def _build_debug_param_to_name_mapping(self, parameters: list[Tensor]) -> dict[int, str]:
        group = self._engine.reducer.group
        names = {id(p): spec.name for p, spec in zip(group.parameters, group.specs, strict=True)}
        unknown = [index for index, p in enumerate(parameters) if id(p) not in names]
        if len(parameters) < len(names):
            missing = sorted(set(names.values()) - {names.get(id(p), "") for p in parameters})
            raise InvalidOptionError(f"Param with name {', '.join(missing)} is managed here, but not in the list.")
        if unknown:
            raise InvalidOptionError(
                f"Expected param to name mapping to have an entry for each parameter, but those at index {unknown} "
                "are not managed by this module."
            )
        return {index: names[id(p)] for index, p in enumerate(parameters)}

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        """The managed parameters, and for each whether a sparse gradient is expected."""
        group = self._engine.reducer.group
        return list(group.parameters), [spec.sparse for spec in group.specs]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What torch's logger tells, under the same keys, as far as it is true here."""
        told = configuration(self) | self._log.data  # type: ignore[arg-type]
        return told | ({"has_error": 1, "error": self._error} if self._error else {})

    @contextlib.contextmanager
    def _errors_noted(self) -> Iterator[None]:
        """What is raised inside shows in the logging data too: there monitoring looks for it."""
        try:
            yield
        except Exception as error:
            self._error = str(error)
            raise
