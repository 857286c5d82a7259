"""One round: arrivals -> complete buckets -> transport -> delivered gradients.

One outermost backward with synchronization on is one round, and what belongs to it lives and dies with this object:

1. It opens when backward passes an output of the module, or with the first arrival.
2. In the very first round nothing is known: everything is launched at the end, and rank 0's order of arrival becomes
   the plan of all ranks. Later a bucket is launched as soon as each of its parameters arrived as often as it ever did,
   strictly in the order of the plan: all ranks launch the same collectives in the same order without a word about it.
   What has left is in `flights.py`.
3. It closes when the outermost backward ends: the remaining buckets are launched, the last bucket always here, then
   each is awaited and its gradients are delivered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import Tensor

from gradsync import _torch
from gradsync.engine.bucket import Bucket
from gradsync.engine.flights import Flights
from gradsync.engine.in_flight import InFlight, Taken, deliver, divide, take_gradients, total_weight
from gradsync.engine.late_gradients import carry_late
from gradsync.engine.lockstep import IDENTITY, SAME_BUCKET, Kind, Lockstep
from gradsync.engine.managed_parameters import HasGrad
from gradsync.engine.parameter_group import COMPANIONS, ROUND_FLAGS, ParameterGroup
from gradsync.engine.reduce_config import ReduceConfig
from gradsync.engine.sparse_rows import reduce_shards, reduce_sparse
from gradsync.errors import (
    GradsyncError,
    HookError,
    NonFiniteGradientError,
    ReplicaDivergedError,
    ReplicaLostError,
    RoundTimeoutError,
    ShardsError,
    UnfinishedRoundError,
)
from gradsync.events import RoundClosed, RoundRecord
from gradsync.guard import nonfinite, strict, unsynchronized
from gradsync.guard.nonfinite import NonFiniteCheck
from gradsync.guard.replicas import Comparison
from gradsync.hooks.optimizer_overlap import ShareStepper
from gradsync.observe.ranges import ranged


class Phase(Enum):
    OPEN = auto()  # backward runs, or has raised: some buckets may have left
    LAUNCHED = auto()  # all buckets have left
    OVER = auto()  # the ranks have nothing more to do with each other in it


class Round:
    """One synchronization of a group of parameters, from its first sign to its last gradient delivered."""

    def __init__(
        self,
        group: ParameterGroup,
        lockstep: Lockstep,
        config: ReduceConfig,
        comparison: Comparison | None,
        *,
        earlier: int = 0,
        follows: bool = False,
        second_order: bool = False,
        gradients: Sequence[HasGrad] | None = None,
        opened_as: int = 0,
        arrived: Sequence[int] = (),
    ) -> None:
        """`earlier`: rounds that have closed before; `follows`: on a rank without data, which takes part in a round of
        the others; `second_order`: opened by a backward with `create_graph=True`; `gradients`: what to reduce, one for
        each parameter, instead of `.grad`; `opened_as`: how many rounds of other modules the same backward had opened
        before; `arrived`: parameters that came before it was opened, each as often as it came.
        """
        self._group, self._lockstep, self._config, self._comparison = group, lockstep, config, comparison
        self.scaling = config.scaling
        self.identity = lockstep.next_round(follows)
        self.phase = Phase.OPEN
        self.backward_ended = False
        group.transport.check_alive()
        lockstep.enter("in backward")
        self.thread = threading.get_ident()
        self.unit_after = self.scaling.unit
        """In which weights are measured in the next round."""
        self._earlier, self._second_order, self._opened_as = earlier, second_order, opened_as
        self._drifted = False  # replicas differ, and are to be repaired
        self._fingerprint = None if comparison is None or follows else comparison.of_round(self.identity.number)

        user_owned, kept = group.gradients.before_round(group.buckets, group.dirty)
        self._detached = gradients is not None
        """Whether it is about other tensors than `.grad`."""
        if gradients is None:
            self._holders, self._dirty, self._user_owned = group.holders, group.dirty, user_owned
        else:
            self._holders, self._user_owned = list(gradients), set[int]()
            self._dirty = {index for index, one in enumerate(gradients) if one.grad is not None}
        self.flights = Flights(group, lockstep, config.comm_hook, kept)
        """What has left of it."""

        self.counts = [0] * len(group.parameters)
        """How often each parameter has arrived."""
        for index in arrived:
            self.counts[index] += 1
        self.order = list(dict.fromkeys(arrived))
        self._missing = group.count_expected(and_new_ones=config.steps_in_backward)
        """For each bucket how many parameters have yet to arrive."""
        self._waiting = False  # a complete bucket could not leave at once; the next arrival looks again
        self._progress: Callable[[], None] | None = None  # of the transport, while something is under way
        self._late: set[int] = set()
        self._late_gradients: dict[int, Tensor] = {}

        self._failed: Exception | None = None  # of an optimizer in backward
        self._record = RoundRecord(config.comm_hook is not None, config.steps_in_backward)
        self._finite = None if config.options.on_nonfinite == "ignore" else NonFiniteCheck()
        self.nonfinite: NonFiniteGradientError | None = None
        """To be raised when all is over: it is the same on all ranks."""

    # --- during backward -------------------------------------------------------------------------

    def gradient_arrived(self, index: int) -> None:
        """Autograd has accumulated into a parameter's `.grad`: the innermost loop of the engine."""
        group = self._group
        count = self.counts[index] + 1
        self.counts[index] = count
        if count == 1:
            self.order.append(index)
        if index in group.large:
            self._bring(index)
        if self._progress is not None:
            self._progress()
        if count == group.expected[index]:
            number = group.bucket_of[index]
            self._missing[number] -= 1
            if not self._missing[number]:
                self._record.bucket_ready(number)
            if self._waiting or not self._missing[number]:
                self._launch_complete(index)
        elif count > group.expected[index]:
            self._came_again(index)

    @torch.no_grad()
    def _bring(self, index: int) -> None:
        """Brings a large gradient to its place before its bucket is complete. Later arrivals add to it there."""
        number = self._group.bucket_of[index]
        if number < self.flights.count or index in self._user_owned:
            return
        bucket, holder = self._group.buckets[number], self._holders[index]
        gradient, view = holder.grad, bucket.views[bucket.indices.index(index)]
        if gradient is not None and gradient is not view and gradient.layout is torch.strided:
            view.copy_(gradient)
            holder.grad = view

    def _came_again(self, index: int) -> None:
        """More often than ever before; if its bucket has left, it is late."""
        group = self._group
        if self._config.strict and self.counts[index] > 1:
            raise strict.ready_twice(group.transport.rank, index, group.name(index))
        number = group.bucket_of[index]
        if not 0 <= number < self.flights.count or number in group.idle:
            return
        if self._config.steps_in_backward:
            raise UnfinishedRoundError(
                f"rank {group.transport.rank}: '{group.name(index)}' received one more gradient after its optimizer "
                "had stepped. A graph that brings a parameter more often now and then (reentrant checkpointing) can't "
                "have its optimizer in backward."
            )
        self._late.add(index)

    def _launch_complete(self, arrived: int) -> None:
        """Launches all buckets whose turn it is."""
        group, last = self._group, len(self._group.buckets) - 1
        self._waiting = False
        self.flights.pass_idle()
        if self._config.steps_in_backward:
            self._deliver_reduced()  # which may make room for what is to leave
        while (number := self.flights.count) < last and self._missing[number] == 0:
            if not group.buckets[number].is_free(group.transport):
                self._waiting = True
                return
            # A user's hook that runs after ours on this parameter wants to see its `.grad`; launching takes it away,
            # so wait for the next arrival.
            if group.bucket_of[arrived] == number and _torch.other_hooks_follow(group.leaves[arrived]):
                self._waiting = True
                return
            self._launch(number, overlaps=arrived not in group.at_once)
            self.flights.pass_idle()
        if self._config.steps_in_backward:
            self._deliver_reduced()

    @torch.no_grad()
    def _launch(self, number: int, flags: Sequence[bool] = (), overlaps: bool = False) -> None:
        """Hands one bucket to the transport. `flags`: what concerns the whole round, with the last one."""
        began = time.perf_counter()
        with ranged("launch", number):
            self._send(number, flags)
        self._record.bucket_launched(number, overlaps, began)
        self._notice_reduced()

    def _send(self, number: int, flags: Sequence[bool]) -> None:
        group, config, scaling = self._group, self._config, self.scaling
        bucket = group.buckets[number]
        last = number == len(group.buckets) - 1
        self._progress = group.transport.progress
        if not self._detached:
            group.join_streams(bucket.indices)
            group.fold_in(bucket.indices)
            bucket.bring(self._holders)
        # A gradient that the view replaces is let go at once: memory for one set is enough. So is one of weight 0: if
        # no other rank has one, `.grad` becomes None.
        taken = take_gradients(
            bucket,
            self._holders,
            self._dirty,
            self._user_owned,
            group.as_view or not scaling.weight or not bucket.delivers,
        )
        for index, gradient in zip(bucket.indices, taken.gradients, strict=True) if self._finite else ():
            self._check_brought(index, gradient)
        bucket.write_tail(taken.used, flags)
        values = self._fingerprint.value() if last and self._fingerprint is not None else None
        label = self.identity.label(Kind.ROUND, number, values)
        try:
            see_all = config.see_reduced is not None
            self.flights.send(number, taken, scaling, label, second_order=self._second_order, see_all=see_all)
            if config.share_stepper is not None:
                config.share_stepper.bucket_left([group.parameters[index] for index in bucket.indices])
        except BaseException:
            self._give_back(bucket, taken)
            raise

    def _give_back(self, bucket: Bucket, taken: Taken) -> None:
        """It could not leave. What lies in the bucket itself, a communication hook may have changed: that is lost."""
        for at, index in enumerate(bucket.indices):
            gradient, held = taken.gradients[at], taken.held[at]
            if gradient is None or gradient is not bucket.views[at] or self._config.comm_hook is None:
                self._holders[index].grad = gradient
            elif held is not None and held is not gradient:
                self._holders[index].grad = gradient.copy_(held)
            elif not self._detached:
                self._group.lose(index)

    def _notice_reduced(self) -> None:
        """Takes down which buckets have come back by now."""
        while (number := self.flights.take_noticed()) is not None:
            self._record.bucket_reduced(number)

    @torch.no_grad()
    def _deliver_reduced(self) -> None:
        """With an optimizer in backward, what has been reduced is delivered at once."""
        while (flight := self.flights.take_reduced()) is not None:
            self._deliver_now(flight)

    def _deliver_now(self, flight: InFlight) -> None:
        if not flight.is_sent:
            return
        self._await(flight)
        try:
            self._deliver(flight)
        except Exception as error:  # of the optimizer: the other ranks know nothing of it, and go on
            self._failed = self._failed or error

    # --- the end of backward ---------------------------------------------------------------------

    def note_backward_ended(self) -> None:
        """Also of a round that no backward has opened: it begins to leave."""
        self.backward_ended = True
        self._record.backward_ended()

    @torch.no_grad()
    def launch_rest(self, others: Sequence[Lockstep] = ()) -> None:
        """Launches what has not left yet, the last bucket with what concerns the whole round.

        `others`: of modules with a round in the same backward. If it raises, the round stays open, to be abandoned.
        """
        group = self._group
        self.note_backward_ended()
        if not self._detached:
            group.fold_in()
        if group.plan is None:
            with ranged("plan"):
                self._make_plan(others)
        assert group.plan is not None
        self._late_gradients |= {index: self._take_late(index) for index in sorted(self._late)}
        for index, gradient in self._late_gradients.items():
            self._check_brought(index, gradient)
        self._late.clear()
        last = len(group.buckets) - 1
        self.flights.pass_idle()
        while (number := self.flights.count) < last:
            self._make_room(number)
            self._launch(number)
            self.flights.pass_idle()
        incomplete = self._config.strict and not self.identity.follows and bool(self._unused())
        flags = [bool(self._late_gradients), incomplete, bool(self._config.known_rows)]
        companions = {other.serial % COMPANIONS for other in others}
        flags += [number in companions for number in range(COMPANIONS)]
        flags += [self._brings(index) for index in group.plan.sparse]
        if self._config.options.skip_all_reduce_unused_params:
            flags += [any(map(self._brings, bucket.indices)) for bucket in group.buckets[:last]]
        self._make_room(last)
        self._launch(last, flags)
        self.phase = Phase.LAUNCHED

    def _make_room(self, number: int) -> None:
        """Until a bucket may be filled: if it takes turns with others in the same memory, those are stepped first."""
        group = self._group
        bucket = group.buckets[number]
        while not bucket.is_free(group.transport) and self.flights.undelivered:
            self._deliver_now(self.flights.take_next())
        with self._telling_torn():
            bucket.await_free(group.transport)

    def _make_plan(self, others: Sequence[Lockstep]) -> None:
        """The ranks compare what they have, and take rank 0's order of arrival for everybody's."""
        group, lockstep = self._group, self._lockstep
        weight = self.scaling.weight_as_integer()
        weights = lockstep.compare_start(self.identity, weight, self._opened_as, others, group.transport)
        self.identity = self.identity._replace(module=lockstep.serial)
        stepper, shards, gradients = (
            self._config.share_stepper,
            self._config.shards,
            [one.grad for one in self._holders],
        )
        by_rows = self._config.comm_hook is None and shards is None  # a hook wants to see the whole
        group.make_plan(self.order, gradients, self._config.options, by_rows, stepper is not None, shards)
        if self._config.shared is not None:
            self._config.shared.place(group)
        if stepper is not None:
            stepper.planned()
        self.scaling = self.scaling.in_units_of(weights)

    def _take_late(self, index: int) -> Tensor:
        gradient = self._holders[index].grad
        if gradient is None:
            raise UnfinishedRoundError(
                f"rank {self._group.transport.rank}: the gradient of '{self._group.name(index)}' was removed during "
                "backward. Call zero_grad() before or after backward, not inside a hook."
            )
        self._holders[index].grad = None
        return gradient

    def _brings(self, index: int) -> bool:
        if index not in self._dirty:
            return False
        shards = self._config.shards
        return self._holders[index].grad is not None or (shards is not None and shards.has(index))

    def _unused(self) -> list[int]:
        if self._config.shards is not None:  # this backward is only that of the last one
            return [index for index in range(len(self.counts)) if index not in self._dirty]
        return [index for index, count in enumerate(self.counts) if not count]

    def read_companions(self) -> set[int]:
        """All of it has left: waits for the last bucket, and gives the replicas with a round in the same backward of
        any rank, by their serial numbers modulo `COMPANIONS`.
        """
        began, last = time.perf_counter(), self.flights.launched[-1]
        try:
            with self._telling_torn():
                self.flights.wait_for(last)
        except HookError as error:  # told again by whoever awaits all of them
            if error.timed_out:
                raise
            return set()
        self._record.bucket_reduced(last.number, began)
        if last.work.differing() & SAME_BUCKET:
            return set()
        flags = last.bucket.read_flags()[ROUND_FLAGS - COMPANIONS : ROUND_FLAGS]
        return {number for number, is_set in enumerate(flags) if is_set}

    @torch.no_grad()
    def deliver_rest(self) -> Exception | None:
        """Awaits all buckets, and delivers them only if they are all of this round.

        What a hook or an optimizer in backward raises here is given back: the other ranks know nothing of it, and go
        on; so must this one, to the end of what they do together.
        """
        failed, reduced = self._await_rest()
        failed = self._failed or failed
        if self._group.idle:
            self._launch_left_out()
            failed_too, more = self._await_rest()
            failed, reduced = failed or failed_too, reduced + more
        for flight in reduced:
            try:
                self._deliver(flight)
            except Exception as error:
                failed = failed or error
        return failed

    def _await_rest(self) -> tuple[Exception | None, list[InFlight]]:
        """Those that have been reduced, and what a hook has to say of the others."""
        failed, reduced = None, []
        for flight in self.flights.undelivered:
            if not flight.is_sent:
                continue
            try:
                self._await(flight)
                reduced.append(flight)
            except HookError as error:
                if error.timed_out:
                    raise
                failed = failed or error
        self.flights.mark_delivered()
        return failed, reduced

    def _deliver(self, flight: InFlight) -> None:
        """Gives the parameters of a reduced bucket their gradients."""
        with ranged("deliver", flight.number):
            self._hand_out(flight)
        self._record.bucket_delivered(flight.number)

    def _hand_out(self, flight: InFlight) -> None:
        group = self._group
        if self._config.share_stepper is not None:
            self._step_share(flight, self._config.share_stepper)
            return
        used = deliver(flight, self._holders, self.scaling, group.as_view, self._config.see_reduced)
        group.gradients.delivered(flight, used, self._earlier)
        for index in flight.bucket.indices if self._finite else ():
            self._check_reduced(index)
        if self._config.stepper is not None:
            indices = [index for index, is_used in zip(flight.bucket.indices, used, strict=True) if is_used]
            group.mark_clean(indices)  # the guard lets the step pass
            with unsynchronized.trusted():
                self._config.stepper([group.parameters[index] for index in indices])

    @contextlib.contextmanager
    def _telling_torn(self) -> Iterator[None]:
        """If a rank is lost inside, says what that means for parameters of which some were stepped."""
        try:
            yield
        except (ReplicaLostError, RoundTimeoutError) as error:
            if (stepper := self._config.share_stepper) is None or not (torn := stepper.torn()):
                raise
            raise type(error)(f"{error} {torn}", error.ranks) from None

    def _step_share(self, flight: InFlight, stepper: ShareStepper) -> None:
        """Of the parameters of a reduced bucket, which get no gradients."""
        group, bucket, shared = self._group, flight.bucket, self._config.shared
        assert shared is not None
        start, stop = shared.share_of(group, flight.number)
        share = bucket.share(flight.work, start, stop)
        divide(bucket, share, self.scaling)
        for index, place in zip(bucket.indices, bucket.plan.places, strict=True) if self._finite else ():
            mine = share[max(place.offset - start, 0) : max(place.offset + place.numel - start, 0)]
            assert self._finite is not None
            self._finite.reduced.add(group.name(index), mine)
        used = bucket.read_usage()
        taken = flight.taken
        for index, held, brought, is_used in zip(bucket.indices, taken.held, taken.used, used, strict=True):
            self._holders[index].grad = None if is_used or brought else held
        try:
            group.mark_clean(bucket.indices)
            with unsynchronized.trusted():
                stepper.step_share(flight.number, used, share)
        finally:
            bucket.release(flight.work)

    def _await(self, flight: InFlight) -> None:
        """Returns when it is reduced; raises if it was none of this round."""
        self._notice_reduced()
        began = time.perf_counter()
        with self._telling_torn():
            self.flights.wait_for(flight)
        self._record.bucket_reduced(flight.number, began)
        if flight.bucket.plan.device.type == "cpu":  # elsewhere asking would make it wait
            self._judge(flight.work.differing())

    def _check_labels(self) -> None:
        """Of what was reduced on another device than the CPU, where asking makes the host wait."""
        for flight in self.flights.launched:
            if flight.bucket.plan.device.type != "cpu":
                self._judge(flight.work.differing())

    def _judge(self, differing: int) -> None:
        """By the bits of labels on which the ranks disagree: raises, or notes what `finish` has to repair."""
        repairs = self._comparison is not None and self._config.options.on_divergence == "repair"
        if differing & IDENTITY or (differing and not repairs):
            self._refuse()
        self._drifted = self._drifted or bool(differing)

    def _refuse(self) -> None:
        """Labels differ: the ranks are in different rounds, or the replicas have diverged. All ranks raise.

        What was delivered before that was known (by an optimizer in backward, or on a device) is taken back.
        """
        if self.phase is Phase.OPEN:  # in the middle of a backward: all ranks have to come to the same place first
            self.flights.send_nothing(self.identity, Kind.ROUND, self.scaling)
        self.phase = Phase.OVER
        self.flights.await_all()
        self._restore()
        if not self._detached:
            self._group.drop_gradients()
        transport = self._group.transport
        if self.flights.differing() & IDENTITY or self._comparison is None:
            raise self._lockstep.mismatch(self.identity, Kind.ROUND, transport)
        self._lockstep.diverged()
        raise self._comparison.error(transport, self.identity.number, counted=not self.identity.follows)

    def _launch_left_out(self) -> None:
        """The last bucket's tail is here: sends those that were left out although somebody has filled them."""
        group = self._group
        assert group.plan is not None
        self._check_labels()
        filled = group.buckets[-1].read_flags()[ROUND_FLAGS + len(group.plan.sparse) :]
        for number in sorted(group.idle):
            if filled[number]:
                self.flights.forget_hook()
                self._launch(number)
                continue
            for index in self._dirty & group.buckets[number].members:  # only ranks of weight 0 used it: nobody did
                self._holders[index].grad = None

    @torch.no_grad()
    def finish(self) -> UnfinishedRoundError | None:
        """Sparse gradients, and the second pass if any rank asked for one; what torch would have said, if strict."""
        group, config, scaling = self._group, self._config, self.scaling
        assert group.plan is not None
        last = group.buckets[-1]
        self._check_labels()
        if self._comparison is not None:
            if self._drifted:  # not before: optimizers in backward step earlier on one rank than on another
                self._repair(self._comparison)
            self._comparison.round_closed(self.identity.number, self._fingerprint, group.transport)
        flags = last.read_flags()
        second_pass, incomplete, rows_known = flags[: ROUND_FLAGS - COMPANIONS]
        weight = total_weight(last, scaling)
        for index, used in zip(group.plan.sparse, flags[ROUND_FLAGS:], strict=False):
            holder = self._holders[index]
            if used:
                self._check_brought(index, holder.grad)
                mine = torch.zeros_like(group.leaves[index]) if holder.grad is None else holder.grad
                known = (config.known_rows or {}).get(group.name(index))
                factor = scaling.factor / weight if weight > 0 else 0.0
                if config.shards is not None:
                    reduce_shards(index, group.leaves[index], self._holders, config.shards, factor, group.transport)
                else:
                    holder.grad = reduce_sparse(group.name(index), mine, factor, known, rows_known, group.transport)
                self._check_reduced(index)
                group.gradients.gave(index, self._earlier)
            elif index in self._dirty:  # only ranks of weight 0 used it: nobody did
                holder.grad = None
        if second_pass and config.shards is not None:
            group.drop_gradients()
            raise ShardsError(
                f"rank {group.transport.rank}: in a shard's backward some parameters received gradients more often "
                "than ever before, when their buckets had left. All ranks have dropped this step's gradients. Where "
                "that happens (another backward now and then, reentrant checkpoints), let buckets leave behind the "
                "last shard only: gradsync.Shards(..., overlap=False)."
            )
        if second_pass:
            self._record.second_pass()
            label = self.identity.label(Kind.LATE)
            late, plans = self._late_gradients, group.plan.buckets
            for index in carry_late(plans, group.specs, late, self._holders, scaling, group.transport, label):
                group.gradients.gave(index, self._earlier)
                self._check_reduced(index)
        if self._finite is not None:
            self._find_nonfinite(self._finite)
        self.unit_after = scaling.unit_after(weight)
        if config.options.skip_all_reduce_unused_params:
            group.leave_out(self._find_idle())
        if not incomplete:
            return None
        names = [spec.name for spec in group.specs]
        return strict.not_all_used(group.transport.rank, self.identity.number, self._unused(), names)

    def _check_brought(self, index: int, gradient: Tensor | None) -> None:
        """Before the sum, if somebody wants to know of NaN and Inf."""
        if self._finite is not None and gradient is not None:
            self._finite.brought.add(self._group.name(index), gradient)

    def _check_reduced(self, index: int) -> None:
        """After it."""
        if self._finite is not None and (gradient := self._holders[index].grad) is not None:
            self._finite.reduced.add(self._group.name(index), gradient)

    def _find_nonfinite(self, check: NonFiniteCheck) -> None:
        group = self._group
        alike = self._config.comm_hook is None and self._config.share_stepper is None
        found = check.find(self.identity.number, group.transport, alike)
        if found is not None and self._config.options.on_nonfinite == "warn":
            nonfinite.warn(found, group.transport.rank)
        elif found is not None:
            self.nonfinite = found

    def _repair(self, comparison: Comparison) -> None:
        try:
            comparison.repair(self._group.transport, self.identity.number, counted=not self.identity.follows)
        except ReplicaDivergedError:
            self._group.drop_gradients()
            self._lockstep.diverged()
            raise
        self._record.replicas_repaired()

    def _find_idle(self) -> frozenset[int]:
        """Buckets but the last that nobody has filled. By their tails, which are the same everywhere."""
        filled = {one.bucket for one in self.flights.launched if one.is_sent and any(one.bucket.read_usage())}
        buckets = self._group.buckets[:-1]
        return frozenset(number for number, bucket in enumerate(buckets) if bucket not in filled)

    def close(self) -> RoundClosed:
        """It has ended well; what there is to tell of it."""
        self.phase = Phase.OVER
        if not self._detached:
            self._group.learn(self.counts)
        sent = [flight for flight in self.flights.launched if flight.is_sent]
        traffic = {flight.number: flight.work.traffic() for flight in sent}
        nbytes = sum(flight.bucket.plan.nbytes for flight in sent)
        unused = self._without_gradient(sent)
        return self._record.closed(self.identity.number, nbytes, traffic, self.order, unused, self._group.layout)

    def _without_gradient(self, sent: Sequence[InFlight]) -> list[int]:
        """Parameters that this rank brought nothing for, be it from this backward or from earlier ones."""
        group = self._group
        assert group.plan is not None
        are_all = len(sent) == len(group.buckets) and not group.plan.sparse
        if are_all and all(one.taken.used is one.bucket.all_used for one in sent):  # the usual case
            return []
        flags = ((one.bucket.indices, one.taken.used) for one in sent)
        used = {index for indices, used in flags for index, is_used in zip(indices, used, strict=True) if is_used}
        used |= self._late_gradients.keys() | self._dirty.intersection(group.plan.sparse)
        return [index for index in range(len(group.parameters)) if index not in used]

    # --- rounds that come to nothing -------------------------------------------------------------

    def skip(self) -> None:
        """This rank brings nothing, and gets what the others have."""
        self._late.clear()
        self._late_gradients.clear()
        for index in self._dirty:
            self._holders[index].grad = None
        self.scaling = replace(self.scaling, weight=0.0)

    @torch.no_grad()
    def send_abandoned(self) -> None:
        """Backward has raised, and other ranks wait for the rest: they get it, marked as worth nothing."""
        self.flights.send_nothing(self.identity, Kind.ABANDONED, self.scaling)

    @torch.no_grad()
    def end_abandoned(self) -> GradsyncError | None:
        """Then all ranks are in step again. What to raise, unless all of them have abandoned it."""
        self.phase = Phase.OVER
        self.flights.await_all(
            ignore_hook=self._config.comm_hook is not None
        )  # if it was a hook that failed, that is known
        self._restore()
        if self.flights.launched[-1].work.differing() & IDENTITY:  # who has not abandoned it says so there
            self._group.drop_gradients()  # as the other ranks do
            return self._lockstep.mismatch(self.identity, Kind.ABANDONED, self._group.transport)
        self._lockstep.count_round()
        return None

    def _restore(self) -> None:
        """Gives back what was in `.grad` before; of what this backward had added to, nothing is left."""
        for flight in () if self._detached else self.flights.launched:
            bucket, (_, used, held, in_bucket, _) = flight.bucket, flight.taken
            for at, index in enumerate(bucket.indices):
                if (earlier := held[at]) is not None:
                    self._holders[index].grad = bucket.views[at].copy_(earlier) if at in in_bucket else earlier
                elif used[at]:
                    self._group.lose(index)
        self.flights.restore_memory()
        if self._config.share_stepper is not None:
            self._config.share_stepper.round_dropped()


@torch.no_grad()
def ask_all(group: ParameterGroup, lockstep: Lockstep, config: ReduceConfig, described: str) -> None:
    """In place of a round, before something changes that all ranks must change alike: reduces one empty bucket that is
    labelled so. If a rank knows of no change, its bucket has the label of a round, and all ranks raise.

    `described`: parameters and buffers, if they are others than before.
    """
    identity, scaling = lockstep.before_change(described), config.scaling
    group.transport.check_alive()
    _, kept = group.gradients.before_round(group.buckets, group.dirty)
    flights = Flights(group, lockstep, config.comm_hook, kept)
    flights.send_nothing(identity, Kind.CHANGE, scaling, most=1)
    first = flights.launched[-1]
    flights.wait_for(first)
    if first.work.differing():
        flights.send_nothing(identity, Kind.CHANGE, scaling)
        flights.await_all()
        raise lockstep.mismatch(identity, Kind.CHANGE, group.transport, described)
    flights.restore_memory()
