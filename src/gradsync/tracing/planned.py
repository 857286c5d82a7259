"""A trace of some rounds of whatever replicas a script makes, which knows nothing of it: `gradsync run --trace`.

It begins when the first replica closes the round before, and ends when the first one has closed the last round and
stepped, or gone on to the next forward. All ranks come to both at the same place, so nobody has to ask.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gradsync.engine.engine import Engine
from gradsync.events import RoundClosed, Span
from gradsync.replica import when_made
from gradsync.tracing.gathering import Gathering
from gradsync.tracing.trace import finish, gathering_of
from gradsync.tracing.tracer import Tracer


class Rounds(NamedTuple):
    """As in Python's slices: from `first` to the one before `stop`, counted from 0."""

    first: int
    stop: int

    @classmethod
    def read(cls, text: str) -> Rounds:
        """Raises `ValueError`, with what is wrong."""
        found = re.fullmatch(r"(\d+):(\d+)", text)
        if found is None:
            raise ValueError(f"must be two numbers of rounds, as in 20:25 for rounds 20 to 24, but is {text!r}")
        rounds = cls(int(found[1]), int(found[2]))
        if rounds.stop <= rounds.first:
            raise ValueError(f"must end behind its beginning, as in 20:25 for rounds 20 to 24, but is {text!r}")
        return rounds


def plan_trace(folder: str, rounds: Rounds) -> None:
    """In a rank, before its script begins."""
    planned = PlannedTrace(Path(folder).absolute(), rounds)
    when_made(planned.made)
    atexit.register(planned.script_ends)


class PlannedTrace:
    """Listens to all replicas from the beginning, and throws away what was before the first round."""

    def __init__(self, folder: Path, rounds: Rounds) -> None:
        self._folder, self._rounds = folder, rounds
        self._tracer = Tracer()
        self._heard: list[weakref.ref[Engine]] = []
        self._gathering: Gathering | None = None  # once it has begun
        self._latest = -1  # round, of any replica
        self._is_over = False

    def made(self, engine: Engine) -> None:
        """A replica was made, which is traced with the others."""
        if self._is_over:
            return
        self._tracer.listen(engine)
        self._heard.append(weakref.ref(engine))
        engine.add_recorder(partial(self._round_closed, self._heard[-1]))  # behind the tracer's
        engine.stopwatch.listen(self._phase_ended)
        if self._rounds.first == 0:
            self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        if self._gathering is None:
            self._gathering = gathering_of(engine)
            self._tracer.forget()

    def _round_closed(self, of: weakref.ref[Engine], event: RoundClosed) -> None:
        self._latest = max(self._latest, event.round)
        engine = of()
        if engine is not None and event.round + 1 >= self._rounds.first:
            self._begin(engine)

    def _phase_ended(self, span: Span) -> None:
        """Not in a backward, nor while recorders are called: here it may end."""
        if self._latest + 1 >= self._rounds.stop and not self._is_over:
            self._end()

    def _end(self, fault: str = "") -> None:
        assert self._gathering is not None
        self._is_over = True
        self._tracer.stop()
        for of in self._heard:
            if (engine := of()) is not None:
                engine.stopwatch.unlisten(self._phase_ended)
        self._say(finish(self._tracer, self._gathering, self._folder, fault=fault, waits=False))

    def script_ends(self) -> None:
        """Before the last round, or without any."""
        if self._is_over:
            return
        first, stop = self._rounds
        if self._gathering is not None and self._tracer.rounds:
            self._end(f"the script ended before round {stop - 1} had closed")
        elif os.environ.get("RANK", "0") == "0":
            rounds = "made no round" if self._latest < 0 else f"ended after round {self._latest}"
            self._say(f"no trace: the script {rounds}, and rounds {first} to {stop - 1} were to be traced")
        self._is_over = True

    def _say(self, line: str) -> None:
        if line:
            sys.stderr.write(f"gradsync run: {line}\n")
