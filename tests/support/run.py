"""One run: start the ranks, watch them, stop what is left."""

import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from tests.support.channel import DUMP_STACKS, LEAVE, Ended, Fork, Reported, Signal, Started
from tests.support.fork_server import ForkServer
from tests.support.outcome import Outcome, outcome_of
from tests.support.patience import Stopwatch
from tests.support.run_folder import RunFolder
from tests.support.stack import Stack, read_stack

_DUMP_SECONDS = 1.0
_KILL_SECONDS = 10.0


class Run:
    """What is known about each rank of a run so far."""

    def __init__(self, fork_server: ForkServer, folder: RunFolder) -> None:
        self._fork_server = fork_server
        self._folder = folder
        self._living: set[int] = set()
        self._reported: set[int] = set()
        self._ended: dict[int, Ended] = {}
        self._stacks: dict[int, Stack] = {}
        self._since_failure: Stopwatch | None = None
        self.pids: dict[int, int] = {}

    def start(self, world_size: int) -> None:
        """Have all ranks forked."""
        for rank in range(world_size):
            self._fork_server.send(Fork(rank, self._folder.path))
            self._living.add(rank)

    def watch(self, limit: float, grace: float) -> None:
        """Follow the ranks until all have ended, or `limit` is over, or `grace` after the first failure.

        Both in seconds of an idle machine.
        """
        watch = Stopwatch()
        while self._living:
            left = watch.slice(limit)
            if self._since_failure is not None:
                left = min(left, self._since_failure.slice(grace))
            if left < 0:
                return
            with suppress(TimeoutError):
                self._note(self._fork_server.receive(left))

    def stop(self) -> None:
        """Ask the ranks that are stuck where they stand, then kill all that live."""
        stuck = self._living - self._reported
        if stuck:
            self._stacks = self._ask_for_stacks(stuck)
        self._signal(self._living, signal.SIGKILL)
        watch = Stopwatch()
        while self._living:
            with suppress(TimeoutError):
                self._note(self._fork_server.receive(_KILL_SECONDS - watch.seconds))
            if watch.seconds > _KILL_SECONDS:
                raise TimeoutError(f"ranks {sorted(self._living)} did not end after SIGKILL")

    def outcomes(self) -> list[Outcome]:
        """How each rank ended, in rank order."""
        return [
            outcome_of(
                rank,
                self._folder.read_report(rank),
                ended.code,
                ended.when,
                self._stacks.get(rank),
                self._folder.read_output(rank),
            )
            for rank, ended in sorted(self._ended.items())
        ]

    def _note(self, event: object) -> None:
        match event:
            case Started(rank, pid):
                self.pids[rank] = pid
            case Reported(rank, returned):
                self._reported.add(rank)
                self._note_failure(not returned)
                self._release_if_all_are_done()
            case Ended(rank, code):
                self._ended[rank] = event
                self._living.remove(rank)
                self._note_failure(code != 0 or rank not in self._reported)
                self._release_if_all_are_done()

    def _note_failure(self, failed: bool) -> None:
        if failed and self._since_failure is None:
            self._since_failure = Stopwatch()

    def _release_if_all_are_done(self) -> None:
        if self._living <= self._reported:
            self._signal(self._living, LEAVE)

    def _signal(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            self._fork_server.send(Signal(rank, number))

    def _ask_for_stacks(self, ranks: set[int]) -> dict[int, Stack]:
        """Signal the ranks and wait until they have written; one that is stopped never will."""
        self._signal(ranks & self.pids.keys(), DUMP_STACKS)  # the others could not take it yet
        watch = Stopwatch()
        dumps: list[str] = [""] * len(ranks)
        while watch.seconds < _DUMP_SECONDS:
            time.sleep(0.02)
            earlier, dumps = dumps, [self._folder.read_stack(rank) for rank in ranks]
            if all(dumps) and dumps == earlier:
                break
        return {rank: read_stack(dump) for rank, dump in zip(ranks, dumps, strict=True)}
