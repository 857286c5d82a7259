"""How a rank ended, and the failure that pytest shows."""

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from signal import Signals
from typing import Any

from tests.support.run_folder import Raised, Returned
from tests.support.stack import Stack

_WIDTH = 100


class End(Enum):
    """The five ways in which a rank can end."""

    RETURNED = "returned"
    RAISED = "raised"
    EXITED = "exited"  # left without a report, by sys.exit or os._exit
    KILLED = "killed"  # by a signal that was not ours
    STUCK = "stuck"  # until we stopped it


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `when` is monotonic time, comparable between ranks."""

    rank: int
    end: End
    when: float
    output: str
    result: Any = None
    error: Raised | None = None
    exit_code: int | None = None
    signal: Signals | None = None
    stack: Stack | None = None

    @property
    def returned(self) -> bool:
        """True if the body returned; its value is `result`."""
        return self.end is End.RETURNED

    @property
    def exception(self) -> BaseException | None:
        """The exception that the body raised; None also if it can't be pickled, `error` tells it in words."""
        if self.error is None or self.error.exception is None:
            return None
        exception: BaseException = pickle.loads(self.error.exception)
        return exception

    @property
    def lost_peer(self) -> bool:
        """True if it only raised what a rank raises when another one is gone."""
        return self.error is not None and self.error.lost_peer

    def __str__(self) -> str:
        return f"rank {self.rank} {self._story()}"

    def _story(self) -> str:
        if self.error is not None:
            verb = "lost a peer:" if self.lost_peer else "raised"
            return f"{verb} {self.error.type_name}: {self.error.message}"
        if self.signal is not None:
            return f"was killed by {self.signal.name}"
        if self.end is End.STUCK:
            return f"was stuck and had to be stopped, at\n  {self.stack}"
        if self.end is End.EXITED:
            return f"exited with code {self.exit_code} before its body returned"
        return "returned"


def outcome_of(
    rank: int, report: Returned | Raised | None, code: int, when: float, stack: Stack | None, output: str
) -> Outcome:
    """Put together what the rank reported, what the fork server saw, and what we did to it."""
    if isinstance(report, Returned):
        return Outcome(rank, End.RETURNED, when, output, result=report.result, exit_code=code)
    if isinstance(report, Raised):
        return Outcome(rank, End.RAISED, report.when, output, error=report, exit_code=code)
    if stack is not None:
        return Outcome(rank, End.STUCK, when, output, stack=stack)
    if code < 0:
        return Outcome(rank, End.KILLED, when, output, signal=Signals(-code))
    return Outcome(rank, End.EXITED, when, output, exit_code=code)


class RankFailure(AssertionError):
    """At least one rank did not return. Shows the rank to blame first, the ones it took along after."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = sorted((outcome for outcome in outcomes if not outcome.returned), key=_blame)
        title = f"{len(failed)} of {len(outcomes)} ranks failed in {name}"
        super().__init__("\n\n".join([title, *map(section, failed)]))


def _blame(outcome: Outcome) -> tuple[bool, bool, float]:
    """The earliest cause first. Time alone won't do: a peer can notice a death before the fork server does."""
    return outcome.end is End.STUCK, outcome.lost_peer, outcome.when


def section(outcome: Outcome) -> str:
    """All there is to tell about one rank: how it ended, its traceback, its output."""
    first_line, *rest = str(outcome).split("\n")
    parts = [f"── {first_line} ".ljust(_WIDTH, "─"), *rest]
    if outcome.error is not None:
        parts = [parts[0], outcome.error.traceback.rstrip()]  # it ends with the whole message
    if outcome.output:
        parts += [f"── output of rank {outcome.rank} ".ljust(_WIDTH, "─"), outcome.output.rstrip()]
    return "\n".join(parts)


def assert_raised(outcomes: Sequence[Outcome], kind: type[Exception], *patterns: str) -> None:
    """On every rank, with texts that match each pattern."""
    for outcome in outcomes:
        assert isinstance(outcome.exception, kind), outcome
        for pattern in patterns:
            assert re.search(pattern, str(outcome.exception)), f"{pattern!r} not in: {outcome.exception}"
