"""The rounds of one backward, of all replicas that it reaches: ended together, or abandoned together.

A backward may reach several replicas, others on another rank, or raise between two of them. All ranks must end the same
rounds in the same order: so the last bucket of each says which others its rank has open, and a rank that has not
reached one of those takes part in it with nothing to bring.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gradsync import _torch
from gradsync.engine.parameter_group import COMPANIONS
from gradsync.errors import HookError, ReplicaLostError, RoundTimeoutError
from gradsync.observe.ranges import ranged

if TYPE_CHECKING:
    from gradsync.engine.step import TrainingStep

# All replicas, and those with a round that a backward has opened; they may train in threads of their own.
_all: weakref.WeakSet[TrainingStep] = weakref.WeakSet()
_with_rounds: weakref.WeakSet[TrainingStep] = weakref.WeakSet()
_listing = threading.Lock()


def made(engine: TrainingStep) -> None:
    """From now on its rounds may be those of a backward that another replica ends."""
    with _listing:
        _all.add(engine)


def opened(engine: TrainingStep) -> None:
    """A backward has opened a round of it."""
    with _listing:
        _with_rounds.add(engine)


def opened_in(backward: int) -> list[TrainingStep]:
    """Those whose rounds this backward, by its graph task, has opened."""
    with _listing:
        return [engine for engine in _with_rounds if backward in engine.met]


def end_rounds(engines: Sequence[TrainingStep], skipping: bool = False) -> list[TrainingStep]:
    """Ends the rounds of one backward, in the same order on all ranks, and raises what failed first, at the end.

    Also those that only other ranks have open; gives all of them. `skipping`: this rank does not count in those.

    All of them first launch what they have left: waiting for one while another rank waits for a second one would be
    for ever. One that could not be launched is abandoned: the other ranks raise. (With a communication hook, that is
    done by the next forward.)
    """
    for engine in engines:
        engine.reducer.note_backward_ended()
    engines, failures = _launch_all(engines, skipping)
    nobody_waits = any(map(_lost_each_other, failures))
    somebody_waits = not nobody_waits and any(engine.reducer.has_sent for engine in engines)
    for engine in engines:
        with _listing:
            _with_rounds.discard(engine)
        if not somebody_waits:
            engine.reducer.drop_round()
            continue
        if engine.reducer.hooked and not engine.reducer.is_launched:
            # Its hook has just raised, and is needed to send the rest: the next forward does so.
            engine.reducer.strand_round()
            continue
        try:
            with ranged("end of round"):
                engine.end_round()
        except Exception as error:
            failures.append(error)
            somebody_waits = not _lost_each_other(error)
        except BaseException:  # Ctrl-C: the others are at the end of these rounds, and the next forward comes to it too
            _strand([one for one in engines if one.reducer.round is not None])
            raise
    if failures:
        raise failures[0]
    return engines


def _launch_all(engines: Iterable[TrainingStep], skipping: bool) -> tuple[list[TrainingStep], list[Exception]]:
    """Launches the rest of these rounds, and those that other ranks have open; gives them in order, and what failed.

    Those that have a plan first: they wait for nobody. In its first round a replica meets the other ranks, so before
    that it must be known what they have open.
    """
    waiting = list(engines)
    launched: list[TrainingStep] = []
    failures: list[Exception] = []
    asked = 0  # of those launched
    while waiting or asked < len(launched):
        waiting.sort(key=_turn)
        try:
            if asked < len(launched) and (not waiting or waiting[0].reducer.group.plan is None):
                asked += 1
                followed = _follow_companions(launched[asked - 1], (*launched, *waiting))
                for engine in followed if skipping else ():
                    engine.skip_round()
                waiting += followed
                continue
            engine = waiting.pop(0)
            others = [other.reducer.lockstep for other in (*launched, *waiting)]
            launched.append(engine)
            engine.show_registered()
            assert engine.reducer.round is not None
            if not engine.reducer.is_launched:  # it is if somebody has interrupted its end
                engine.reducer.round.launch_rest(others)
        except Exception as error:
            failures.append(error)
            if _lost_each_other(error):
                break
    launched += waiting
    launched.sort(key=lambda engine: engine.reducer.lockstep.serial)
    return launched, failures


def _turn(engine: TrainingStep) -> tuple[bool, int, int]:
    """Whose turn it is to be launched, the same on all ranks; outer replicas, which all reach, before inner ones."""
    serial = engine.reducer.lockstep.serial
    if engine.reducer.group.plan is not None:
        return False, 0, -serial  # what contains others was made after them
    with _listing:
        others = [other for other in _all if other is not engine]
    depth = sum(engine.module in submodules for other in others for submodules in [set(other.module.modules())])
    return True, depth, serial


def _follow_companions(engine: TrainingStep, taking_part: Sequence[TrainingStep]) -> list[TrainingStep]:
    """Opens the rounds that other ranks have open beside this one, and this rank has not. They are yet to be launched.

    Waits for the other ranks to launch this one.
    """
    idle = _others_over_same_ranks(engine, taking_part)
    if not idle or (leading := engine.reducer.round) is None or not leading.flights.has_left:
        return []
    found = []
    for number in leading.read_companions():
        # Of two with the same number nobody knows which is meant: those who wait say so after a while.
        if len(idle[number]) == 1 and idle[number][0].follow_round():
            found.append(idle[number][0])
    return found


def _others_over_same_ranks(engine: TrainingStep, but: Sequence[TrainingStep]) -> dict[int, list[TrainingStep]]:
    """Replicas that could be meant by one of `engine`'s companions, by their numbers as such."""
    with _listing:
        others = [other for other in _all if other not in but]
    found: dict[int, list[TrainingStep]] = defaultdict(list)
    if others:
        ranks = _torch.ranks_of(engine.process_group)
        for other in others:
            if _torch.ranks_of(other.process_group) == ranks:
                found[other.reducer.lockstep.serial % COMPANIONS].append(other)
    return found


def strand_together(engine: TrainingStep) -> None:
    """A backward has raised: all its rounds wait to be abandoned."""
    with _listing:
        dead = [other for other in _with_rounds if other.met & engine.met and other is not engine]
    _strand([engine, *dead])


def _strand(engines: Sequence[TrainingStep]) -> None:
    for engine in engines:
        with _listing:
            _with_rounds.discard(engine)
        engine.forget_backward()
        engine.reducer.strand_round([other for other in engines if other is not engine])


def abandon_together(engine: TrainingStep) -> None:
    """Ends what a backward that raised has left, of all replicas that took part in it, as other ranks wait for them.

    Also of those that it has not reached, but other ranks have. If nothing of it had left, there was no round. Raises
    what the ranks find to be different.
    """
    stranded = [one for one in (engine, *engine.reducer.stranded_with) if one.reducer.is_stranded]
    somebody_waits = any(one.reducer.has_sent for one in stranded)
    failures: list[Exception] = []
    for one in stranded:
        one.reducer.resume_round()
    if somebody_waits:
        try:
            _send_abandoned(stranded)
        except Exception as error:
            failures.append(error)
            somebody_waits = not _lost_each_other(error)
    stranded.sort(key=lambda one: one.reducer.lockstep.serial)
    for one in stranded:
        if not somebody_waits:
            one.reducer.drop_round()
            continue
        try:
            if one.reducer.is_launched:
                one.discard_round()
            else:
                one.end_round()
        except Exception as error:
            failures.append(error)
            somebody_waits = not _lost_each_other(error)
    if failures:
        raise failures[0]


def skip_together(engines: Sequence[TrainingStep]) -> None:
    """Takes part in the others' rounds of these replicas with nothing, instead of a backward.

    If a backward has raised, in those of all replicas that it had reached, or that it has reached on other ranks: those
    have them all open. Whoever then skips them one by one has done so with the first. A round of which all had left
    when its end was interrupted is not skipped any more, but ended.
    """
    asked = [engine for engine in engines if not engine.reducer.take_skipped()]
    if not asked:
        return
    with _listing:
        left = [one for one in _all if one not in asked and one.reducer.is_unfinished]
    together = [*asked, *(one for one in left if not one.reducer.runs_elsewhere())]
    for engine in together:
        engine.skip_round()
    for engine in end_rounds(together, skipping=True):
        if engine not in engines:
            engine.reducer.note_skipped()


def _send_abandoned(stranded: list[TrainingStep]) -> None:
    """The rest of these rounds; then those that other ranks have open beside them are added, and sent as well."""
    for one in stranded:
        one.reducer.send_abandoned()
    for one in stranded:  # which grows meanwhile
        for companion in _follow_companions(one, stranded):
            stranded.append(companion)
            companion.reducer.send_abandoned()


def _lost_each_other(error: Exception) -> bool:
    """Whether ranks have given up waiting for each other: there is nobody to end a round with."""
    lost = isinstance(error, (ReplicaLostError, RoundTimeoutError))
    return lost or (isinstance(error, HookError) and error.timed_out)
