"""One replicated module's life: made, stepped through rounds, taken apart.

The engine owns the parts and connects them to the module; it has no algorithm of its own. Both
fronts, `replicate` and `DistributedDataParallel`, make one of these and add nothing to it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from gradsync import _torch, arguments
from gradsync.engine import without_backward
from gradsync.engine.backward import Backward
from gradsync.engine.buffers import BufferHook, BufferHookLocation, Buffers
from gradsync.engine.form import Form
from gradsync.engine.outputs import check_local, tensors_in
from gradsync.engine.reducer import About, Reducer
from gradsync.engine.roster import Roster
from gradsync.engine.sparse_rows import check_rows
from gradsync.engine.uneven import Joining
from gradsync.errors import (
    HookError,
    InvalidOptionError,
    NoProcessGroupError,
    RosterChangedError,
    UnfinishedRoundError,
)
from gradsync.events import Event, Recorder
from gradsync.guard import replicas, unsynchronised
from gradsync.guard.replicas import Comparison
from gradsync.guard.start import Beginnings, check_layers, check_module, check_same_model, check_same_values
from gradsync.hooks.comm_hook import Hook, check_hook, name_of
from gradsync.hooks.optimizer_overlap import Stepper, TorchsInBackward
from gradsync.hooks.quantisation import stand_in
from gradsync.observe.statistics import Statistics
from gradsync.options import Buffers as BufferMode
from gradsync.options import Options
from gradsync.transport.base import Transport

_serials = itertools.count()
_beginnings = Beginnings()
# Options that ranks may set differently: what is sent and what becomes of it is the same.
_HARMLESS = frozenset({"transport", "gradient_as_bucket_view", "static_graph", "verify"})
# Those that mean something only when the replica is made. A copy has other ones.
_AT_START = frozenset({"init_sync", "init_sync_buffers"})
_LOCAL_HOOKS = ("post_localSGD_hook", "noop_hook")  # after which replicas differ, as is meant
_HOOK_DECIDES = (
    "weights, and gradsync.uneven(), don't go together with a communication hook: the hook alone decides what becomes "
    "of the gradients. Weigh them in the hook, or use torch's Join."
)
# Which engine has a parameter. Two that reduce the same gradient would take it from each other.
_owners: MutableMapping[Tensor, weakref.ref[Engine]] = WeakTensorKeyDictionary()


def owner_of(parameter: Tensor) -> Engine | None:
    """The engine that reduces this parameter's gradient, if there is one."""
    found = _owners.get(parameter)
    return found() if found is not None else None


class Engine:
    """Keeps the replicas of a module, or of several modules together, in step over `transport`."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        transport: Transport,
        options: Options,
        ignored: frozenset[str] = frozenset(),
        form: Form | None = None,
        left_alone: Iterable[Tensor] = (),
        copied: bool = False,
    ) -> None:
        """`ignored`: names inside the modules; `left_alone`: parameters outside of them, of which nobody is warned;
        `copied`: from another replica, so that all ranks hold the same without a word.
        """
        with transport.starting():
            self._make(modules, transport, options, ignored, form, left_alone, copied)

    def _make(
        self,
        modules: Sequence[nn.Module],
        transport: Transport,
        options: Options,
        ignored: frozenset[str],
        form: Form | None,
        left_alone: Iterable[Tensor],
        copied: bool,
    ) -> None:
        self.modules = list(modules)
        self.module = self.modules[0]
        self.transport = transport
        self.options = options
        self.ignored = ignored
        self.form = form or Form()
        self.statistics = Statistics(transport=f"{transport.name}: {transport.reason}")
        for module in self.modules:
            check_module({n: p for n, p in module.named_parameters() if n not in ignored})
            check_layers(module)
        self.roster = Roster(self.modules, ignored, self.form)
        self.buffers = Buffers(self.modules, transport, options, ignored)
        self.spares_evaluation = False
        """Set for a wrapper: a backward through the wrapped module itself, in eval mode, is no round. One
        rank may look at gradients alone; should it step on them, the guard speaks up."""
        self.input_device: torch.device | None = None
        """Where inputs are moved to; None: nowhere."""
        self.group: Any = None
        """The process group that the front was given. The transport may have one of its own with the same ranks."""
        self.left_out = False
        """The others have gone on over a group without this rank: rounds here would wait for them in vain."""
        self.joining: Joining | None = None
        """Inside a `Join` context of torch's: who tells ranks without data of our rounds."""
        self.counts_without_data = True
        """Inside one: whether ranks without data count in the mean."""
        self.final_source = 0
        """The rank whose model all took over at the end of a `Join` context."""
        self._left_alone: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._left_alone.update(dict.fromkeys(left_alone))
        self._verify = options.verify_mode()
        self._apart = False  # replicas differ on purpose
        self._copied = copied
        self._set_by_hand: dict[str, str] = {}  # hooks and the like, as they are compared between ranks
        self._settings = self._list_settings()
        serial, begun_alike = self._start()
        about = About(type(self.module).__name__, serial, self._settings, self._describe, self._agreed_on, begun_alike)
        self.reducer = Reducer(self.roster.managed(), transport, options, about)
        self._compare()
        self.recorders: list[Recorder] = [self.statistics.record]
        self.reducer.recorder = self._record
        self.reducer.at_open = self._round_opens
        self.reducer.at_close = self._round_closes
        self._looked_for_optimizers = False
        self._backward = Backward(at_end=self._backward_ended)
        self._contexts: set[int] = set()
        self._superseded = False
        self._claim()

    # --- a step, as the fronts drive it ----------------------------------------------------------

    def before_forward(self, inputs: object = ()) -> None:
        if self._superseded:  # by another wrapper of the same module; now it is our turn again
            self._claim()
            self.reducer.replace(self.roster.managed())
        if _torch.current_graph_task() != _torch.NO_GRAPH_TASK:  # a recomputation inside backward
            if self.roster.faces:
                self._backward.enter()
            self.roster.faces.begin_forward(recomputed=True)
            return
        if not self._looked_for_optimizers:  # torch's way to have optimizers in backward comes after wrapping
            self._looked_for_optimizers = True
            self.reducer.stepper = self.reducer.stepper or TorchsInBackward.found_on(self.reducer.parameters)
        self.reducer.forward_begins()
        if not self.reducer.forked:  # a child evaluates with the buffers that the rank had
            self.buffers.before_forward()
        if self.joining is not None:
            self.joining.forward_begins()
        if self.roster.faces:
            renewed = self.roster.renew_faces(inputs)
            if self.form.mesh is not None and (names := self.roster.new_names()):
                raise RosterChangedError(
                    f"rank {self.transport.rank}: parameters of a module that is replicated over a mesh were added or "
                    f"renamed: {', '.join(map(repr, names[:5]))}. Change the module before replicating it, after "
                    "gradsync.unreplicate(module), or replicate it over a process group instead."
                )
            if renewed and self.reducer.plan is None:
                self._claim()
                self.reducer.replace(self.roster.managed())  # later only when all ranks say so
        self.roster.faces.begin_forward(recomputed=False)

    def prepare_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs on the module's device, and in the dtype in which it computes."""
        if self.input_device is not None:
            (args, *_), (kwargs, *_) = _torch.to_kwargs(args, kwargs, self.input_device)
        return self.form.cast_inputs(args, kwargs)

    def after_forward(self, output: object) -> None:
        """Puts a hook on the outputs: backward passes it first, in the outermost backward."""
        _torch.leave_to_python()
        hooked = False
        try:
            if not self.reducer.forked:
                self.buffers.after_forward()
            hooked = self._hook_outputs(output)
        finally:
            self.end_forward(hooked)

    def end_forward(self, backward_follows: bool = False) -> None:
        """The same for a forward that has raised."""
        inside_backward = _torch.current_graph_task() != _torch.NO_GRAPH_TASK
        self.roster.faces.end_forward(backward_follows or inside_backward)

    def _hook_outputs(self, output: object) -> bool:
        """Whether there is any that a backward may begin with."""
        hooked = False
        if torch.is_grad_enabled() and not _torch.inside_transform():
            context = _torch.distributed_autograd_context()
            reached = self._output_reached if context is None else partial(self._distributed_output_reached, context)
            if context is not None:
                check_local(output)
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(reached)
                    hooked = True
        return hooked

    def _output_reached(self, gradient: Tensor) -> None:
        if self.roster.faces and not _torch.another_half_follows():
            self._backward.enter()
        if _torch.splits_backward():
            self._split_begins()
        self.reducer.output_reached()

    def _split_begins(self) -> None:
        if self.roster.faces.hidden:
            raise UnfinishedRoundError(
                f"rank {self.transport.rank}: a pipeline splits a backward of {type(self.module).__name__} after "
                "another backward, or reshard(), has put its registered parameters back. The half of the weights would "
                "miss those that compute. Keep full and split backwards apart, or replicate over a "
                "process_group instead of a mesh, and without a precision policy."
            )
        self.reducer.split_begins()
        self.roster.faces.take_back()

    def _distributed_output_reached(self, context: int, gradient: Tensor) -> None:
        """A backward of torch's RPC: it leaves gradients in its context, where they are reduced at its end."""
        if self.synchronising and context not in self._contexts:
            self._contexts.add(context)
            _torch.at_end_of_backward(partial(self._distributed_backward_ended, context))

    def _distributed_backward_ended(self, context: int) -> None:
        self._contexts.discard(context)
        found = _torch.distributed_gradients(context)
        self.agree_on_changes()
        gradients = [found.get(parameter) for parameter in self.reducer.parameters]
        without_backward.synchronise_tensors(self.reducer, gradients)

    def _backward_ended(self) -> None:
        """The outermost backward, with or without synchronisation, is over."""
        self._backward.forget()
        if self.reducer.split:  # second halves follow, which look for the parameters that compute and for their `.grad`
            return
        self.roster.faces.collect()
        self.roster.faces.end_backward()

    # --- what the fronts offer -------------------------------------------------------------------

    @property
    def synchronising(self) -> bool:
        return self.reducer.synchronising

    @synchronising.setter
    def synchronising(self, flag: bool) -> None:
        self.reducer.synchronise(arguments.flag("whether gradients are synchronized", flag))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.synchronising
        self.synchronising = False
        try:
            yield
        finally:
            self.synchronising = before

    def set_round_weight(self, weight: float) -> None:
        weight = arguments.number("a round's weight", weight)
        if not 0 <= weight < float("inf"):
            raise InvalidOptionError(f"a round's weight must be a finite number from 0 on, but is {weight}")
        if self.options.reduce != "mean":
            raise InvalidOptionError(f"weights are for reduce='mean'; here it is {self.options.reduce!r}")
        delivery = self.reducer.delivery
        if delivery.hook is not None:
            raise InvalidOptionError(_HOOK_DECIDES)
        delivery.weight = weight if delivery.usual_weight else 0.0

    def skip_round(self) -> None:
        """This rank takes part in the round of the others with nothing, and gets what they have."""
        self.reducer.close_round()
        self._backward_ended()

    def ready_to_skip(self) -> None:
        self.reducer.ready_to_skip(self._round_opens)

    def sit_out(self, flag: bool | None) -> None:
        """Inside `gradsync.uneven`: whether this rank has run out of data, and counts for nothing. None: outside."""
        if flag is not None and self.reducer.delivery.hook is not None:
            raise InvalidOptionError(_HOOK_DECIDES)
        self.buffers.joined = flag
        self.reducer.delivery.usual_weight = self.reducer.delivery.weight = 0.0 if flag else 1.0

    def join(self, joining: Joining | None) -> None:
        """Enters a `Join` context of torch's, or leaves it."""
        if self.joining is not None:
            self.joining.left()
        self.joining = joining
        self.buffers.joined = None if joining is None else False
        self.reducer.forget_steps()  # ranks without data take none

    def synchronise_now(self) -> None:
        """A round without a backward."""
        self.reducer.forward_begins()
        if self._round_opens(passed_output=True):
            without_backward.synchronise_now(self.reducer)
            self.roster.faces.end_backward()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        check_hook(hook)
        if "communication hook" in self._set_by_hand:
            raise HookError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.reduce_by(stand_in(hook), state)
        self.statistics.hook = name_of(hook)
        self._was_set("communication hook", f"{name_of(hook)} ({type(state).__name__})")
        if name_of(hook) in _LOCAL_HOOKS:
            self.trained_alone()

    def set_divide_factor(self, factor: float) -> None:
        factor = arguments.number("a divide factor", factor)
        if not 0 < factor < float("inf"):
            raise InvalidOptionError(f"a divide factor must be a finite number above 0, but is {factor}")
        self.reducer.divide_by(factor)
        self._was_set("gradient divide factor", repr(factor))

    def register_buffer_hook(self, state: object, hook: BufferHook, location: BufferHookLocation) -> None:
        self.buffers.register_hook(state, hook, location)
        self._was_set("buffer hook", f"{name_of(hook)} ({location.name})")

    def keep_buffers(self, how: BufferMode) -> None:
        """From the next round on; all ranks must say the same before it."""
        self.options = self.reducer.options = self.buffers.options = replace(self.options, buffers=how)
        self._settings = self._list_settings()

    def overlap_optimizer(self, stepper: Stepper) -> None:
        if self.reducer.stepper is not None:
            raise HookError("an optimizer steps in this module's backward already; there can be one")
        self.reducer.stepper = stepper
        self._was_set("optimizer in backward", type(stepper).__name__)

    def know_sparse_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Which rows of sparse gradients any rank will use, by the parameters' names."""
        self.reducer.known_rows = check_rows(rows, {spec.name: spec for spec in self.reducer.specs})

    def change_group(self, group: Any, transport: Transport) -> None:
        """Between rounds: goes on over another group. A `Join` context that was left by an exception ends with this."""
        self.join(None)
        self.reducer.move_to(transport)
        self.group, self.transport, self.buffers.transport = group, transport, transport
        self._compare(anew=True)
        self.statistics.transport = f"{transport.name}: {transport.reason}"
        self.left_out = False

    def leave_out(self) -> None:
        """The others go on over a group without this rank. What a backward that raised has left ends here too."""
        self.join(None)
        self.reducer.leave()
        self.left_out = True

    def broadcast_from(self, source: int) -> None:
        """Parameters and buffers of one rank for all."""
        parameters = [_torch.local(entry.parameter).detach() for entry in self.roster.entries]
        self.transport.broadcast(parameters, source)
        if self.options.buffers != "never":
            self.transport.broadcast([buffer for _, buffer in self.buffers.named()], source)

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
            names.update({entry.parameter: entry.name for entry in self.roster.entries})
            state, numbers = replicas.optimizer_state(optimizer, names)
            tensors |= state
        replicas.compare(tensors, numbers, self.transport)
        self._apart = False
        self._compare()

    def trained_alone(self) -> None:
        """Replicas differ on purpose from now on: nobody compares them until `verify` finds them equal."""
        if not self._apart:
            self._apart = True
            self._compare()

    def unmanaged(self) -> dict[int, str]:
        """Names, by their ids, of parameters inside the modules that are not managed now, and not ignored."""
        managed = set(map(id, [*self.reducer.parameters, *self.reducer.computing]))
        return {id(parameter): name for name, parameter in self.roster.not_ignored() if id(parameter) not in managed}

    def known(self) -> set[int]:
        """Ids of all parameters that are managed here, or that it was told to leave alone."""
        inside = {id(parameter) for module in self.modules for parameter in module.parameters()}
        registered = {id(entry.parameter) for entry in self.roster.entries}
        return inside | registered | {id(parameter) for parameter in self._left_alone}

    def _compare(self, anew: bool = False) -> None:
        """From now on each round compares some of the present parameters; `anew`: with other ranks."""
        tensors = self._compared()
        before = None if anew else self.reducer.comparison
        alone = self.transport.size == 1 or not tensors
        self.reducer.comparison = None if alone else Comparison(tensors, self._verify, self._apart, before)

    def _compared(self) -> dict[str, Tensor]:
        return {entry.name: entry.parameter for entry in self.roster.entries}

    def _was_set(self, name: str, value: str) -> None:
        """What all ranks have to set alike: compared before the next round."""
        self._set_by_hand[name] = value
        self._settings = self._list_settings()

    def _list_settings(self, at_start: bool = False) -> str:
        """What all ranks must have set alike, a line for each."""
        left_out = _HARMLESS if at_start else _HARMLESS | _AT_START
        rows = {
            field.name: repr(getattr(self.options, field.name))
            for field in fields(self.options)
            if field.name not in left_out
        }
        rows["verify"] = repr(self._verify)
        if self.form != Form():
            rows |= self.form.settings()
        return "\n".join(f"{name}: {value}" for name, value in (rows | self._set_by_hand).items())

    def promise_static_graph(self) -> None:
        self.options = self.reducer.options = replace(self.options, static_graph=True)

    def disarm(self) -> None:
        """Leaves the module as if it had never been replicated."""
        self.roster.faces.to_registered()
        self.reducer.disarm()
        unsynchronised.unwatch(self)

    def _claim(self) -> None:
        """Takes the managed parameters over from any engine that had them."""
        self._superseded = False
        for one in self.roster.managed():
            before = _owners.get(one.computing)
            owner = before() if before is not None else None
            if owner is not None and owner is not self:
                owner._superseded = True
                owner.disarm()
            _owners[one.computing] = weakref.ref(self)
        unsynchronised.watch(self)

    # --- inside ----------------------------------------------------------------------------------

    def _record(self, event: Event) -> None:
        for recorder in self.recorders:
            recorder(event)

    def _start(self) -> tuple[int, bool]:
        """All ranks begin with rank 0's values, after it is certain that they hold the same model.

        Gives a number for this module that all ranks have for it, and whether all held the same values.
        """
        serial = next(_serials)
        if self.options.init_sync == "none":
            return serial, self._copied  # the ranks compare in their first round
        parameters = {entry.name: _torch.local(entry.parameter) for entry in self.roster.entries}
        buffers = dict(self.buffers.named())
        agreed = check_same_model(parameters, buffers, self._list_settings(at_start=True), self.transport, serial)
        alike = len(set(agreed.values)) == 1
        if self.options.init_sync == "check":
            check_same_values({**parameters, **buffers}, self.transport)
            return agreed.serial, alike
        _beginnings.add(self.module, agreed.model, agreed.values, self.transport.rank)
        self.transport.broadcast([p.detach() for p in parameters.values()], source=0)
        if self.options.init_sync_buffers:
            self.transport.broadcast(list(buffers.values()), source=0)
        return agreed.serial, alike

    def _round_opens(self, passed_output: bool) -> bool:
        """Whether a backward that begins is a round; sees to changed parameters before it is."""
        if self._superseded or (self.spares_evaluation and not passed_output and not self.module.training):
            return False
        if self.left_out:
            raise NoProcessGroupError(
                f"rank {self.transport.rank}: {type(self.module).__name__} was moved to a process group that this rank "
                "is not in, so that a backward here would wait for ranks that have left. Sit this phase out, or move "
                "the module to a group with this rank, on all of its ranks."
            )
        if self.roster.faces and _torch.current_graph_task() != _torch.NO_GRAPH_TASK:
            self._backward.enter()  # perhaps no output was passed
        self.agree_on_changes()
        if self.joining is not None:
            self.joining.round_opens()
        return True

    def agree_on_changes(self) -> None:
        """Before a round: what this rank has set or changed since the one before, all ranks must have."""
        changed = self.roster.changed(doubt=not self.reducer.arrivals.as_expected)
        changed = changed and self.roster.refresh()  # not if somebody attached something without parameters
        differs = self.buffers.changed() or changed
        self.reducer.confirm(self._settings, self._describe() if differs else "")
        if changed:
            self._claim()
            self.reducer.replace(self.roster.managed())
            self._compare()
        elif differs:
            self.buffers.agreed()

    def _describe(self) -> str:
        return f"{self.roster.describe()}\n{self.buffers.describe(with_values=self.roster.unsettled)}"

    def _agreed_on(self) -> None:
        self.roster.agreed()
        self.buffers.agreed()

    def _round_closes(self) -> None:
        if self.reducer.stepper is not None:
            self.reducer.stepper.round_closed(self.transport)
        self.buffers.round_closed()
        if self.joining is not None:
            self.joining.round_closed()
