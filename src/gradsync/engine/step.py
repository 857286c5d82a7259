"""One training step of a replicated module: what its front does around forward, and what autograd tells in backward.

From top to bottom it is a step. It opens rounds; what a round is, is in `round.py`, and that those of one backward end
together in `backward_rounds.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from gradsync import _torch
from gradsync.engine import backward_rounds, without_backward
from gradsync.engine.backward import Backward, accumulates, arm, come_at_once
from gradsync.engine.buffers import Buffers
from gradsync.engine.managed_parameters import ManagedParameters
from gradsync.engine.module_state import Changes, ModuleState, Settings
from gradsync.engine.outputs import check_local, tensors_in
from gradsync.engine.parameter_group import ParameterGroup
from gradsync.engine.parameter_policy import ParameterPolicy
from gradsync.engine.reducer import Reducer
from gradsync.engine.round import Phase, Round
from gradsync.engine.uneven import Joining
from gradsync.errors import (
    NoProcessGroupError,
    ParametersChangedError,
    ReplicaLostError,
    RoundTimeoutError,
    ShardsError,
    UnfinishedRoundError,
    UnsynchronizedStepError,
)
from gradsync.events import Recorder
from gradsync.guard import unsynchronized
from gradsync.guard.replicas import Comparison
from gradsync.observe.ranges import ranged
from gradsync.observe.stopwatch import Stopwatch
from gradsync.transport.base import Transport

_current_backward = _torch.current_graph_task
# Who reduces a parameter's gradient. Two that do would take it from each other.
_owners: MutableMapping[Tensor, weakref.ref[TrainingStep]] = WeakTensorKeyDictionary()


def owner_of(parameter: Tensor) -> TrainingStep | None:
    """Who reduces this parameter's gradient, if anybody does."""
    found = _owners.get(parameter)
    return found() if found is not None else None


class TrainingStep:
    """Of one replicated module, or of several together. `Engine` adds how it is made, and what the fronts offer."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        transport: Transport,
        policy: ParameterPolicy,
        managed: ManagedParameters,
        buffers: Buffers,
        state: ModuleState,
        settings: Settings,
        reducer: Reducer,
        *,
        group: Any,
        input_device: torch.device | None,
        left_alone: Iterable[Tensor],
        is_wrapped: bool,
        graph_cap: int,
    ) -> None:
        """`group`, `input_device`, `left_alone`, `is_wrapped`: see `Engine`; `graph_cap`: where torch.compile splits a
        graph, in bytes of gradients.
        """
        self.process_group = group
        self.modules, self.module = list(modules), modules[0]
        self.transport, self.policy = transport, policy
        self.managed, self.buffers, self.reducer = managed, buffers, reducer
        self.stopwatch = Stopwatch()
        self.joining: Joining | None = None
        """Inside a `Join` context of torch's: who tells ranks without data of our rounds."""
        self._state, self._settings = state, settings
        self._input_device, self._is_wrapped = input_device, is_wrapped
        self._graph_cap = graph_cap
        self._left_alone: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._left_alone.update(dict.fromkeys(left_alone))
        self._recorders: list[Recorder] = []
        self._looked_for_optimizers = False
        self._outside = False  # the others have gone on over a group without this rank
        self._superseded = False  # another replica of the same module has the parameters
        self._apart = False  # replicas differ on purpose
        self._hears_of_losses = True
        self._split_before: list[Any] = []  # by forwards that run: how graphs were split around them
        self._backward = Backward(at_end=self._backward_ended)
        self._not_a_round = _torch.NO_GRAPH_TASK  # a backward that was found to be none
        self._timed = _torch.NO_GRAPH_TASK  # the latest of those
        self.backwards = 0
        """How many have passed outputs of the module, with or without synchronization."""
        self._rpc_contexts: set[int] = set()
        self._listening: tuple[ParameterGroup, Callable[[], object]] | None = None
        self._turn = threading.RLock()  # autograd has a thread for each device, and all of them come here
        self._compare()
        self._claim()
        self._listen()
        backward_rounds.made(self)

    def hear_of_losses(self, flag: bool) -> None:
        """Whether a forward, and an optimizer's step, raise if a rank is lost. A round does so in any case."""
        self._hears_of_losses = flag

    def check_alive(self) -> None:
        if self._hears_of_losses:
            self.transport.check_alive()

    # --- a step by shards -----------------------------------------------------------------------------

    def before_shards(self) -> None:
        """What a forward and the round behind it would see to, before the first shard of a step begins."""
        if self._superseded:
            self._claim()
            self._manage()
        self.abandon_dead()
        self._confirm_changes()

    def has_changed(self) -> bool:
        """Whether the module has other parameters now, or in other forms, than before the first shard."""
        return self.managed.left_use()

    # --- forward, as the fronts drive it --------------------------------------------------------------

    @_torch.outside_of_graphs
    def before_forward(self, inputs: object = ()) -> None:
        self._begin_forward(inputs)
        # On a rank that is alone too: a graph that is split may round otherwise, and steps by shards are the same then.
        self._split_before.append(_torch.split_graphs(self._graph_cap if torch.is_grad_enabled() else None))

    def _begin_forward(self, inputs: object) -> None:
        if self._superseded:  # by another wrapper of the same module; now it is our turn again
            self._claim()
            self._manage()
        if _current_backward() != _torch.NO_GRAPH_TASK:  # a recomputation inside backward
            self._notice_death()
            if self.managed.compute_parameters:
                self._backward.enter()
            self.managed.compute_parameters.begin_forward(recomputed=True)
            return
        if not self.reducer.forked:
            self.check_alive()
            self.reducer.lockstep.enter_forward()
        if not self._looked_for_optimizers:  # torch's way to have optimizers in backward comes after wrapping
            self._looked_for_optimizers = True
            self.reducer.take_over_optimizers()
        self.abandon_dead()
        if (shared := self.reducer.config.shared) is not None and not self.reducer.forked:  # a child's are its own
            shared.check(self.transport.rank)
        self.stopwatch.forward_begins()
        self.reducer.forward_begins()
        if not self.reducer.forked:  # a child evaluates with the buffers that the rank had
            self.buffers.before_forward()
        if self.joining is not None:
            self.joining.forward_begins()
        if self.managed.compute_parameters:
            renewed = self.managed.renew_compute_parameters(inputs)
            if self.policy.mesh is not None and (names := self.managed.new_names()):
                raise ParametersChangedError(
                    f"rank {self.transport.rank}: parameters of a module that is replicated over a mesh were added or "
                    f"renamed: {', '.join(map(repr, names[:5]))}. Change the module before replicating it, after "
                    "gradsync.unreplicate(module), or replicate it over a process group instead."
                )
            if renewed and self.reducer.group.plan is None:
                self._claim()
                self._manage()  # later only when all ranks say so
        self.managed.compute_parameters.begin_forward(recomputed=False)

    @_torch.outside_of_graphs
    def prepare_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs on the module's device, and in the dtype in which it computes."""
        if self._input_device is not None:
            (args, *_), (kwargs, *_) = _torch.to_kwargs(args, kwargs, self._input_device)
        return self.policy.cast_inputs(args, kwargs)

    @_torch.outside_of_graphs
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

    @_torch.outside_of_graphs
    def end_forward(self, backward_follows: bool = False) -> None:
        """The same for a forward that has raised."""
        _torch.graphs_split_as(self._split_before.pop())
        self.stopwatch.forward_ended()
        inside_backward = _torch.current_graph_task() != _torch.NO_GRAPH_TASK
        if not inside_backward:
            self.reducer.lockstep.leave_forward()
        self.managed.compute_parameters.end_forward(backward_follows or inside_backward)

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

    # --- backward, as autograd tells of it ------------------------------------------------------------

    def _output_reached(self, gradient: Tensor) -> None:
        """Backward came to an output of the module: the first sign of a round."""
        with self._turn:
            self._backward_reached()

    def _backward_reached(self) -> None:
        self._notice_death()
        if self.managed.compute_parameters and not _torch.another_half_follows():
            self._backward.enter()
        if _torch.splits_backward():
            self._split_begins()
        reducer = self.reducer
        if reducer.round is None and not (reducer.synchronizing and accumulates(reducer.group.leaves)):
            self._time_backward()
            return
        if self._enter_backward(passed_output=True) is None:
            return
        node, group = _torch.current_node(), reducer.group
        if node is not None and _torch.compiles() and (_torch.is_compiled(node) or not group.as_expected):
            together = (group.index_of.get(id(leaf)) for leaf in come_at_once(node))
            group.expect_at_once(index for index in together if index is not None)

    def _time_backward(self) -> None:
        """One that is no round."""
        if (backward := _current_backward()) != self._timed:
            self._timed = backward
            self.backwards += 1
            self.stopwatch.backward_begins()
            self.reducer.lockstep.enter("in a backward without synchronization")
            _torch.at_end_of_backward(self._timed_backward_ended)

    def _timed_backward_ended(self) -> None:
        self.stopwatch.backward_ended()
        self.reducer.lockstep.enter("past a backward without synchronization")

    def gradient_arrived(self, leaf: Tensor) -> None:
        """Autograd has accumulated into a parameter's `.grad`."""
        reducer = self.reducer
        index = reducer.group.gradient_arrived(leaf)
        opened = reducer.round
        if opened is None or _current_backward() not in self._backward.met:
            self._notice_death()
            if reducer.round is None and not reducer.synchronizing:
                if reducer.arrivals is not None and index >= 0:
                    reducer.arrivals.append(index)
                return
            opened = self._enter_backward(passed_output=False)
            index = reducer.group.gradient_arrived(leaf)  # the managed parameters may have been replaced
            if opened is None or index < 0:
                return
        opened.gradient_arrived(index)

    def _enter_backward(self, passed_output: bool) -> Round | None:
        """Opens a round, or notes that one more backward, a nested one or its parent, takes part in it."""
        reducer = self.reducer
        if reducer.round is None:
            _torch.check_not_compiled()
            backward = _current_backward()
            if backward == self._not_a_round:
                return None
            backward_rounds.abandon_together(self)
            if reducer.split or not self._may_open(passed_output) or not reducer.parameters:
                if passed_output or not self._evaluates_alone():
                    self._not_a_round = backward
                return None
            reducer.group.gradients.check_first_order()
            opened_as = len(backward_rounds.opened_in(backward))
            reducer.open_round(second_order=torch.is_grad_enabled(), opened_as=opened_as)  # in a backward: for a graph
            backward_rounds.opened(self)
            self.backwards += 1
        self._backward.enter()
        return reducer.round

    def _notice_death(self) -> None:
        """A backward that raised never ends. When another one runs, what it has left waits to be abandoned."""
        if self._backward.died():
            backward_rounds.strand_together(self)

    @property
    def met(self) -> Set[int]:
        """The graph tasks of the backward that is followed, which has passed this module."""
        return self._backward.met.keys()

    def forget_backward(self) -> None:
        """It has raised: it is followed no longer."""
        self._backward.forget()

    def follow_round(self) -> bool:
        """Opens a round that a backward on other ranks has opened, and that this rank's has not reached."""
        if self.reducer.is_unfinished or not self.reducer.synchronizing or self.joining is not None:
            return False
        if self.reducer.forked or not self.reducer.parameters or not self._may_open(passed_output=True):
            return False
        self.reducer.open_round()
        return True

    def skip_round(self) -> None:
        """Opens a round in which this rank brings nothing, and gets what the others have; `end_rounds` ends it."""
        if self.reducer.config.shards is not None:
            raise ShardsError(
                f"rank {self.transport.rank}: skip_round() in a training by shards: a shard that runs no backward "
                "counts for nothing, so `continue` with the next one."
            )
        self.open_without_backward()
        assert self.reducer.round is not None
        if not self.reducer.is_launched:
            self.reducer.round.skip()

    def open_without_backward(self, arrived: Sequence[int] = ()) -> None:
        """Opens a round, or goes on with one that is open, or whose backward has raised.

        `arrived`: parameters that came in a backward before it, in their order.
        """
        if not self.reducer.resume_round():
            if not self._may_open(passed_output=True):
                raise UnfinishedRoundError(
                    f"rank {self.transport.rank}: there is no round of {type(self.module).__name__} to take part in: "
                    "another wrapper of the same module was made since. Call this on that one."
                )
            self.reducer.open_round(arrived=arrived)

    def _may_open(self, passed_output: bool) -> bool:
        """Whether a backward that begins, in which an output was passed or not, is a round; sees to changes first."""
        if self._superseded or (self._evaluates_alone() and not passed_output):
            return False
        if self._outside:
            raise NoProcessGroupError(
                f"rank {self.transport.rank}: {type(self.module).__name__} was moved to a process group that this rank "
                "is not in, so that a backward here would wait for ranks that have left. Sit this phase out, or move "
                "the module to a group with this rank, on all of its ranks."
            )
        if self.managed.compute_parameters and _current_backward() != _torch.NO_GRAPH_TASK:
            self._backward.enter()  # perhaps no output was passed
        if not self.reducer.computes_shards:  # else that was before the first one
            self._confirm_changes()
        if self.joining is not None:
            self.joining.round_opens()
        return True

    def _evaluates_alone(self) -> bool:
        """Whether a backward that passes no output is none of ours; see `Engine`."""
        return self._is_wrapped and not self.module.training

    def abandon_dead(self) -> None:
        """Outside of any backward: one that has not ended by now has raised. Its rounds are abandoned together."""
        reducer = self.reducer
        if reducer.forked or reducer.is_kept_open:
            return
        if reducer.round is not None and not reducer.runs_elsewhere():
            backward_rounds.strand_together(self)
        elif reducer.round is None:
            self._backward.forget()
            reducer.group.undo_divisions()
        backward_rounds.abandon_together(self)

    def _confirm_changes(self) -> None:
        """Before a round: what this rank has set or changed since the one before, all ranks must have."""
        changes = self._state.find_changes(doubt=not self.reducer.group.as_expected)
        shared = self.reducer.config.shared
        if shared is not None and shared.has_moved and not changes.parameters:  # given another layout, for example
            changes = Changes(parameters=True, described=f"{self._state.describe()}\nother memory")
        self.reducer.confirm(self._settings.described, changes.described)
        if changes.parameters:
            self._claim()
            self._manage()
            self._compare()
        elif changes.described:
            self.buffers.mark_agreed()
        self._listen()

    def gradient_comes(self, identity: int) -> None:
        """With sums, before autograd adds to a `.grad` that was reduced: divides it by N, as N ranks will bring it.

        (A mean needs no such care.)
        """
        group, ranks = self.reducer.group, self.reducer.config.scaling.multiplicity
        index = group.index_of.get(identity)
        if index is None or ranks == 1 or index in group.dirty:
            return
        if _torch.will_accumulate(group.leaves[index]):
            group.divide(index, ranks)

    def _split_begins(self) -> None:
        if self.managed.compute_parameters.hidden:
            raise UnfinishedRoundError(
                f"rank {self.transport.rank}: a pipeline splits a backward of {type(self.module).__name__} after "
                "another backward, or reshard(), has put its registered parameters back. The half of the weights would "
                "miss those that compute. Keep full and split backwards apart, or replicate over a "
                "process_group instead of a mesh, and without a precision policy."
            )
        self.reducer.split_backward(True)
        self.managed.compute_parameters.give_back_to_compute()

    # --- the end of backward --------------------------------------------------------------------------

    def _backward_ended(self) -> None:
        """The outermost backward, with or without synchronization, is over."""
        others = [other for other in backward_rounds.opened_in(_current_backward()) if other is not self]
        self.show_registered()
        for one in (self, *others):
            one.reducer.note_backward_ended()
        ending = [one for one in (self, *others) if not one.reducer.keeps_open]
        if self.reducer.round is not None and ending:
            backward_rounds.end_rounds(ending)

    def show_registered(self) -> None:
        """After a backward; compute parameters hand over what they were given."""
        self._backward.forget()
        if not self.reducer.split:  # else second halves follow, which look for them
            if self.managed.compute_parameters:
                self.reducer.group.join_streams()
            self.managed.compute_parameters.fold_in()
            self.managed.compute_parameters.end_backward()

    def end_round(self) -> None:
        """All buckets of the round under way have left: runs it to its end. If they could not, it is abandoned.

        If it is interrupted (Ctrl-C) while it waits, the round stays: `discard_round` ends it before the next one.
        """
        assert self.reducer.round is not None
        if self.reducer.round.phase is Phase.OVER:  # the ranks found out in the middle of it that they differ
            self.reducer.drop_round()
            return
        if self.reducer.round.phase is Phase.OPEN:
            self.reducer.end_abandoned()
            return
        try:
            failed = self.reducer.deliver_round()
            try:
                config = self.reducer.config
                if config.stepper is not None:
                    with unsynchronized.trusted():
                        config.stepper.round_closed(self.transport)
                if config.share_stepper is not None:
                    try:
                        config.share_stepper.round_closed(self.transport, failed is not None)
                    except (ReplicaLostError, RoundTimeoutError):
                        raise
                    except Exception as error:  # all ranks go on to the end of the round, and count it
                        failed = failed or error
                with ranged("buffers"):
                    self.buffers.round_closed()
                if self.joining is not None:
                    self.joining.round_closed()
            except Exception as error:
                raise (failed or error) from None
            nonfinite = self.reducer.round.nonfinite
            event = self.reducer.end_round(ended_well=failed is None)
        except BaseException as error:
            if isinstance(error, Exception) or not self.reducer.round.flights.indices():
                self.reducer.drop_round()
            raise
        if failed is not None:
            raise failed
        if event is not None:
            event = event._replace(forward_at=self.stopwatch.forward_at, before=self.stopwatch.take())
            for recorder in self._recorders:
                recorder(event)
        if nonfinite is not None:
            raise nonfinite

    def discard_round(self) -> None:
        """Ends a round whose end was interrupted. What it brings is not wanted: that backward has raised."""
        self.end_round()
        self.reducer.group.drop_gradients()

    def end_open_round(self) -> None:
        """One that no backward ends."""
        backward_rounds.end_rounds([self])

    def add_recorder(self, recorder: Recorder) -> None:
        """From now on it is told of each round, too."""
        self._recorders.append(recorder)

    def remove_recorder(self, recorder: Recorder) -> None:
        self._recorders.remove(recorder)

    # --- backwards of torch's RPC ---------------------------------------------------------------------

    def _distributed_output_reached(self, context: int, gradient: Tensor) -> None:
        """A backward of torch's RPC: it leaves gradients in its context, where they are reduced at its end."""
        if self.reducer.synchronizing and context not in self._rpc_contexts:
            self._rpc_contexts.add(context)
            _torch.at_end_of_backward(partial(self._distributed_backward_ended, context))

    def _distributed_backward_ended(self, context: int) -> None:
        self._rpc_contexts.discard(context)
        found = _torch.distributed_gradients(context)
        self._confirm_changes()
        gradients = [found.get(parameter) for parameter in self.reducer.parameters]
        without_backward.synchronize_tensors(self, gradients)

    # --- which parameters it listens to ---------------------------------------------------------------

    def _manage(self) -> None:
        """Goes on with the parameters that are managed now."""
        self.reducer.replace(self.managed.managed())
        self.managed.mark_in_use()
        self._listen()

    def _listen(self) -> None:
        """Hears of arrivals at the parameters that the reducer has now."""
        group = self.reducer.group
        if self._listening is None or self._listening[0] is not group:
            self._stop_listening()
            is_sum = self.reducer.config.scaling.multiplicity != 1
            self._listening = group, arm(self, group.leaves, self._turn, before=is_sum)

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening[1]()
            self._listening = None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Parameters that lie once a host are stepped by shares: a plain step would count once for each rank."""
        shared = self.reducer.config.shared
        if shared is None or not shared.is_common or getattr(optimizer, "steps_shares", False):
            return
        name = type(optimizer).__name__
        raise UnsynchronizedStepError(
            f"rank {self.transport.rank}: {name}.step() on parameters that the ranks of this host have once "
            "(share_parameters=True): each rank's step would count. Nothing was changed. Call "
            "`optimizer = gradsync.share_optimizer(optimizer)` once, on all ranks."
        )

    def optimizer_begins(self) -> None:
        """To step parameters of ours."""
        self.reducer.lockstep.enter_step()

    def optimizer_stepped(self, began_at: float) -> None:
        """On parameters of ours."""
        self.reducer.stepped()
        self.stopwatch.optimizer_stepped(began_at)

    def disarm(self) -> None:
        """Leaves the module as if it had never been replicated."""
        if (shared := self.reducer.config.shared) is not None:
            shared.give_back()
        self.managed.compute_parameters.to_registered()
        self._stop_listening()
        unsynchronized.unwatch(self)

    def _claim(self) -> None:
        """Takes the managed parameters over from any engine that had them."""
        self._superseded = False
        for one in self.managed.managed():
            owner = owner_of(one.leaf)
            if owner is not None and owner is not self:
                owner.supersede()
            _owners[one.leaf] = weakref.ref(self)
        unsynchronized.watch(self)

    def supersede(self) -> None:
        """Another engine has the parameters, until a forward here takes them back."""
        self._superseded = True
        self.disarm()

    def _compare(self, anew: bool = False) -> None:
        """From now on each round compares some of the present parameters; `anew`: with other ranks."""
        tensors = self._compared()
        before = None if anew else self.reducer.comparison
        alone = self.transport.size == 1 or not tensors
        self.reducer.compare(None if alone else Comparison(tensors, self._settings.verify, self._apart, before))

    def _compared(self) -> dict[str, Tensor]:
        return {entry.name: entry.parameter for entry in self.managed.entries}

    def trained_alone(self) -> None:
        """Replicas differ on purpose from now on: nobody compares them until `verify` finds them equal."""
        if not self._apart:
            self._apart = True
            self._compare()

    def unmanaged(self) -> dict[int, str]:
        """Names, by their ids, of parameters inside the modules that are not managed now, and not ignored."""
        managed = set(map(id, [*self.reducer.parameters, *self.reducer.group.leaves]))
        return {id(parameter): name for name, parameter in self.managed.not_ignored() if id(parameter) not in managed}

    def known(self) -> set[int]:
        """Ids of all parameters that are managed here, or that it was told to leave alone."""
        inside = {id(parameter) for module in self.modules for parameter in module.parameters()}
        registered = {id(entry.parameter) for entry in self.managed.entries}
        return inside | registered | {id(parameter) for parameter in self._left_alone}
