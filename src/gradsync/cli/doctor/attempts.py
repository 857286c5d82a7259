"""The doctor's ranks, seen from the process that has started them: all of one machine, or one of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradsync.cli.doctor import trial
from gradsync.cli.doctor.facts import COME, DONE, Attempt
from gradsync.cli.launch import Rank, Ranks, describe_status, start_rank

_LATER = 3.0  # seconds, for ranks to say themselves that they have waited too long


class Trials(Ranks):
    """None is alive after this context, whatever they did."""

    def __init__(self, variables: Mapping[int, Mapping[str, str]], limit: float) -> None:
        """`variables`: for each rank that is to be started here, what it is told beside this environment."""
        self._variables, self._limit = variables, limit
        self._told: dict[int, dict[str, Any]] = {rank: {"stage": COME} for rank in variables}
        super().__init__(trial.MODULE, [str(limit)], ranks=len(variables))

    def _start(self, module: str, arguments: Sequence[str], ranks: int, port: int) -> Iterator[Rank]:
        for rank, variables in self._variables.items():
            yield start_rank(rank, variables, module, arguments)

    def listen(self) -> dict[int, Attempt]:
        """Until all have ended; at most `limit` seconds until all have loaded torch, and as many after that."""
        self._wait(lambda rank: self._told[rank.number]["stage"] != COME)
        self._wait(lambda rank: False)
        return self.heard()

    def _wait(self, is_enough: Callable[[Rank], bool]) -> None:
        deadline = time.monotonic() + self._limit + _LATER
        while time.monotonic() < deadline:
            self._hear(self._ready())
            if all(rank.status is not None or is_enough(rank) for rank in self._ranks):
                return
            if any(rank.status for rank in self._ranks):  # the others wait for it in vain
                deadline = min(deadline, time.monotonic() + _LATER)

    def heard(self) -> dict[int, Attempt]:
        """So far."""
        self._hear(self._ranks)
        return {rank.number: self._attempt(rank) for rank in self._ranks}

    def _hear(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            for number, record in rank.drain():
                self._told[number].update(record.get("facts", {}))

    def _attempt(self, rank: Rank) -> Attempt:
        told, status = self._told[rank.number], rank.status
        if status and told["stage"] != DONE:
            told = {**told, "end": f"{describe_status(status)}{_last_line(rank)}"}
        return Attempt.from_record(told)


def _last_line(rank: Rank) -> str:
    words = rank.failure().words.strip().splitlines()
    return f" ({words[-1].strip()[:200]})" if words else ""
