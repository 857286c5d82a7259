"""Front 2: `DistributedDataParallel(module)`, the wrapper with torch's signature and behavior.

It translates torch's arguments into `Options` and drives the same engine as `replicate`. Private
names of torch's class that frameworks and tests rely on are in `ddp_private.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import scatter_gather

from gradsync import _torch, arguments, contract
from gradsync.ddp_private import TorchPrivate, _MixedPrecision
from gradsync.errors import InvalidOptionError, UnsuitableModuleError, WrongTypeError
from gradsync.groups import check_group, check_mesh, group_of_mesh, resolve_group
from gradsync.joinable import JoinableReplica, NamedJoin
from gradsync.options import BufferMode, OnDivergence, OnNonFinite, Options, Reduce, TransportChoice, Verify
from gradsync.replica import API, Replica, make_engine

PREFIX = "module."


class DistributedDataParallel(TorchPrivate, JoinableReplica, Replica, nn.Module, Joinable):
    """Wraps a module whose replicas are kept in step; `state_dict` keys get the prefix `module.`.

    All arguments of torch's class have their meaning here. Some are not needed any more:

    - `find_unused_parameters`: left out, parameters may be used or not, on any rank, in any round.
      `False` given explicitly keeps torch's strictness: an unused parameter is an error.
    - `gradient_as_bucket_view`: left out, gradients lie in their buckets, and show it nowhere: each is a
      tensor with a storage of its own. `False` given explicitly copies them to other memory.
    - `static_graph`, `batched_grad_copy`: accepted; the engine learns the graph and copies in batches
      anyway. `skip_all_reduce_unused_params`: what is unused may change, and differ between ranks.

    The keyword-only arguments are gradsync's own; see `gradsync.Options`.

    Attributes of the wrapped module can be read through the wrapper. A copy (`copy.deepcopy`) is a
    working replica of its own over the same group.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool | None = None,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduce: Reduce = "mean",
        buffers: BufferMode | None = None,
        buffers_from: int = 0,
        transport: TransportChoice = "auto",
        verify: Verify = "auto",
        on_divergence: OnDivergence = "raise",
        on_nonfinite: OnNonFinite = "ignore",
        share_parameters: bool = False,
    ) -> None:
        arguments.module(module, "DistributedDataParallel", "For several modules use gradsync.replicate([...]).")
        super().__init__()
        if process_group is not None and device_mesh is not None:
            raise InvalidOptionError(
                "Cannot specify both process_group and device_mesh arguments. Pass the one whose ranks you mean."
            )
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        delayed = _delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        if process_group is not None:
            check_group("process_group", process_group)
        if device_mesh is not None:
            check_mesh("device_mesh", device_mesh)
        _check_trainable(module, self._module_parameters)
        forward_sync, init_sync_buffers = _buffer_arguments(broadcast_buffers, forward_sync_buffers)
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )

        self.module = module
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self.device_ids, self.output_device = self._devices(device_ids, output_device)
        self.dim = arguments.integer("dim", dim)
        self.require_forward_param_sync = True
        self.find_unused_parameters = bool(find_unused_parameters)
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.batched_grad_copy = arguments.flag("batched_grad_copy", batched_grad_copy)
        self.skip_all_reduce_unused_params = arguments.flag(
            "skip_all_reduce_unused_params", skip_all_reduce_unused_params
        )
        self.static_graph = False
        self.mixed_precision = _as_ours(mixed_precision)
        options = Options(
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,  # type: ignore[arg-type]  # made a tuple there
            gradient_as_bucket_view=True if gradient_as_bucket_view is None else gradient_as_bucket_view,
            buffers=("round" if forward_sync else "never") if buffers is None else buffers,
            buffers_from=buffers_from,
            reduce=reduce,
            init_sync="broadcast" if arguments.flag("init_sync", init_sync) else "none",
            init_sync_buffers=init_sync_buffers,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            transport=transport,
            verify=verify,
            on_divergence=on_divergence,
            on_nonfinite=on_nonfinite,
            share_parameters=share_parameters,
            delayed=delayed[0],
            delayed_until=delayed[1],
        )
        names = {name for name, _ in module.named_parameters()} - self.parameters_to_ignore
        options.check_names(names)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            process_group = group_of_mesh(device_mesh)
        group = resolve_group(process_group, self.device_type)
        options.check_ranks(group.size())
        if self.mixed_precision is not None:
            self.mixed_precision.cast_buffers(module, self.parameters_to_ignore)
        self._connect(group, options)
        if static_graph:
            self._set_static_graph()

    def _connect(self, group: dist.ProcessGroup, options: Options, alone: bool = False) -> None:
        self.process_group = group
        ignored = frozenset(self.parameters_to_ignore)
        policy = None if self.mixed_precision is None else self.mixed_precision.policy()
        engine = make_engine([self.module], group, options, ignored, policy, copied=alone, is_wrapped=True)
        contract.enrol(self, API, engine)
        # The wrapped module may live on without us, and must then be an ordinary module again.
        weakref.finalize(self, engine.disarm)
        self._init_private(options)

    # --- training ----------------------------------------------------------------------------------

    @_torch.frame_outside_of_graphs
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        engine = self._engine
        self._before_forward()
        try:
            if self.device_ids:
                moved_inputs, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
                inputs, kwargs = moved_inputs[0], moved_kwargs[0]
            inputs, kwargs = engine.policy.cast_inputs(inputs, kwargs)
            output = _torch.call(self.module, self.module, inputs, kwargs)
        except BaseException:
            engine.end_forward()
            raise
        engine.after_forward(output)
        return output

    @_torch.outside_of_graphs
    def _before_forward(self) -> None:
        with self._errors_noted():
            self._engine.before_forward()

    # --- uneven inputs -----------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs; see `gradsync.uneven` for a simpler way.

        Ranks without inputs shadow the others' rounds. Gradients are divided by the number of all ranks, or, with
        `divide_by_initial_world_size=False`, of those that still have inputs.
        """
        return NamedJoin(
            self, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def change_process_group(self, group: dist.ProcessGroup) -> None:
        super().change_process_group(group)
        self.process_group = group

    # --- flags -------------------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards synchronize; frameworks set it, people use `no_sync`."""
        return self._engine.synchronizing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, flag: bool) -> None:
        self._engine.synchronize(flag)

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are kept in step. May be set between rounds, on all ranks alike."""
        return self._engine.options.buffers != "never"

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, flag: bool) -> None:
        if flag != self.forward_sync_buffers:
            self._engine.keep_buffers("round" if flag else "never")

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name for `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, flag: bool) -> None:
        self.forward_sync_buffers = flag

    def will_sync_module_buffers(self) -> bool:
        """Whether there are buffers to keep in step."""
        return self.forward_sync_buffers and bool(self._engine.buffers.named())

    # --- inputs and outputs across devices ---------------------------------------------------------

    def _devices(
        self, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
    ) -> tuple[list[int] | None, int | None]:
        cure = "Leave it out, or pass the one device of this process: [0]."
        device_ids = arguments.items("device_ids", device_ids, (int, str, torch.device), cure)
        if len(device_ids) > 1:
            raise InvalidOptionError(
                f"device_ids can only be None or contain a single element, but got {list(device_ids)}. "
                "Start one process for each device."
            )
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                devices = {p.device for p in self._module_parameters}
                raise InvalidOptionError(
                    "DistributedDataParallel device_ids and output_device arguments only work with "
                    "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                    f"{device_ids}, output_device {output_device}, and module parameters {devices}. "
                    "Leave both out."
                )
            return None, None
        first = _torch.device_index(device_ids[0])
        return [first], first if output_device is None else _torch.device_index(output_device)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_gather.scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    @_torch.outside_of_graphs
    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs with their tensors on the given device."""
        return _torch.to_kwargs(inputs, kwargs, torch.device(self.device_type, device_id))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return scatter_gather.gather(outputs, output_device, dim=self.dim)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        super().train(mode)
        return self

    # --- saving, loading, copying ------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads keys with the prefix `module.`, as this class saves them, and without it."""
        self._engine.managed.compute_parameters.to_registered()
        own = set(self.state_dict().keys())
        prefixed = {PREFIX + key: value for key, value in state_dict.items()}
        if len(own & prefixed.keys()) > len(own & state_dict.keys()):
            state_dict = prefixed
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        left_out = {*_torch.composable_keys(), "process_group", "device_mesh"}
        state = {key: value for key, value in self.__dict__.items() if key not in left_out}
        return {**state, "_saved_options": self._engine.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loaded from a file: over the default group, without communication."""
        options = dataclasses.replace(state.pop("_saved_options"), init_sync="none", transport="auto")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect(resolve_group(None, self.device_type), options, alone=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        state = self.__getstate__()
        options = dataclasses.replace(state.pop("_saved_options"), init_sync="none", transport="auto")
        nn.Module.__setstate__(duplicate, {key: copy.deepcopy(value, memo) for key, value in state.items()})
        duplicate._connect(self.process_group, options, alone=True)
        return duplicate

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}) or not hasattr(self.module, name):
                raise
            return getattr(self.module, name)


# Registered, not a base, of which nothing would be wanted but the name: frameworks, and torch's checkpoints and
# pipelines, ask for the class before they unwrap a model or treat its micro-batches.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)


def _as_ours(mixed_precision: Any) -> _MixedPrecision | None:
    """torch's own class works as well."""
    if mixed_precision is None or isinstance(mixed_precision, _MixedPrecision):
        return mixed_precision
    every = [field.name for field in dataclasses.fields(_MixedPrecision)]
    names = [name for name in every if name.endswith("_dtype") or hasattr(mixed_precision, name)]
    cure = "Leave it out, or pass torch's own, of torch.nn.parallel.distributed."
    return _MixedPrecision(**arguments.policy("mixed_precision", mixed_precision, "_MixedPrecision", names, cure))


def _check_trainable(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    if not any(p.requires_grad for p in parameters):
        raise UnsuitableModuleError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
            f"gradient, and this {type(module).__name__} has none. Use the module itself."
        )


def _buffer_arguments(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are kept in step, and whether they are broadcast at construction."""
    for name, given in (("broadcast_buffers", broadcast_buffers), ("forward_sync_buffers", forward_sync_buffers)):
        if given is not None:
            arguments.flag(name, given)
    if broadcast_buffers is not None:
        and_both = ", and its value is ignored when `forward_sync_buffers` is provided" * (
            forward_sync_buffers is not None
        )
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which at construction still "
            f"broadcasts buffers once{and_both}.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    both = broadcast_buffers is not False
    return both, both


def _delayed(
    module: nn.Module, named: Iterable[tuple[str, nn.Parameter]] | None, until: nn.Parameter | None
) -> tuple[tuple[str, ...], str | None]:
    if (named is None) != (until is None):
        raise InvalidOptionError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    if named is None:
        return (), None
    anchor = next((name for name, parameter in module.named_parameters() if parameter is until), None)
    if anchor is None:
        raise InvalidOptionError("param_to_hook_all_reduce must be a parameter of the module, and is not.")
    names = []
    for pair in named:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise WrongTypeError(
                "delay_all_reduce_named_params must be pairs (name, parameter), as module.named_parameters() gives "
                f"them, but there is {arguments.shown(pair)} in it."
            )
        names.append(pair[0])
    return tuple(names), anchor if names else None
