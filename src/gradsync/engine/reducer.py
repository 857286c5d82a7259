"""The rounds of one replicated module: opened, ended and abandoned, and what is set between them.

What lasts is in `parameter_group.py`, what belongs to one round in `round.py`. When a round opens and when it ends is
told by `step.py`; nothing here calls back.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradsync.engine.lockstep import Lockstep
from gradsync.engine.managed_parameters import HasGrad, Managed
from gradsync.engine.parameter_group import ManagedBefore, ParameterGroup
from gradsync.engine.reduce_config import ReduceConfig, Scaling
from gradsync.engine.round import Phase, Round, ask_all
from gradsync.engine.shard_sums import ShardSums
from gradsync.errors import ForkedError, InvalidOptionError, ShardsError, UnfinishedRoundError
from gradsync.events import RoundClosed
from gradsync.guard.replicas import Comparison
from gradsync.hooks.comm_hook import Hook
from gradsync.hooks.optimizer_overlap import ShareStepper, TorchsInBackward
from gradsync.options import Options
from gradsync.transport.base import Transport

if TYPE_CHECKING:
    from gradsync.engine.step import TrainingStep


class Reducer:
    """Runs the rounds of one replicated module."""

    def __init__(self, managed: Sequence[Managed], transport: Transport, options: Options, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
        self.rounds = 0
        """How many have ended well."""
        self.round: Round | None = None
        """Under way; also of a backward that raised, until somebody notices."""
        self.stranded_with: frozenset[TrainingStep] = frozenset()
        """Whose rounds the same backward has left."""
        self._stranded: Round | None = None  # of one that is known to have raised
        self.arrivals: list[int] | None = None
        """Of backwards without synchronization, in their order, if somebody wants to know."""
        self._skipped = False  # together with another replica
        self.wanted = True
        """Whether the user wants backwards to be rounds."""
        self._held = False
        self.keeps_open = False
        """Whether a round stays open when its backward ends: in the last shard, behind which `ShardedStep` ends it."""
        self.split = False
        """A zero-bubble schedule computes gradients of weights without hooks: nothing is reduced until
        `synchronize_gradients` is called."""
        self.config = ReduceConfig(options, Scaling(transport.size, options.reduce == "mean"))
        """Of the next round."""
        self.comparison: Comparison | None = None
        """With which each round compares the replicas' parameters."""
        self._changes: list[Callable[[], None]] = []  # to be made before the next round, when all ranks say so
        self._unfinished: UnfinishedRoundError | None = None
        self._process = os.getpid()
        self._before = ManagedBefore()
        self._manage(managed, transport)

    def _manage(self, managed: Sequence[Managed], transport: Transport) -> None:
        self.group = ParameterGroup(managed, transport, self.config.options.gradient_as_bucket_view)
        self._before.remember(self.group.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.group.parameters

    @property
    def hidden(self) -> dict[int, str]:
        """Names of parameters that compute as another tensor, by the identities of these."""
        return self.group.hidden

    @property
    def rank(self) -> int:
        return self.group.transport.rank

    @property
    def size(self) -> int:
        return self.group.transport.size

    @property
    def computes_shards(self) -> bool:
        """Whether a step by shards is under way."""
        return self.config.shards is not None and self.config.shards.is_open

    @property
    def synchronizing(self) -> bool:
        """Whether a backward that begins is a round, or only accumulates."""
        return self.wanted and not self._held

    # --- a round ---------------------------------------------------------------------------------

    def open_round(
        self,
        follows: bool = False,
        second_order: bool = False,
        gradients: Sequence[HasGrad] | None = None,
        opened_as: int = 0,
        arrived: Sequence[int] = (),
    ) -> Round:
        """Opens the next round, with what is set now; the arguments are those of `Round`."""
        self.check_process()
        if self.group.lost:
            self.group.check_lost()
        config = self.config
        if config.shards is not None and not config.shards.is_open:
            raise ShardsError(
                f"rank {self.rank}: a backward outside of a step by shards, although gradsync.Shards has cut this "
                f"module's steps into {config.shards.shards} shards: it would depend on the number of ranks. Run it "
                "inside `for batch in shards.each(batches)`; or inside no_sync(), if its gradients are thrown away."
            )
        self.rescale(weight=config.scaling.usual_weight)  # what was set counts for one round
        with torch.no_grad():
            self.round = Round(
                self.group,
                self.lockstep,
                config,
                self.comparison,
                earlier=self.rounds,
                follows=follows,
                second_order=second_order,
                gradients=gradients,
                opened_as=opened_as,
                arrived=arrived,
            )
        return self.round

    def keep_open(self, flag: bool) -> None:
        """See `keeps_open`; of the round that opens next."""
        self.keeps_open = flag

    @property
    def is_kept_open(self) -> bool:
        """Whether that is so of a round whose backward has ended well."""
        return self.keeps_open and self.round is not None and self.round.backward_ended

    def note_backward_ended(self) -> None:
        """It has computed what it had to; what the round still has to do comes behind it."""
        if self.round is not None:
            self.round.note_backward_ended()

    def deliver_round(self) -> Exception | None:
        """All of it has left: runs it to the last gradient delivered.

        Gives what failed on this rank alone: the others go on, and so must this one in what they do together.
        """
        assert self.round is not None
        assert self.round.phase is Phase.LAUNCHED
        failed = self.round.deliver_rest()
        try:
            self._unfinished = self.round.finish() or self._unfinished
        except Exception as error:
            raise (failed or error) from None
        return failed

    def end_round(self, ended_well: bool) -> RoundClosed | None:
        """All ranks have come to its end, which counts for all of them; on this one it may have failed."""
        assert self.round is not None
        self.rescale(unit=self.round.unit_after)
        self.lockstep.count_round()
        event = None
        if ended_well:
            event = self.round.close()._replace(module=self.lockstep.serial)
            self.rounds += 1
        self.round = None
        return event

    def drop_round(self) -> None:
        """The ranks have lost each other, or were never in the same one; what was dirty still is."""
        self.round = None

    def strand_round(self, others: Collection[TrainingStep] = ()) -> None:
        """Its backward has raised, and so have the rounds of `others`: they are abandoned before the next one opens."""
        self.group.undo_divisions()
        if self.round is not None:
            self._stranded, self.round = self.round, None
            self.stranded_with = frozenset(others)

    @property
    def is_launched(self) -> bool:
        """Whether all of the round under way has left."""
        return self.round is not None and self.round.phase is Phase.LAUNCHED

    @property
    def is_stranded(self) -> bool:
        return self._stranded is not None

    @property
    def has_sent(self) -> bool:
        """Whether other ranks have something of the round under way, or of one that was left."""
        return any(one is not None and one.flights.has_sent for one in (self.round, self._stranded))

    def send_abandoned(self) -> None:
        """The rest of a round whose backward has raised, unless all of it has left."""
        assert self.round is not None
        if self.round.phase is Phase.OPEN:
            self.round.send_abandoned()

    def end_abandoned(self) -> None:
        """Raises, unless all ranks have abandoned it, or it is the first one, of which nothing can have been sent."""
        stranded, self.round = self.round, None
        if stranded is not None and self.group.plan is not None:
            stranded.send_abandoned()
            if (error := stranded.end_abandoned()) is not None:
                raise error

    def note_skipped(self) -> None:
        """Its round was skipped together with that of another replica."""
        self._skipped = True

    def take_skipped(self) -> bool:
        """Whether that is so, once."""
        skipped, self._skipped = self._skipped, False
        return skipped

    def resume_round(self) -> bool:
        """Goes on with a round whose backward has raised, if there is one."""
        self.round, self._stranded, self.stranded_with = self.round or self._stranded, None, frozenset()
        return self.round is not None

    @property
    def is_unfinished(self) -> bool:
        """Whether a round is under way, or was left by a backward that raised."""
        return self.round is not None or self._stranded is not None

    def forward_begins(self) -> None:
        """Raises what torch's strictness has to say of the latest round."""
        self._skipped = False
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            raise unfinished

    def runs_elsewhere(self) -> bool:
        """Whether the round under way is that of a backward in another thread."""
        return self.round is not None and _runs_elsewhere(self.round.thread)

    def leave(self) -> None:
        """Drops an unfinished round without telling the other ranks, before changing groups."""
        if self.resume_round() and self.round is not None:
            for flight in self.round.flights.launched:
                with contextlib.suppress(Exception):  # whatever it was, backward raised it
                    flight.work.wait()
        self.drop_round()
        self.forward_begins()

    # --- what ranks agree on before a round ------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the rank's."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        if self.forked:
            raise ForkedError(
                f"this process was forked from rank {self.rank}, which alone can take part in rounds. In a child (a "
                "data loader's worker, for example) use the model without backward."
            )

    def confirm(self, settings: str, described: str) -> None:
        """Before a round: what has changed here, all ranks must change alike; see `ask_all`.

        `settings`: what must be set alike; `described`: parameters and buffers, if they are others than before.
        """
        self.check_process()
        changed = settings != self.lockstep.settings
        if changed:
            self.lockstep.set_alike(settings)
        if self.group.plan is not None and (changed or self._changes or described):
            ask_all(self.group, self.lockstep, self.config, described)
        for change in self._changes:
            change()
        self._changes.clear()

    def _change(self, change: Callable[[], None]) -> None:
        """At once if there was no round yet, in which ranks compare what is set; else with the next round."""
        if self.group.plan is None:
            change()
        else:
            self._changes.append(change)

    # --- what is set between rounds --------------------------------------------------------------

    def replace(self, managed: Sequence[Managed], transport: Transport | None = None) -> None:
        """Goes on with other parameters, or with the same ones changed; learns them anew."""
        before = self.group  # held, with the identities of its parameters, until this returns
        left = [*(before.parameters[index] for index in before.dirty), *self._before.left_dirty()]
        remembered = [one.parameter for one in managed if one.parameter in self._before]
        self._manage(managed, before.transport if transport is None else transport)
        self.group.inherit(before, set(map(id, left)), set(map(id, remembered)))
        still = {id(parameter) for parameter in self.parameters}
        self._before.leave_dirty([parameter for parameter in left if id(parameter) not in still])

    def move_to(self, transport: Transport) -> None:
        """Goes on over another group; plans anew, and counts rounds anew."""
        self.leave()
        self.rescale(ranks=transport.size)
        self.lockstep.restart()
        self.replace(self.group.managed, transport)

    def synchronize(self, flag: bool) -> None:
        """Whether a backward that begins from now on is a round, or only accumulates."""
        self.wanted = flag

    def hold(self, flag: bool) -> None:
        """Whether backwards only accumulate, whatever the user says: in a shard behind which others follow."""
        self._held = flag

    def split_backward(self, flag: bool) -> None:
        """See `split`."""
        self.split = flag

    def compare(self, comparison: Comparison | None) -> None:
        """From now on each round compares the replicas' parameters with it; None: there is nothing to compare."""
        self.comparison = comparison

    def configure(self, **changes: Any) -> None:
        """From the next round on; see `ReduceConfig`. For what ranks need not change at the same time."""
        self.config = replace(self.config, **changes)

    def rescale(self, **changes: Any) -> None:
        """From the next round on; see `Scaling`."""
        self.configure(scaling=replace(self.config.scaling, **changes))

    def divide_by(self, divisor: float) -> None:
        """From the next round on a gradient is the sum over the ranks divided by `divisor`."""

        def change() -> None:
            self.rescale(divisor=divisor)
            self.replace(self.group.managed)

        self._change(change)

    @property
    def hooked(self) -> bool:
        """Whether a communication hook reduces the buckets."""
        return self.config.comm_hook is not None

    def reduce_by(self, hook: Hook, state: object) -> None:
        """From the next round on a communication hook reduces the buckets."""

        def change() -> None:
            self.configure(comm_hook=(hook, state))
            self.rescale(hooked=True)
            if self.group.plan is not None and any(bucket.by_rows for bucket in self.group.plan.buckets):
                self.replace(self.group.managed)  # it wants to see the whole

        self._change(change)

    def step_shares_by(self, stepper: ShareStepper) -> None:
        """From the next round on it steps shares as soon as they are reduced."""

        def change() -> None:
            self.configure(share_stepper=stepper)
            if self.group.plan is not None:
                self.replace(self.group.managed)  # with buckets of another kind

        self._change(change)

    def add_up_shards(self, sums: ShardSums) -> None:
        """From the next round on gradients are those of shards, added up in the order of a tree."""

        def change() -> None:
            self.configure(shards=sums)
            self.rescale(shards=sums.shards, weight=1.0, usual_weight=1.0, unit=1.0)
            if self.group.plan is not None:
                self.replace(self.group.managed)  # with buckets of another kind

        self._change(change)

    def note_arrivals(self, flag: bool) -> None:
        """Of backwards without synchronization from now on."""
        self.arrivals = [] if flag else None

    def take_over_optimizers(self) -> None:
        """Optimizers in backward that torch has put on the parameters."""
        if not self.config.steps_in_backward and (found := TorchsInBackward.found_on(self.parameters)) is not None:
            if self.config.shared is not None:
                raise InvalidOptionError(
                    f"rank {self.rank}: optimizers in backward do not go together with share_parameters=True: "
                    "use gradsync.share_optimizer()."
                )
            self.configure(stepper=found)

    # --- what the guard asks before an optimizer's step ------------------------------------------

    @property
    def seems_dirty(self) -> bool:
        """Whether any parameters have gradients that were never synchronized."""
        return self.split or self.is_unfinished or bool(self.group.dirty or self.group.lost)

    def name_dirty(self, among: Sequence[int]) -> list[str]:
        """Names of dirty parameters among these; those whose gradient was thrown away are not."""
        group = self.group
        dirty = [index for index in among if self.split or index in group.dirty]
        return [group.name(index) for index in dirty if group.has_gradient(index)]

    def name_lost(self, among: Sequence[int]) -> list[str]:
        """Names of those whose gradients were lost with a backward that raised, or are on their way.

        If none of these has a gradient, they were all thrown away, as they should be then.
        """
        group, lost = self.group, set(self.group.lost)
        for one in (self.round, self._stranded):
            lost |= one.flights.indices() if one is not None else set()
        if lost and not any(index not in lost and group.has_gradient(index) for index in among):
            return []
        return [group.name(index) for index in among if index in lost]

    def undo_divisions(self) -> None:
        """Before a step: of gradients that never came, as their backward has raised."""
        self.group.undo_divisions()

    def foreign(self, among: Sequence[int]) -> list[int]:
        """Those of these parameters whose `.grad` no round has delivered as it is."""
        return self.group.gradients.foreign(among)

    def name_foreign(self, among: Sequence[int], since: int) -> list[str]:
        """Names of parameters among these whose `.grad` no round has delivered.

        What somebody made of one that was delivered after round `since`, by scaling it for example, may pass.
        """
        return [self.group.name(index) for index in self.group.gradients.unsynchronized(among, since)]

    def left_dirty(self, parameter: Tensor) -> bool:
        """Whether it was managed until now, and has a gradient that was never synchronized."""
        return any(one is parameter for one in self._before.left_dirty())

    def accept_edits(self, among: Sequence[int], since: int) -> None:
        """What somebody made of gradients that were delivered after round `since` passes as ours from now on."""
        self.group.gradients.accept_edits(among, since)

    def stepped(self) -> None:
        """An optimizer has stepped on parameters of ours."""
        self.lockstep.optimizer_stepped()


def _runs_elsewhere(thread: int) -> bool:
    """Whether another thread, which is alive, has opened a round: its backward runs, or its own next one finds out.

    (A thread of autograd's own, for a GPU, is not known to Python, and says nothing.)
    """
    return thread != threading.get_ident() and thread in {one.ident for one in threading.enumerate()}
