"""One replicated module's life: how it is made, and what the fronts offer. The training step itself is in `step.py`.

Both fronts, `replicate` and `DistributedDataParallel`, make one of these and add nothing to it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from gradsync import _torch, arguments
from gradsync.engine import without_backward
from gradsync.engine.backward import arm_before
from gradsync.engine.buffers import BufferHook, BufferHookLocation, Buffers
from gradsync.engine.lockstep import Lockstep
from gradsync.engine.managed_parameters import ManagedParameters
from gradsync.engine.module_names import named_parameters
from gradsync.engine.module_state import ModuleState, Settings
from gradsync.engine.parameter_policy import ParameterPolicy
from gradsync.engine.reducer import Reducer
from gradsync.engine.shard_sums import ShardSums
from gradsync.engine.sharded_step import ShardedStep
from gradsync.engine.shared_parameters import SharedParameters
from gradsync.engine.sparse_rows import check_rows
from gradsync.engine.step import TrainingStep
from gradsync.engine.uneven import Joining
from gradsync.errors import (
    HookError,
    InvalidOptionError,
    ShardsError,
)
from gradsync.guard import replicas
from gradsync.guard.start import Beginnings, check_layers, check_module, check_same_model, check_same_values
from gradsync.hooks.comm_hook import Hook, check_hook, name_of
from gradsync.hooks.optimizer_overlap import ShareStepper, Stepper
from gradsync.hooks.quantization import stand_in
from gradsync.observe.statistics import Statistics
from gradsync.observe.wait_recorder import WaitRecorder
from gradsync.options import BufferMode, Options
from gradsync.transport.base import Transport

_serials = itertools.count()
_beginnings = Beginnings()
_LOCAL_HOOKS = ("post_localSGD_hook", "noop_hook")  # after which replicas differ, as is meant
_HOOK_DECIDES = (
    "weights, and gradsync.uneven(), don't go together with a communication hook: the hook alone decides what becomes "
    "of the gradients. Weigh them in the hook, or use torch's Join."
)
_SEND_LESS = (
    "Leave it out; to send less, replicate with mp_policy=gradsync.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)."
)


class Engine(TrainingStep):
    """Keeps the replicas of a module, or of several modules together, in step over `transport`."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        transport: Transport,
        options: Options,
        ignored: frozenset[str] = frozenset(),
        policy: ParameterPolicy | None = None,
        *,
        group: Any = None,
        input_device: torch.device | None = None,
        left_alone: Iterable[Tensor] = (),
        copied: bool = False,
        is_wrapped: bool = False,
    ) -> None:
        """`ignored`: names inside the modules; `group`: the process group that the front was given, of whose ranks the
        transport may have connections of its own; `input_device`: where inputs are moved to, if anywhere;
        `left_alone`: parameters outside of the modules, of which nobody is warned; `copied`: from another replica, so
        that all ranks hold the same without a word; `is_wrapped`: forwards come through a wrapper, and a backward
        through the module itself, in eval mode, is no round: one rank may look at gradients alone.
        """
        modules, policy = list(modules), policy or ParameterPolicy()
        with transport.starting():
            for module in modules:
                check_layers(module)
            check_module({name: one for name, one in named_parameters(modules) if name not in ignored})
            managed = ManagedParameters(modules, ignored, policy)
            buffers = Buffers(modules, transport, options, ignored)
            settings, state = Settings(options, policy), ModuleState(managed, buffers)
            serial, begun_alike = _start(modules[0], managed, buffers, options, settings, transport, copied)
            lockstep = Lockstep(type(modules[0]).__name__, state, serial, settings.described, begun_alike)
            reducer = Reducer(managed.managed(), transport, options, lockstep)
            super().__init__(
                modules,
                transport,
                policy,
                managed,
                buffers,
                state,
                settings,
                reducer,
                group=group,
                input_device=input_device,
                left_alone=left_alone,
                is_wrapped=is_wrapped,
                graph_cap=max(options.bucket_caps()),
            )
        self.options, self.ignored = options, ignored
        self.shared: SharedParameters | None = None
        """Where the parameters lie, if the ranks of a host have them once."""
        if options.share_parameters:
            if policy != ParameterPolicy():
                raise InvalidOptionError(
                    "share_parameters=True does not go together with a mesh, or with a precision or offload policy: "
                    "then parameters compute as other tensors, of which each rank has its own. Leave one of them out."
                )
            self.shared = SharedParameters(managed, transport)
            reducer.configure(shared=self.shared)
        self.statistics = Statistics(module=type(modules[0]).__name__)
        self.statistics.moved_to(transport.name, transport.reason, transport.rank, transport.size)
        self.add_recorder(self.statistics.record)
        self._waits: WaitRecorder | None = None
        self._record_waits()
        self._shards: ShardSums | None = None
        self.counts_without_data = True
        """Inside a `Join` context: whether ranks without data count in the mean."""
        self.final_source = 0
        """The rank whose model all took over at the end of a `Join` context."""

    # --- what the fronts offer -------------------------------------------------------------------

    @property
    def synchronizing(self) -> bool:
        """Whether backwards that begin from now on are rounds, or only accumulate."""
        return self.reducer.wanted

    def synchronize(self, flag: bool) -> None:
        self.reducer.synchronize(arguments.flag("whether gradients are synchronized", flag))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.synchronizing
        self.synchronize(False)
        try:
            yield
        finally:
            self.synchronize(before)

    def set_round_weight(self, weight: float) -> None:
        weight = arguments.number("a round's weight", weight)
        if not 0 <= weight < float("inf"):
            raise InvalidOptionError(f"a round's weight must be a finite number from 0 on, but is {weight}")
        if self.options.reduce != "mean":
            raise InvalidOptionError(f"weights are for reduce='mean'; here it is {self.options.reduce!r}")
        if self.reducer.hooked:
            raise InvalidOptionError(_HOOK_DECIDES)
        if self._shards is not None:
            self._shards.weigh(self.transport.rank, weight)
            return
        self.reducer.rescale(weight=weight if self.reducer.config.scaling.usual_weight else 0.0)

    def set_out_of_data(self, flag: bool | None) -> None:
        """Inside `gradsync.uneven`: whether this rank has run out of data, and counts for nothing. None: outside."""
        if flag is not None and self.reducer.hooked:
            raise InvalidOptionError(_HOOK_DECIDES)
        if flag is not None and self._shards is not None:
            raise ShardsError(
                f"rank {self.transport.rank}: gradsync.uneven() does not go together with gradsync.Shards, whose ranks "
                "don't run out of data: gradsync.data.Loader gives each shard its part of every batch."
            )
        self.buffers.set_out_of_data(flag)
        weight = 0.0 if flag else 1.0
        self.reducer.rescale(weight=weight, usual_weight=weight)

    def join(self, joining: Joining | None) -> None:
        """Enters a `Join` context of torch's, or leaves it."""
        if self.joining is not None:
            self.joining.left()
        self.joining = joining
        self.buffers.set_out_of_data(None if joining is None else False)
        self.reducer.lockstep.forget_steps()  # ranks without data take none

    def shadow_round(self) -> None:
        """On a rank without data, inside such a context: takes part in a round of the others."""
        self.buffers.set_out_of_data(True)
        self._confirm_changes()
        without_backward.shadow(self, counted=self.counts_without_data)

    def count_without_data(self, flag: bool) -> None:
        """Inside one: whether ranks without data count in the mean."""
        self.counts_without_data = flag
        self.statistics.entered_join()

    def end_join(self, source: int) -> None:
        """All ranks take over the model of `source`."""
        self.broadcast_from(source)
        self.final_source = source

    def synchronize_now(self) -> None:
        """A round without a backward."""
        if self.reducer.computes_shards:
            raise ShardsError(
                f"rank {self.transport.rank}: synchronize_gradients() inside a step by shards. What is in `.grad` "
                "behind a shard counts as that shard's; the round comes behind the last one by itself."
            )
        self.abandon_dead()
        self.reducer.forward_begins()
        if self._may_open(passed_output=True):
            without_backward.synchronize_now(self)

    def register_comm_hook(self, state: object, hook: Hook, known_as: str = "") -> None:
        """`known_as`: torch's name for one that is built in."""
        check_hook(hook)
        if self._shards is not None:
            raise ShardsError(
                f"rank {self.transport.rank}: a communication hook does not go together with gradsync.Shards: it adds "
                f"up whole ranks, so that the result depends on how many there are. {_SEND_LESS}"
            )
        if self.reducer.config.share_stepper is not None:
            raise InvalidOptionError(
                f"rank {self.transport.rank}: a communication hook does not go together with overlap_optimizer() and "
                "share_parameters=True: it reduces whole buckets, while each rank gets its share."
            )
        if self._settings.is_set("communication hook"):
            raise HookError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.reduce_by(stand_in(hook), state)
        self._listen()
        self.statistics.hook_registered(known_as or name_of(hook))
        self._settings.set_by_hand("communication hook", f"{name_of(hook)} ({type(state).__name__})")
        if name_of(hook) in _LOCAL_HOOKS:
            self.trained_alone()

    def set_divide_factor(self, factor: float) -> None:
        factor = arguments.number("a divide factor", factor)
        if not 0 < factor < float("inf"):
            raise InvalidOptionError(f"a divide factor must be a finite number above 0, but is {factor}")
        if self._shards is not None:
            raise ShardsError(
                f"rank {self.transport.rank}: set_gradient_divide_factor() does not go together with gradsync.Shards: "
                "the factor would have to depend on the number of ranks. Scale the loss instead."
            )
        self.reducer.divide_by(factor)
        self._listen()
        self._settings.set_by_hand("gradient divide factor", repr(factor))

    def register_buffer_hook(self, state: object, hook: BufferHook, location: BufferHookLocation) -> None:
        self.buffers.register_hook(state, hook, location)
        self._settings.set_by_hand("buffer hook", f"{name_of(hook)} ({location.name})")

    def keep_buffers(self, how: BufferMode) -> None:
        """From the next round on; all ranks must say the same before it."""
        self.options = replace(self.options, buffers=how)
        self.reducer.configure(options=self.options)
        self.buffers.set_options(self.options)
        self._settings.take(self.options)

    def overlap_optimizer(self, stepper: Stepper) -> None:
        self._check_no_stepper()
        self.reducer.configure(stepper=stepper)
        self._settings.set_by_hand("optimizer in backward", type(stepper).__name__)

    def overlap_shares(self, stepper: ShareStepper) -> None:
        """The same for parameters that lie once a host."""
        self._check_no_stepper()
        if self.reducer.hooked:
            raise InvalidOptionError(
                f"rank {self.transport.rank}: overlap_optimizer() with share_parameters=True does not go together with "
                "a communication hook, which reduces whole buckets, while each rank gets its share. Leave one of them "
                "out, or use gradsync.share_optimizer()."
            )
        self.reducer.step_shares_by(stepper)
        self._listen()
        self._settings.set_by_hand("optimizer in backward", type(stepper).__name__)

    def _check_no_stepper(self) -> None:
        if self.reducer.config.steps_in_backward:
            raise HookError("an optimizer steps in this module's backward already; there can be one")

    def add_up_shards(self, shards: int, overlap: bool) -> ShardedStep:
        """From the next round on steps are computed shard by shard: by what this returns; see `Shards`."""
        rank = self.transport.rank
        refused = "does not go together with gradsync.Shards, whose steps must not depend on the number of ranks"
        if self.reducer.hooked:
            raise ShardsError(f"rank {rank}: a communication hook {refused}: it adds up whole ranks. {_SEND_LESS}")
        if self.reducer.config.share_stepper is not None:
            raise ShardsError(
                f"rank {rank}: overlap_optimizer() with share_parameters=True {refused}. "
                "Use gradsync.share_optimizer()."
            )
        if self.reducer.config.scaling.divisor is not None:
            raise ShardsError(f"rank {rank}: set_gradient_divide_factor() {refused}. Scale the loss instead.")
        if self.options.buffers == "never" and self.buffers.named():
            raise ShardsError(
                f"rank {rank}: buffers='never' {refused}: each rank would keep the buffers of its own shards. Leave "
                "the option out: buffers become the mean over the shards."
            )
        self._shards = ShardSums(shards, self.options.reduce == "mean")
        self.reducer.add_up_shards(self._shards)
        self.buffers.leave_to_shards()
        self._settings.set_by_hand("shards", str(shards))
        self._listen()
        return ShardedStep(self, self._shards, overlap)

    def know_sparse_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Which rows of sparse gradients any rank will use, by the parameters' names."""
        known = check_rows(rows, {spec.name: spec for spec in self.reducer.group.specs})
        self.reducer.configure(known_rows=known)

    def show_reduced(self, see: Callable[[Tensor], None]) -> None:
        """`see` looks at each bucket's reduced gradients before they are delivered."""
        self.reducer.configure(see_reduced=see)

    def change_group(self, group: Any, transport: Transport) -> None:
        """Between rounds: goes on over another group. A `Join` context that was left by an exception ends with this."""
        self.join(None)
        self.reducer.move_to(transport)
        self._listen()
        self.process_group, self.transport = group, transport
        self.buffers.move_to(transport)
        self._compare(anew=True)
        self.statistics.moved_to(transport.name, transport.reason, transport.rank, transport.size)
        self._record_waits()
        self._outside = False

    def stay_outside(self) -> None:
        """The others go on over a group without this rank. What a backward that raised has left ends here too."""
        self.join(None)
        self.reducer.leave()
        self._outside = True

    def broadcast_from(self, source: int) -> None:
        """Parameters and buffers of one rank for all."""
        parameters = [_torch.local(entry.parameter).detach() for entry in self.managed.entries]
        self.transport.broadcast(parameters, source)
        if self.options.buffers != "never":
            self.transport.broadcast([buffer for _, buffer in self.buffers.named()], source)

    def _record_waits(self) -> None:
        """From now on ranks hear how long they wait for each other, where hosts wait at all: not for an accelerator."""
        if self._waits is not None:
            self.remove_recorder(self._waits.record)
            self._waits = None
        watch, on_cpu = self.transport.watch, all(one.device.type == "cpu" for one in self.reducer.parameters)
        if watch is None or self.transport.size == 1 or not on_cpu:
            return
        name = type(self.module).__name__
        self._waits = WaitRecorder(self.transport.rank, self.transport.size, name, watch.tell_waits)
        self.add_recorder(self._waits.record)
        self.statistics.hear_waits(watch.heard)

    # --- are the replicas the same? --------------------------------------------------------------

    def verify(self, optimizer: Optimizer | None = None) -> None:
        """Compares all values over all ranks, now; all ranks call this together."""
        self.reducer.check_process()
        tensors = self._compared()
        if self.options.buffers in ("round", "average"):
            tensors |= dict(self.buffers.named())
        numbers: dict[str, object] = {}
        if optimizer is not None:
            names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
            names.update({entry.parameter: entry.name for entry in self.managed.entries})
            state, numbers = replicas.optimizer_state(optimizer, names)
            tensors |= state
        replicas.compare(tensors, numbers, self.transport)
        self._apart = False
        self._compare()

    @contextlib.contextmanager
    def one_writer(self, restores: bool = False) -> Iterator[None]:
        """What the body does to parameters counts once a host; without shared parameters, once a rank as ever."""
        with contextlib.nullcontext() if self.shared is None else self.shared.one_writer(self.transport.rank, restores):
            yield

    def promise_static_graph(self) -> None:
        self.options = replace(self.options, static_graph=True)
        self.reducer.configure(options=self.options)

    def divide_before_arrivals(self) -> Callable[[], object]:
        """Calls `gradient_comes` until the function that it returns is called; for sums it is called anyway."""
        if self.reducer.config.scaling.multiplicity != 1:
            return lambda: None
        return arm_before(self, self.reducer.group.leaves)


def _start(
    module: nn.Module,
    managed: ManagedParameters,
    buffers: Buffers,
    options: Options,
    settings: Settings,
    transport: Transport,
    copied: bool,
) -> tuple[int, bool]:
    """All ranks begin with rank 0's values, after it is certain that they hold the same model.

    Gives a number for this module that all ranks have for it, and whether all held the same values.
    """
    serial = next(_serials)
    if options.init_sync == "none":
        return serial, copied  # the ranks compare in their first round
    parameters = {entry.name: _torch.local(entry.parameter) for entry in managed.entries}
    named = dict(buffers.named())
    agreed = check_same_model(parameters, named, settings.describe_start(), transport, serial)
    alike = len(set(agreed.values)) == 1
    if options.init_sync == "check":
        check_same_values({**parameters, **named}, transport)
        return agreed.serial, alike
    _beginnings.add(module, agreed.model, agreed.values, transport.rank)
    transport.broadcast([p.detach() for p in parameters.values()], source=0)
    if options.init_sync_buffers:
        transport.broadcast(list(named.values()), source=0)
    return agreed.serial, alike
