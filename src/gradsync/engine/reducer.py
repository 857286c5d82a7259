"""A round: arrivals -> ready buckets -> transport -> delivered gradients.

One outermost backward with synchronisation on is one round:

1. It opens when backward passes an output of the module, or with the first arrival.
2. In the very first round nothing is known: everything is launched at the end, and rank 0's order
   of arrival becomes the plan of all ranks. Later a bucket is launched as soon as each of its
   parameters arrived as often as it ever did, strictly in the order of the plan: so all ranks
   launch the same collectives in the same order without a word about it.
3. It closes when the outermost backward ends: the remaining buckets are launched, the last bucket
   always here, then each is awaited and its gradients are delivered.

A gradient may still arrive after its bucket has left, when reentrant checkpointing brings a
parameter more often than ever before. `.grad` is None while a bucket is under way, so such a late
gradient lands in a tensor of its own; the last bucket's tail tells all ranks that some rank has
one, and a second pass carries what was late. Right without a flag, at no cost when it does not
happen.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gradsync import _torch
from gradsync.engine.agreement import agree_on_plan
from gradsync.engine.arrivals import Arrivals
from gradsync.engine.backward import Backward, accumulates, come_at_once
from gradsync.engine.bucket import LARGE, Bucket, make_buckets
from gradsync.engine.delivery import Delivery, InFlight
from gradsync.engine.identity import IDENTITY, Identity, Kind, Position, digest, explain
from gradsync.engine.ownership import Gradients
from gradsync.engine.plan import Plan
from gradsync.engine.roster import HasGrad, Managed
from gradsync.engine.round import Phase, Round
from gradsync.engine.sparse_rows import KnownRows
from gradsync.errors import (
    ForkedError,
    GradsyncError,
    HookError,
    ReplicaLostError,
    RoundTimeoutError,
    UnfinishedRoundError,
)
from gradsync.events import BucketLaunched, Recorder, RoundClosed
from gradsync.guard import strict, unsynchronised
from gradsync.guard.replicas import Comparison
from gradsync.guard.start import crossed
from gradsync.hooks.comm_hook import Hook
from gradsync.hooks.optimizer_overlap import Stepper
from gradsync.options import Options
from gradsync.transport.base import Transport

# How long ranks that were in different rounds wait for each other to say where they were.
_EXPLAIN_SECONDS = 20.0
_EXTRA = 3  # what the last bucket's tail says besides, see `launch_rest`
_open_rounds: weakref.WeakSet[Reducer] = weakref.WeakSet()
_listing = threading.Lock()  # replicas may train in threads of their own


def _in_this_backward(closing: Reducer) -> list[Reducer]:
    """The reducer that closes, and those with a round in the same backward, in the same order on all ranks."""
    task = _torch.current_graph_task()
    with _listing:
        others = {reducer for reducer in _open_rounds if task in reducer._backward.met}
    return sorted({closing} | others, key=attrgetter("serial"))


class About(NamedTuple):
    """What a reducer has to know of the replicated module."""

    name: str
    serial: int
    """Orders the replicated modules of a process, alike on all ranks as soon as they have compared it."""
    settings: str
    describe: Callable[[], str]
    """A text that is equal on two ranks if they manage the same parameters."""
    agreed: Callable[[], None]
    """Called when all ranks have described the same."""
    begun_alike: bool = False
    """All ranks held the same values before rank 0's were broadcast."""


class Reducer:
    """Runs the rounds of one list of managed parameters."""

    def __init__(self, managed: Sequence[Managed], transport: Transport, options: Options, about: About) -> None:
        self.phase = Phase.IDLE
        self._about = about
        self.serial = about.serial
        self.rounds = 0
        """How many have closed."""
        self.settings = about.settings
        """What must be set alike on all ranks, a line `name: value` for each."""
        self._process = os.getpid()
        self.comparison: Comparison | None = None
        """Compares the replicas' parameters while training; None: there is nothing to compare."""
        self._number = 0  # of the next round, as all ranks of the group count them
        self._launches = self._mismatches = 0  # buckets that have left, and rounds that were not the same everywhere
        self._stepped: bool | None = None  # since the latest round; None: not known, or not to be compared
        self.recorder: Recorder | None = None
        self.at_open: Callable[[bool], bool] | None = None
        """Asked, with whether an output was passed, before a round opens; False: this backward is none."""
        self.at_close: Callable[[], None] | None = None
        """Called at the end of each round, on all ranks alike: it may communicate."""
        self.stepper: Stepper | None = None
        """Steps an optimizer for the parameters of each bucket as soon as it is delivered."""
        self.known_rows: dict[str, KnownRows] = {}
        """Of parameters with sparse gradients: the rows that any rank will use."""
        self._transport = transport
        self.options = options
        self._round: Round | None = None
        self._forward_at = time.perf_counter()
        self._changes: list[Callable[[], None]] = []  # to be made before the next round, when all ranks say so
        self._not_a_round = _torch.NO_GRAPH_TASK  # a backward that `at_open` refused
        self._unfinished: UnfinishedRoundError | None = None
        self.split = False
        """Since a pipeline has split a backward, nothing is synchronised until `synchronize_gradients` is called.

        The second half comes past any hook: no round can know that it has it.
        """
        self._backward = Backward(at_end=self.close_round)
        self._managed: list[Managed] = []
        self._at_once: set[int] = set()  # those that come together when nothing is left to compute
        # Frozen or removed with gradients that were never synchronized.
        self._left_dirty: list[weakref.ref[nn.Parameter]] = []
        # All that were managed at any time. A DTensor is held: torch can't convert one that is referred to weakly.
        self._ever: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._ever_held: dict[int, Tensor] = {}
        self._begin_with(managed)
        self._remember()
        self.synchronise(True)

    def _begin_with(self, managed: Sequence[Managed]) -> None:
        self.parameters = [one.parameter for one in managed]
        self.specs = [one.spec for one in managed]
        self._slots: list[HasGrad] = [one.slot for one in managed]
        self._usual_slots = self._slots
        self.computing = [one.computing for one in managed]
        self.hidden = {id(one.computing): one.spec.name for one in managed if one.computing is not one.parameter}
        self.plan: Plan | None = None
        self.buckets: list[Bucket] = []
        self._idle: frozenset[int] = frozenset()  # numbers of buckets that nobody filled in the latest round
        self.delivery = self._make_delivery(managed)
        self.gradients = Gradients(self._slots, self.options.gradient_as_bucket_view)
        share = self.share_out if self.delivery.gain != 1 else None
        self._arrivals = Arrivals(self.computing, self._backward.met, before=share)

    def _make_delivery(self, managed: Sequence[Managed]) -> Delivery:
        made = Delivery(managed, self._transport, self.options)
        if self._managed:  # what was registered with the one before stays
            before = self.delivery
            made.divisor, made.hook, made.after_reduce = before.divisor, before.hook, before.after_reduce
            made.usual_weight, made.weight = before.usual_weight, before.weight
            made.weight_unit, made.present = before.weight_unit, before.present
        self._managed = list(managed)
        return made

    # --- what the engine calls -----------------------------------------------------------------

    def synchronise(self, flag: bool) -> None:
        """Whether a backward that begins from now on is a round, or only accumulates."""
        self._arrivals.listener = self if flag else None

    @property
    def synchronising(self) -> bool:
        return self._arrivals.listener is not None

    @property
    def dirty(self) -> set[int]:
        """Parameters with gradients that were never synchronised."""
        return self._arrivals.dirty

    @property
    def seems_dirty(self) -> bool:
        """Whether there are any; for whoever looks from outside."""
        return self.split or bool(self._arrivals.seen_dirty())

    @property
    def open(self) -> bool:
        """Whether a round is under way, or was left by a backward that raised."""
        return self._round is not None

    def name_dirty(self, among: Sequence[int]) -> list[str]:
        """Names of dirty parameters among these; those whose gradient was thrown away are not."""
        dirty = set(among) if self.split else self._arrivals.seen_dirty()
        return [self.specs[i].name for i in among if i in dirty and self._slots[i].grad is not None]

    def split_begins(self) -> None:
        """A pipeline runs the first half of a backward."""
        self.split = True

    def halves_are_carried(self) -> None:
        self.split = False

    def name_foreign(self, among: Sequence[int], since: int) -> list[str]:
        """Names of parameters among these whose `.grad` no round has delivered.

        What somebody made of one that was delivered after round `since`, by scaling it for example, may pass.
        """
        return [self.specs[index].name for index in self.gradients.unsynchronized(among, since)]

    def left_dirty(self, parameter: Tensor) -> bool:
        """Whether it was managed until now, and has a gradient that was never synchronized."""
        return any(one() is parameter for one in self._left_dirty)

    def stepped(self) -> None:
        """An optimizer has stepped on parameters of ours."""
        self._stepped = True

    def forget_steps(self) -> None:
        """From now on ranks may have stepped differently, as in a `Join` context."""
        self._stepped = None

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def size(self) -> int:
        return self._transport.size

    def forward_begins(self) -> None:
        """Ends what an earlier backward left: forgets a round whose backward raised; reports what was strict."""
        self._forward_at = time.perf_counter()
        if self._round is not None and not _runs_elsewhere(self._round.thread):
            self._abandon()
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            raise unfinished

    @torch.no_grad()
    def _abandon(self) -> None:
        """Ends a round whose backward raised.

        If nothing had left, there was none. Else the other ranks wait for the rest: they get it, marked as worth
        nothing, so that all ranks stay in step, and raise, unless all of them have abandoned it.
        """
        opened = self._round
        assert opened is not None
        if not opened.launched:
            self._forget_round()
            return
        try:
            self._launch_nothing(opened, Kind.ABANDONED)
            # If it was a communication hook that failed, that is known.
            self._await_all(opened, lenient=self.delivery.hook is not None)
            if opened.launched[-1].work.differing() & IDENTITY:
                raise self._mismatch(opened, Kind.ABANDONED)
            self._count_round()
        finally:
            self._forget_round()

    def _launch_nothing(self, opened: Round, kind: Kind) -> None:
        """Sends what is left of a round as if there were nothing in it."""
        label = opened.identity.label(kind)
        while (number := self._following(opened)) < len(self.buckets):
            last = number == len(self.buckets) - 1
            opened.launched.append(self.delivery.launch_nothing(self.buckets[number], number, last, label))
            self._launches += 1

    def _await_all(self, opened: Round, lenient: bool = False) -> None:
        """`lenient`: whatever a communication hook has to say."""
        for flight in opened.launched:
            try:
                self._await(opened, flight)
            except (ReplicaLostError, RoundTimeoutError):
                raise
            except Exception:
                if not lenient:
                    raise

    def _await(self, opened: Round, flight: InFlight) -> None:
        try:
            flight.work.wait()
        except (ReplicaLostError, RoundTimeoutError) as error:
            raise type(error)(f"{error} {self._where(opened, flight.bucket)}", error.ranks) from None

    def _mismatch(self, opened: Round, kind: Kind, described: str = "") -> GradsyncError:
        """After all that was sent has come home: says to the other ranks where this one is, and hears from them."""
        identity = opened.identity
        mine = Position(
            self._about.name,
            identity.number,
            kind,
            bool(identity.stepped),
            self.settings,
            described or self._about.describe(),
        )
        positions: list[Position | None] = [None] * self.size
        positions[self.rank] = mine
        self._mismatches += 1
        topic = f"positions/{self.serial}/{self._launches}/{self._mismatches}"
        with contextlib.suppress(Exception):  # a rank that says nothing is named in the error
            said = self._transport.agree(topic, mine.pack(), min(self._transport.limit, _EXPLAIN_SECONDS))
            positions = [Position.unpack(text) for text in said]
        # All ranks are at the same place again, if they go on.
        self._number = 1 + max(position.number for position in positions if position is not None)
        self._stepped = None
        return explain(self.rank, positions)

    def _check_labels(self, opened: Round, flights: Sequence[InFlight]) -> None:
        """Raises if what was added up were no parts of one sum, or if the replicas have diverged."""
        if not any(flight.work.differing() for flight in flights):
            return
        with torch.no_grad():
            self._await_all(opened)
        bits = 0
        for flight in opened.launched:
            bits |= flight.work.differing()
        if bits & IDENTITY or self.comparison is None:
            raise self._mismatch(opened, Kind.ROUND)
        self._number += 1
        raise self.comparison.error(self._transport, opened.identity.number)

    def ready_to_skip(self, may_open: Callable[[bool], bool]) -> None:
        """Opens a round in which this rank brings nothing, or goes on with one whose backward has raised."""
        if self._round is None:
            if not may_open(True):
                raise UnfinishedRoundError(
                    f"rank {self.rank}: there is no round of {self._about.name} to skip: another wrapper of the same "
                    "module was made since. Call skip_round() on that one."
                )
            self.open_round()
        for index in self.dirty:
            self._slots[index].grad = None
        self.delivery.weight = 0.0

    def output_reached(self) -> None:
        """Backward came to an output of the module: the first sign of a round."""
        if self.synchronising and (self._round is not None or accumulates(self.computing)):
            self._enter(passed_output=True)
            node = _torch.current_node()
            if node is not None and _torch.compiles() and (_torch.is_compiled(node) or not self._arrivals.as_expected):
                index_of = self._arrivals.index_of
                self._at_once = {index_of[id(one)] for one in come_at_once(node) if id(one) in index_of}

    def replace(self, managed: Sequence[Managed]) -> None:
        """Goes on with other parameters, or with the same ones changed; learns them anew."""
        left = [
            *(self.parameters[index] for index in self.dirty),
            *(p for one in self._left_dirty if (p := one()) is not None),
        ]
        dirty = set(map(id, left))
        before, gradients = self.parameters, self.gradients  # held, with their ids, until this returns
        synchronising = self.synchronising
        self._arrivals.disarm()
        self._begin_with(managed)
        self.gradients.inherit(gradients, {id(parameter): index for index, parameter in enumerate(before)}, managed)
        still = {id(parameter) for parameter in self.parameters}
        self._left_dirty = [weakref.ref(p) for p in left if id(p) not in still and p.grad is not None]
        self.synchronise(synchronising)
        # A parameter that nobody listened to until now may have a gradient that nobody saw arrive.
        for index, one in enumerate(managed):
            # (One that was frozen in between has what an earlier round left.)
            seen = id(one.parameter) in dirty or not self._was_managed(one.parameter)
            seen = seen or (one.computing is not one.parameter and one.computing.grad is not None)
            if seen and one.slot.grad is not None:
                self.dirty.add(index)
        self._remember()

    def _remember(self) -> None:
        self._ever.update(dict.fromkeys(p for p in self.parameters if not _torch.is_dtensor(p)))
        self._ever_held.update({id(p): p for p in self.parameters if _torch.is_dtensor(p)})

    def _was_managed(self, parameter: Tensor) -> bool:
        return id(parameter) in self._ever_held if _torch.is_dtensor(parameter) else parameter in self._ever

    def divide_by(self, divisor: float) -> None:
        """From the next round on a gradient is the sum over the ranks divided by `divisor`."""

        def change() -> None:
            self.delivery.divisor = divisor
            self.replace(self._managed)

        self._change(change)

    def reduce_by(self, hook: Hook, state: object) -> None:
        """From the next round on a communication hook reduces the buckets."""

        def change() -> None:
            self.delivery.hook = hook, state
            if self.plan is not None and any(bucket.by_rows for bucket in self.plan.buckets):
                self.replace(self._managed)  # it wants to see the whole

        self._change(change)

    def _change(self, change: Callable[[], None]) -> None:
        """At once if there was no round yet, in which ranks compare what is set; else with the next round."""
        if self.plan is None:
            change()
        else:
            self._changes.append(change)

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
        """Before something changes that all ranks must change alike: they say so, in place of a round's first bucket.

        If some don't, because they know of no change, theirs is a bucket of a round, and all ranks raise.
        """
        self.check_process()
        changed, self.settings = settings != self.settings, settings
        if self.plan is not None and (changed or self._changes or described):
            self._ask(Identity(self.serial, self._number, None, digest(f"{settings}\n{described}", 7)), described)
        for change in self._changes:
            change()
        self._changes.clear()

    @torch.no_grad()
    def _ask(self, identity: Identity, described: str) -> None:
        asked = Round(identity, time.perf_counter(), idle=self._idle)
        label = identity.label(Kind.CHANGE)
        number = self._following(asked)
        data = self.buckets[number].data
        saved = data.clone()  # `.grad`, perhaps
        first = self.delivery.launch_nothing(self.buckets[number], number, number == len(self.buckets) - 1, label)
        asked.launched.append(first)
        self._launches += 1
        self._await(asked, first)
        if first.work.differing():
            self._launch_nothing(asked, Kind.CHANGE)
            self._await_all(asked)
            raise self._mismatch(asked, Kind.CHANGE, described)
        data.copy_(saved)
        self.delivery.forget_hook()

    @contextlib.contextmanager
    def gradients_in(self, slots: Sequence[HasGrad]) -> Iterator[None]:
        """Inside, gradients are found in these places and delivered to them, instead of `.grad`."""
        mine, self._slots = self._slots, list(slots)
        self.delivery.slots = self._slots
        try:
            yield
        finally:
            self._slots = self.delivery.slots = mine

    def drop_gradients(self) -> None:
        for slot in self._slots:
            slot.grad = None
        self.dirty.clear()

    def move_to(self, transport: Transport) -> None:
        """Goes on over another group; plans anew, and counts rounds anew."""
        self.leave()
        self._transport = transport
        self._number, self._stepped = 0, None
        self.replace(self._managed)

    def leave(self) -> None:
        """Nobody waits for this rank here any more: forgets a round whose backward raised."""
        if self._round is not None:
            for flight in self._round.launched:
                with contextlib.suppress(Exception):  # whatever it was, backward raised it
                    flight.work.wait()
            self._forget_round()
        self.forward_begins()

    def disarm(self) -> None:
        """Takes the hooks off the parameters."""
        self._arrivals.disarm()

    @property
    def arrivals(self) -> Arrivals:
        return self._arrivals

    # --- opening -------------------------------------------------------------------------------

    def backward_met(self) -> None:
        self._enter(passed_output=False)

    def bucket_complete(self, index: int) -> None:
        assert self._round is not None
        self._launch_ready(self._round, index)

    def unexpected(self, index: int) -> None:
        opened = self._round
        assert opened is not None
        if self._strict and self._arrivals.counts[index] > 1:
            raise strict.ready_twice(self.rank, index, self.specs[index].name)
        number = self._arrivals.bucket_of[index]
        if 0 <= number < len(opened.launched) and number not in opened.idle:
            if self.stepper is not None:
                raise UnfinishedRoundError(
                    f"rank {self.rank}: '{self.specs[index].name}' received one more gradient after its optimizer had "
                    "stepped. A graph that brings a parameter more often now and then (reentrant checkpointing) can't "
                    "have its optimizer in backward."
                )
            opened.late.add(index)

    def large_arrived(self, index: int) -> None:
        opened = self._round
        number = self._arrivals.bucket_of[index]
        if opened is not None and number >= len(opened.launched) and index not in opened.own:
            self.delivery.bring(self.buckets[number], index)

    def _enter(self, passed_output: bool) -> Round | None:
        """Opens a round, or notes that one more backward, a nested one or its parent, takes part."""
        if self._round is not None and self._backward.died():
            self._abandon()  # which raises if other ranks have not
        if self._round is None:
            _torch.check_not_compiled()
            task = _torch.current_graph_task()
            if task == self._not_a_round:
                return None
            refused = self.split or (self.at_open is not None and not self.at_open(passed_output))
            if refused or not self.parameters:
                self._not_a_round = task
                return None
            self.gradients.check_first_order()
            self.open_round()
            assert self._round is not None
            self._round.second_order = torch.is_grad_enabled()  # in a backward only if it makes a graph
        self._backward.enter()
        return self._round

    @torch.no_grad()
    def open_round(self, follows: bool = False) -> None:
        """`follows`: on a rank without data, which takes part in a round of the others."""
        self.check_process()
        stepped = None if follows or self._number == 0 else self._stepped
        identity = Identity(self.serial, self._number, stepped, digest(self.settings, 7), follows)
        opened = self._round = Round(identity, time.perf_counter(), thread=threading.get_ident(), idle=self._idle)
        if self.comparison is not None and not follows:
            opened.fingerprint = self.comparison.of_round(self._number)
        own, held = self.gradients.before_round(self.buckets, self.dirty)
        if self._slots is self._usual_slots:
            opened.own = own
        opened.saved = {number: self.buckets[number].data.clone() for number in held}
        self._arrivals.begin_round(len(self.buckets))
        self.phase = Phase.OPEN
        with _listing:
            task = _torch.current_graph_task()
            opened.position = sum(task in other._backward.met for other in _open_rounds)
            _open_rounds.add(self)

    def share_out(self, index: int) -> None:
        """Before a gradient arrives: see `Delivery.share_out`."""
        if index not in self.dirty and _torch.will_accumulate(self.computing[index]):
            self.delivery.share_out(index)

    # --- during backward -----------------------------------------------------------------------

    def _launch_ready(self, opened: Round, arrived: int) -> None:
        last = len(self.buckets) - 1
        self._arrivals.waiting = False
        while (following := self._following(opened)) < last and self._arrivals.missing[following] == 0:
            # A user's hook that runs after ours on this parameter wants to see its `.grad`;
            # launching takes it away, so wait for the next arrival.
            if self._arrivals.bucket_of[arrived] == following and _torch.other_hooks_follow(self.computing[arrived]):
                self._arrivals.waiting = True
                return
            overlaps = arrived not in self._at_once
            self._launch(opened, following, overlaps=overlaps)
            opened.overlapped += overlaps
        if self.stepper is not None:
            self._deliver_finished(opened)

    def _following(self, opened: Round) -> int:
        """The number of the bucket that is to be launched next; those before it that are idle are left out."""
        while (number := len(opened.launched)) in opened.idle:
            opened.launched.append(self.delivery.leave_out(self.buckets[number]))
        return number

    @torch.no_grad()
    def _deliver_finished(self, opened: Round) -> None:
        """With an optimizer in backward, what has been reduced is delivered at once."""
        while opened.delivered < len(opened.launched) and opened.launched[opened.delivered].work.done():
            self._deliver_next(opened)

    def _deliver_next(self, opened: Round) -> None:
        flight = opened.launched[opened.delivered]
        opened.delivered += 1
        if not flight.is_sent:
            opened.arrived = opened.delivered
            return
        began = time.perf_counter()
        self._await(opened, flight)
        opened.reduced_at = time.perf_counter()
        opened.waited += opened.reduced_at - began
        if flight.bucket.plan.device.type == "cpu":  # elsewhere asking would make the host wait: at the end, then
            self._check_labels(opened, [flight])
        opened.arrived = opened.delivered
        used = self.delivery.deliver(flight)
        self.gradients.delivered(flight, used, self.rounds)
        if self.stepper is not None:
            indices = [p.index for p, is_used in zip(flight.bucket.plan.places, used, strict=True) if is_used]
            self.dirty.difference_update(indices)  # synchronised: the guard lets the step pass
            with unsynchronised.trusted():
                self.stepper([self.parameters[index] for index in indices])
            self._stepped = True

    def _where(self, opened: Round, bucket: Bucket) -> str:
        number = self.buckets.index(bucket)
        names = [self.specs[index].name for index in bucket.indices]
        holds = f"with '{names[0]}'" if len(names) == 1 else f"from '{names[0]}' to '{names[-1]}'" if names else ""
        return f"(Round {opened.identity.number}, bucket {number + 1} of {len(self.buckets)}, {holds}.)"

    @torch.no_grad()
    def _launch(self, opened: Round, number: int, extra: Sequence[bool] = (), overlaps: bool = False) -> None:
        bucket = self.buckets[number]
        self._arrivals.progress = self._transport.progress
        now = time.perf_counter()
        opened.first_launch_at = opened.first_launch_at or now
        last = number == len(self.buckets) - 1
        values = opened.fingerprint.value() if last and opened.fingerprint is not None else None
        label = opened.identity.label(Kind.ROUND, values)
        saved = opened.saved.pop(number, None)
        flight = self.delivery.launch(
            bucket, number, last, self.dirty, label, extra, opened.own, saved, opened.second_order
        )
        opened.launched.append(flight)
        self._launches += 1
        if self.recorder is not None:
            self.recorder(BucketLaunched(opened.identity.number, number, bucket.plan.nbytes, now, overlaps))

    # --- the end of backward -------------------------------------------------------------------

    @torch.no_grad()
    def close_round(self) -> None:
        opened = self._round
        assert opened is not None
        ended_at = time.perf_counter()
        try:
            # All rounds of this backward first launch what they have left, in the same order on all ranks: waiting
            # for one while another rank waits for a second one would be for ever.
            for reducer in _in_this_backward(self):
                reducer.launch_rest()
            failed = self._deliver_rest(opened)
            with _instead(failed):
                self._finish(opened)
                if self.at_close is not None:
                    self.at_close()
            if failed is not None:
                self._count_round()
                raise failed
            self._arrivals.synchronised()
            self._report(opened, ended_at)
        finally:
            self._forget_round()
        self.rounds += 1
        self._count_round()

    def _count_round(self) -> None:
        """All ranks have ended it; steps are counted from here."""
        self._number += 1
        self._stepped = False

    def _deliver_rest(self, opened: Round) -> Exception | None:
        """What a hook or an optimizer in backward raises here is raised when the round is over.

        The other ranks know nothing of it, and go on: so must this one, to the end of what they do together.
        """
        failed: Exception | None = None
        while opened.delivered < len(opened.launched):
            try:
                self._deliver_next(opened)
            except Exception as error:
                here = opened.arrived == opened.delivered or (isinstance(error, HookError) and not error.timed_out)
                if not here:  # it did not come: neither would the next ones
                    raise (failed or error) from None
                failed = failed or error
            if opened.delivered == len(self.buckets):
                self._launch_left_out(opened)
        return failed

    def _launch_left_out(self, opened: Round) -> None:
        """The last bucket's tail is here: sends those that were left out although somebody has filled them."""
        assert self.plan is not None
        if not opened.idle:
            return
        self._check_labels(opened, [one for one in opened.launched if one.bucket.plan.device.type != "cpu"])
        filled = self.buckets[-1].read_extra()[_EXTRA + len(self.plan.sparse) :]
        for number in sorted(opened.idle):
            if filled[number]:
                self.delivery.settle_hook()
                self._launch(opened, number)
                continue
            for index in self.dirty & self.buckets[number].members:  # by ranks of no weight: as if nobody had
                self._slots[index].grad = None

    def _find_idle(self, opened: Round) -> frozenset[int]:
        """Buckets but the last that nobody has filled. By their tails, which are the same everywhere."""
        filled = {one.bucket for one in opened.launched if one.is_sent and any(one.bucket.read_usage())}
        return frozenset(number for number, bucket in enumerate(self.buckets[:-1]) if bucket not in filled)

    def _report(self, opened: Round, ended_at: float) -> None:
        if self.recorder is not None:
            self.recorder(
                RoundClosed(
                    round=opened.identity.number,
                    forward_at=self._forward_at,
                    opened_at=opened.opened_at,
                    first_launch_at=opened.first_launch_at,
                    backward_ended_at=ended_at,
                    reduced_at=opened.reduced_at,
                    closed_at=time.perf_counter(),
                    waited=opened.waited,
                    nbytes=sum(flight.bucket.plan.nbytes for flight in opened.launched if flight.is_sent),
                    buckets=sum(flight.is_sent for flight in opened.launched),
                    overlapped_buckets=opened.overlapped,
                    order=tuple(self._arrivals.order),
                    corrected=opened.corrected,
                )
            )

    def _make_plan(self) -> None:
        order, gradients = self._arrivals.order, [slot.grad for slot in self._slots]
        by_rows = self.delivery.hook is None  # a hook wants to see the whole
        assert self._round is not None
        self._meet(self._round)
        self.plan = agree_on_plan(self.specs, order, gradients, self._transport, self.options, by_rows)
        extra = _EXTRA + len(self.plan.sparse) + self._skips * (len(self.plan.buckets) - 1)
        self.buckets = make_buckets(self.plan.buckets, self.specs, self._transport, extra)
        for number, planned in enumerate(self.plan.buckets):
            for place in planned.places:
                self._arrivals.bucket_of[place.index] = number
                self.gradients.place(place.index, self.buckets[number])
                if self._comes_by_itself(place.index) and not planned.by_rows:
                    self._arrivals.large.add(place.index)

    def _meet(self, opened: Round) -> None:
        """In the first round, or the first with other parameters: the ranks compare what they have set."""
        described = self._about.describe()
        said = digest(f"{self.settings}\n{described}")
        fellows = [other for other in _in_this_backward(self) if other is not self]
        twins = any(other._about.describe() == described for other in fellows)
        self._transport.check_met()
        mine = [self.delivery.weight_as_integer(), said, self.serial, opened.position, int(twins)]
        try:
            rows = self._transport.gather(mine)
        except RuntimeError:
            self._transport.check_met()  # they may have come to it, and left, in between
            raise
        if len({row[1] for row in rows}) > 1:
            raise self._mismatch(opened, Kind.CHANGE)
        if len({row[3] for row in rows if row[4]}) > 1 and not self._about.begun_alike:
            raise crossed(self.rank, self._about.name, [row[3] for row in rows])
        self._about.agreed()
        self.serial = rows[0][2]
        opened.identity = opened.identity._replace(module=self.serial)
        self.delivery.measure_weights([row[0] for row in rows])

    def _comes_by_itself(self, index: int) -> bool:
        """Whether its gradient is brought to its bucket as soon as it arrives."""
        large = self.specs[index].nbytes >= LARGE
        return large and self.options.gradient_as_bucket_view and self._slots[index] is self.computing[index]

    def _take_gradient(self, index: int) -> Tensor:
        gradient = self._slots[index].grad
        if gradient is None:
            raise UnfinishedRoundError(
                f"rank {self.rank}: the gradient of '{self.specs[index].name}' was removed during backward. "
                "Call zero_grad() before or after backward, not inside a hook."
            )
        self._slots[index].grad = None
        return gradient

    def launch_rest(self) -> None:
        """At the end of backward: launches what has not left yet, the last bucket with what concerns the round."""
        opened = self._round
        assert opened is not None
        if self.phase is Phase.CLOSING:
            return
        self.phase = Phase.CLOSING
        self._arrivals.count_line()
        if self.plan is None:
            self._make_plan()
        assert self.plan is not None
        opened.late_gradients = {index: self._take_gradient(index) for index in sorted(opened.late)}
        last = len(self.buckets) - 1
        while (number := self._following(opened)) < last:
            self._launch(opened, number)
        sparse_used = [self._has_gradient(index) for index in self.plan.sparse]
        incomplete = self._strict and not opened.identity.follows and bool(self._missing())
        filled = [self._is_filled(bucket) for bucket in self.buckets[:last]] if self._skips else []
        told = [bool(opened.late_gradients), incomplete, bool(self.known_rows), *sparse_used, *filled]
        self._launch(opened, last, extra=told)

    @property
    def _skips(self) -> bool:
        return self.options.skip_all_reduce_unused_params

    def _is_filled(self, bucket: Bucket) -> bool:
        return any(map(self._has_gradient, bucket.indices))

    def _has_gradient(self, index: int) -> bool:
        return index in self.dirty and self._slots[index].grad is not None

    def _finish(self, opened: Round) -> None:
        """Sparse gradients, and the second pass if any rank asked for one."""
        assert self.plan is not None
        last = self.buckets[-1]
        self._check_labels(opened, [one for one in opened.launched if one.bucket.plan.device.type != "cpu"])
        if self.comparison is not None:
            self.comparison.round_closed(opened.identity.number, opened.fingerprint, self._transport)
        opened.corrected, incomplete, rows_known, *told = last.read_extra()
        weight = self.delivery.total_weight(last)
        for index, used in zip(self.plan.sparse, told[: len(self.plan.sparse)], strict=True):
            if used:
                known = self.known_rows.get(self.specs[index].name)
                self.delivery.carry_sparse(index, weight, known, rows_known)
                self.gradients.gave(index, self.rounds)
            elif index in self.dirty:  # by ranks of no weight: as if nobody had
                self._slots[index].grad = None
        if opened.corrected:
            self.delivery.carry_late(self.plan.buckets, opened.late_gradients, opened.identity.label(Kind.LATE))
            for index in range(len(self.parameters)):
                self.gradients.gave(index, self.rounds)
        if incomplete:
            self._unfinished = strict.not_all_used(self.rank, opened.identity.number, self._missing(), self._names())
        self.delivery.end_round(weight)
        if self._skips:
            self._idle = self._find_idle(opened)

    def _forget_round(self) -> None:
        with _listing:
            _open_rounds.discard(self)
        self._arrivals.forget_round()
        self._backward.forget()
        self._round = None
        self.delivery.forget_round()
        self.phase = Phase.IDLE

    # --- torch's strictness, for those who ask for it ------------------------------------------

    @property
    def _strict(self) -> bool:
        return self.options.find_unused_parameters is False and not self.options.static_graph

    def _missing(self) -> list[int]:
        arrived = set(self._arrivals.order)
        return [index for index in range(len(self.parameters)) if index not in arrived]

    def _names(self) -> list[str]:
        return [spec.name for spec in self.specs]


def _runs_elsewhere(thread: int) -> bool:
    """Whether another thread, which is alive, has opened a round: its backward runs, or its own next one finds out.

    (A thread of autograd's own, for a GPU, is not known to Python, and says nothing.)
    """
    return thread != threading.get_ident() and thread in {one.ident for one in threading.enumerate()}


@contextlib.contextmanager
def _instead(failed: Exception | None) -> Iterator[None]:
    """If something has failed before, that is told, whatever comes of it inside."""
    try:
        yield
    except Exception as error:
        raise (failed or error) from None
