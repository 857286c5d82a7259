"""One replicated module's life: made, stepped through rounds, taken apart.

The engine owns the parts and connects them to the module; it has no algorithm of its own. Both
fronts, `replicate` and `DistributedDataParallel`, make one of these and add nothing to it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gradsync import _torch
from gradsync.engine import without_backward
from gradsync.engine.backward import Backward
from gradsync.engine.buffers import Buffers
from gradsync.engine.form import Form
from gradsync.engine.outputs import check_local, tensors_in
from gradsync.engine.reducer import Reducer
from gradsync.engine.roster import Roster
from gradsync.engine.sparse_rows import check_rows
from gradsync.engine.uneven import Joining
from gradsync.errors import HookError, InvalidOptionError, NoProcessGroupError, RosterChangedError
from gradsync.events import Event, Recorder
from gradsync.guard import unsynchronised
from gradsync.guard.start import check_layers, check_module, check_same_model, check_same_values, list_differences
from gradsync.hooks.comm_hook import Hook, check_hook, name_of
from gradsync.hooks.optimizer_overlap import Stepper, TorchsInBackward
from gradsync.hooks.quantisation import stand_in
from gradsync.observe.statistics import Statistics
from gradsync.options import Options
from gradsync.transport.base import Transport

_serials = itertools.count()
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
        self._serial = next(_serials)
        self._generation = 0
        self._start()
        self.reducer = Reducer(self.roster.managed(), transport, options)
        self.reducer.serial = self._serial
        self.recorders: list[Recorder] = [self.statistics.record]
        self.reducer.recorder = self._record
        self.reducer.at_open = self._round_opens
        self.reducer.at_close = self._round_closes
        self._looked_for_optimizers = False
        self._backward = Backward(at_end=self._backward_ended)
        self._contexts: set[int] = set()
        self._superseded = False
        self._claim()
        unsynchronised.watch(self.reducer)

    # --- a step, as the fronts drive it ----------------------------------------------------------

    def before_forward(self) -> None:
        if self._superseded:  # by another wrapper of the same module; now it is our turn again
            self._claim()
            self.reducer.replace(self.roster.managed())
        if _torch.current_graph_task() != _torch.NO_GRAPH_TASK:
            return  # a recomputation inside backward
        if not self._looked_for_optimizers:  # torch's way to have optimizers in backward comes after wrapping
            self._looked_for_optimizers = True
            self.reducer.stepper = self.reducer.stepper or TorchsInBackward.found_on(self.reducer.parameters)
        self.reducer.forward_begins()
        if self.roster.faces:
            self.roster.renew_faces()
            self.roster.faces.to_compute()
        self.buffers.before_forward()
        if self.joining is not None:
            self.joining.forward_begins()

    def prepare_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs on the module's device, and in the dtype in which it computes."""
        if self.input_device is not None:
            (args, *_), (kwargs, *_) = _torch.to_kwargs(args, kwargs, self.input_device)
        return self.form.cast_inputs(args, kwargs)

    def after_forward(self, output: object) -> None:
        """Puts a hook on the outputs: backward passes it first, in the outermost backward."""
        self.buffers.after_forward()
        hooked = False
        if torch.is_grad_enabled():
            context = _torch.distributed_autograd_context()
            reached = self._output_reached if context is None else partial(self._distributed_output_reached, context)
            if context is not None:
                check_local(output)
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(reached)
                    hooked = True
        if self.roster.faces and not hooked and _torch.current_graph_task() == _torch.NO_GRAPH_TASK:
            self.roster.faces.to_registered()  # no backward will follow

    def _output_reached(self, gradient: Tensor) -> None:
        if self.roster.faces:
            self._backward.enter()
        self.reducer.output_reached()

    def _distributed_output_reached(self, context: int, gradient: Tensor) -> None:
        """A backward of torch's RPC: it leaves gradients in its context, where they are reduced at its end."""
        if self.synchronising and context not in self._contexts:
            self._contexts.add(context)
            _torch.at_end_of_backward(partial(self._distributed_backward_ended, context))

    def _distributed_backward_ended(self, context: int) -> None:
        self._contexts.discard(context)
        found = _torch.distributed_gradients(context)
        gradients = [found.get(parameter) for parameter in self.reducer.parameters]
        without_backward.synchronise_tensors(self.reducer, gradients)

    def _backward_ended(self) -> None:
        """The outermost backward, with or without synchronisation, is over."""
        self._backward.forget()
        self.roster.faces.collect()
        self.roster.faces.to_registered()

    # --- what the fronts offer -------------------------------------------------------------------

    @property
    def synchronising(self) -> bool:
        return self.reducer.synchronising

    @synchronising.setter
    def synchronising(self, flag: bool) -> None:
        self.reducer.synchronise(flag)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.synchronising
        self.synchronising = False
        try:
            yield
        finally:
            self.synchronising = before

    def set_round_weight(self, weight: float) -> None:
        if not 0 <= weight < float("inf"):
            raise InvalidOptionError(f"a round's weight must be a finite number from 0 on, but is {weight}")
        if self.options.reduce != "mean":
            raise InvalidOptionError(f"weights are for reduce='mean'; here it is {self.options.reduce!r}")
        delivery = self.reducer.delivery
        if delivery.hook is not None:
            raise InvalidOptionError(_HOOK_DECIDES)
        delivery.weight = float(weight) if delivery.usual_weight else 0.0

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

    def synchronise_now(self) -> None:
        """A round without a backward."""
        if self.joining is not None and self.reducer.dirty:
            self.joining.round_opens()
        without_backward.synchronise_now(self.reducer)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        check_hook(hook)
        if self.reducer.delivery.hook is not None:
            raise HookError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.reduce_by(stand_in(hook), state)
        self.statistics.hook = name_of(hook)

    def set_divide_factor(self, factor: float) -> None:
        if not 0 < factor < float("inf"):
            raise InvalidOptionError(f"a divide factor must be a finite number above 0, but is {factor}")
        self.reducer.divide_by(float(factor))

    def overlap_optimizer(self, stepper: Stepper) -> None:
        if self.reducer.stepper is not None:
            raise HookError("an optimizer steps in this module's backward already; there can be one")
        self.reducer.stepper = stepper

    def know_sparse_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Which rows of sparse gradients any rank will use, by the parameters' names."""
        self.reducer.known_rows = check_rows(rows, {spec.name: spec for spec in self.reducer.specs})

    def change_group(self, group: Any, transport: Transport) -> None:
        """Between rounds: goes on over another group. A `Join` context that was left by an exception ends with this."""
        self.join(None)
        self.reducer.move_to(transport)
        self.group, self.transport, self.buffers.transport = group, transport, transport
        self.statistics.transport = f"{transport.name}: {transport.reason}"
        self.left_out = False

    def leave_out(self) -> None:
        """The others go on over a group without this rank. What a backward that raised has left ends here too."""
        self.join(None)
        self.reducer.forward_begins()
        self.left_out = True

    def broadcast_from(self, source: int) -> None:
        """Parameters and buffers of one rank for all."""
        parameters = [_torch.local(entry.parameter).detach() for entry in self.roster.entries]
        self.transport.broadcast(parameters, source)
        if self.options.buffers != "never":
            self.transport.broadcast([buffer for _, buffer in self.buffers.named()], source)

    def promise_static_graph(self) -> None:
        self.options = self.reducer.options = replace(self.options, static_graph=True)

    def disarm(self) -> None:
        """Leaves the module as if it had never been replicated."""
        self.roster.faces.to_registered()
        self.reducer.disarm()

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

    # --- inside ----------------------------------------------------------------------------------

    def _record(self, event: Event) -> None:
        for recorder in self.recorders:
            recorder(event)

    def _start(self) -> None:
        """All ranks begin with rank 0's values, after it is certain that they hold the same model."""
        if self.options.init_sync == "none":
            return
        parameters = {entry.name: _torch.local(entry.parameter) for entry in self.roster.entries}
        buffers = dict(self.buffers.named())
        self._serial = check_same_model(parameters, buffers, self.transport, self._serial)
        if self.options.init_sync == "check":
            check_same_values({**parameters, **buffers}, self.transport)
            return
        self.transport.broadcast([p.detach() for p in parameters.values()], source=0)
        if self.options.init_sync_buffers:
            self.transport.broadcast(list(buffers.values()), source=0)

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
        if self.roster.changed(doubt=not self.reducer.arrivals.as_expected):
            self._agree_on_change()
        if self.joining is not None:
            self.joining.round_opens()
        return True

    def _round_closes(self) -> None:
        if self.reducer.stepper is not None:
            self.reducer.stepper.round_closed(self.transport)
        self.buffers.round_closed()
        if self.joining is not None:
            self.joining.round_closed()

    def _agree_on_change(self) -> None:
        """Managed parameters are others than before: if all ranks say the same, the reducer gets the new ones."""
        before = self.roster.describe()
        replaced = self.roster.refresh(self.transport.rank)
        now = self.roster.describe(with_values=replaced)
        self._generation += 1
        topic = f"roster/{self._serial}/{self._generation}"
        try:
            described = self.transport.agree(topic, now)
        except TimeoutError as silent:
            raise RosterChangedError(
                f"rank {self.transport.rank}: parameters were frozen, unfrozen, converted or replaced here, but "
                f"not on every rank: {silent}. Here:\n{list_differences(before, self.roster.describe(), 'now')}\n"
                "Make the same change on all ranks before the same backward."
            ) from None
        if len(set(described)) > 1:
            other = next(rank for rank, text in enumerate(described) if text != described[0])
            differences = list_differences(described[0], described[other], f"on rank {other}")
            raise RosterChangedError(
                f"rank {self.transport.rank}: parameters were frozen, unfrozen, converted or replaced in different "
                f"ways, or by different values, on different ranks:\n{differences}\n"
                "Make the same change on all ranks."
            )
        self._claim()
        self.reducer.replace(self.roster.managed())
