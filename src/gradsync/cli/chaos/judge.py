"""Whether the promises were kept: a pure function from what was seen to a verdict with its reason."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from gradsync.cli.chaos.fault import Fault, Kind, Phase
from gradsync.cli.chaos.outcome import Observation, Outcome

LOST, TOO_LONG = "ReplicaLostError", "RoundTimeoutError"
RAISED_WORDS = "the data of this rank is bad"  # of the exception that a rank is made to raise
EXIT_CODE = 3
# Seconds from the fault to the error of the last survivor, on an idle machine.
INSIDE_A_HOST, BETWEEN_HOSTS, VANISHED, ENDED_EARLY = 1.0, 2.0, 10.0, 2.0
# Seconds that the group of a training with a stuck rank allows for a wait, and more, until all have raised.
LIMIT_IF_STUCK, BEYOND_LIMIT = 4.0, 5.0
# A link that is up again after less time than this does not end the training.
SHORT_FLAP = 4.0


class Judgment(Enum):
    WENT_ON = "went on"
    NAMED = "named"
    BAD = "BAD"


@dataclass(frozen=True)
class Verdict:
    judgment: Judgment
    reason: str = ""
    """What is wrong, if something is."""
    seconds: float = 0.0
    """From the fault to the last survivor's error."""


def promised(fault: Fault) -> float:
    """Within how many seconds all survivors of a loss know of it."""
    if fault.kind in (Kind.CUT, Kind.FLAP):
        return VANISHED
    if fault.kind is Kind.END:
        return ENDED_EARLY
    if fault.kind.is_stuck:
        return LIMIT_IF_STUCK + BEYOND_LIMIT
    return BETWEEN_HOSTS if fault.hosts > 1 else INSIDE_A_HOST


def judge(fault: Fault, seen: Observation, undisturbed: str = "") -> Verdict:
    """`undisturbed`: the fingerprint that the same training had without a fault, if that is known."""
    try:
        if hung := [outcome.rank for outcome in seen.outcomes if outcome.status is None]:
            raise _Bad(f"rank {_listed(hung)} hung")
        if seen.fault_at is None:
            raise _Bad("the fault did not happen: its rank never came there")
        _check_nothing_left(seen)
        if _came_too_late(fault, seen):
            return _went_on(seen, undisturbed, all_but=fault.rank)
        if (
            fault.kind.is_loss
            or fault.kind.is_stuck
            or (fault.kind is Kind.FLAP and fault.seconds >= SHORT_FLAP and _any_error(seen))
        ):
            return _named(fault, seen, seen.fault_at)
        return _went_on(seen, undisturbed)
    except _Bad as bad:
        return Verdict(Judgment.BAD, str(bad))


class _Bad(Exception):
    """The reason for a bad verdict."""


def _check_nothing_left(seen: Observation) -> None:
    left = [*seen.left, *(f"rank {one.rank}: {what}" for one in seen.outcomes for what in one.left)]
    if left:
        raise _Bad(f"left behind: {'; '.join(left)}")


def _came_too_late(fault: Fault, seen: Observation) -> bool:
    """One with a delay, for a rank whose training was over by then: the others had all that they needed of it."""
    has_end = fault.kind in (Kind.KILL, Kind.HALT)
    return has_end and fault.delay > 0 and bool(seen.outcomes[fault.rank].finished)


def _any_error(seen: Observation) -> bool:
    return any(outcome.error for outcome in seen.outcomes)


def _went_on(seen: Observation, undisturbed: str, all_but: int | None = None) -> Verdict:
    for one in seen.outcomes:
        if one.rank == all_but:
            continue
        if one.error:
            raise _Bad(f"rank {one.rank} raised {one.error}, and should have gone on: {one.text}")
        if one.status != 0 or not one.finished:
            raise _Bad(f"rank {one.rank} ended with {one.status}, and should have gone on: {one.output[-500:]}")
    if len({one.finished for one in seen.outcomes}) > 1:
        raise _Bad("the replicas differ: " + ", ".join(one.finished[:8] for one in seen.outcomes))
    if undisturbed and seen.outcomes[0].finished != undisturbed:
        raise _Bad(f"parameters are {seen.outcomes[0].finished[:8]}, and {undisturbed[:8]} without the fault")
    return Verdict(Judgment.WENT_ON)


def _named(fault: Fault, seen: Observation, fault_at: float) -> Verdict:
    slowest = 0.0
    for one in seen.outcomes:
        if one.rank == fault.rank and not fault.kind.needs_hosts:
            _check_ended_as_planned(fault, one)
            continue
        _check_names(fault, one)
        slowest = max(slowest, one.at - fault_at)
        if slowest > promised(fault) * seen.crowding:
            busy = f" (on a machine {seen.crowding:.1f} times too busy)" if seen.crowding > 1 else ""
            raise _Bad(f"rank {one.rank} raised after {slowest:.2f} s; promised are {promised(fault):g} s{busy}")
    return Verdict(Judgment.NAMED, seconds=slowest)


def _check_ended_as_planned(fault: Fault, doomed: Outcome) -> None:
    # Who is stuck is killed when the others have ended.
    planned = {Kind.EXIT: EXIT_CODE, Kind.RAISE: 1, Kind.END: 0}.get(fault.kind, -signal.SIGKILL)
    if doomed.status != planned:
        raise _Bad(f"the fault did not happen: rank {doomed.rank} ended with {doomed.status}, not {planned}")


def _check_names(fault: Fault, survivor: Outcome) -> None:
    who = f"rank {survivor.rank}"
    if survivor.finished:
        raise _Bad(f"{who} went on without the rank that was lost")
    if survivor.error not in _promised_errors(fault):
        what = f"raised {survivor.error}: {survivor.text}" if survivor.error else f"ended with {survivor.status}"
        raise _Bad(f"{who} {what}{'' if survivor.error else ': ' + survivor.output[-500:]}")
    expected = _first_cause(fault, survivor.rank)
    if survivor.blamed != (expected,):
        raise _Bad(f"{who} blames rank {_listed(survivor.blamed)}, not {expected}: {survivor.text}")
    if (words := _promised_words(fault)) not in survivor.text:
        raise _Bad(f"{who} does not say {words!r}: {survivor.text}")


def _promised_errors(fault: Fault) -> tuple[str, ...]:
    if not fault.kind.is_stuck:
        return (LOST,)
    return (LOST, TOO_LONG) if fault.phase is Phase.CONSTRUCTION else (TOO_LONG,)


def _first_cause(fault: Fault, survivor: int) -> int:
    """When hosts are cut off each side finds the other one's leader gone: nobody can know which side is right."""
    if not fault.kind.needs_hosts:
        return fault.rank
    there = 1 - fault.host_of(survivor)
    return next(rank for rank in range(fault.ranks) if fault.host_of(rank) == there)


def _promised_words(fault: Fault) -> str:
    if fault.phase is Phase.CONSTRUCTION and not fault.kind.needs_hosts:
        return ""  # there may be no watch yet that could tell more than who
    return {
        Kind.KILL: "is gone: its process ended without a word",
        Kind.EXIT: "is gone: its process ended without a word",
        Kind.RAISE: f"raised ValueError: {RAISED_WORDS}",
        Kind.END: "ended its training",
        Kind.HALT: f"rank {fault.rank} does not answer, though its process is there",
        Kind.LOCK: f"rank {fault.rank} does not answer, though its process is there",
        Kind.LOOP: f"rank {fault.rank} has been ",
    }.get(fault.kind, "does not answer any more: its host is down, or the network is")


def _listed(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ranks)) or "nobody"
