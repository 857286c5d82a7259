"""Run a function on real ranks and bring back what each returned.

    def body(scale):
        total = torch.tensor([scale * dist.get_rank()])
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks):
        assert ranks(body, 2, 10.0) == [10.0, 10.0]

A test that *means* ranks to raise, leave or die calls `ranks.outcomes(body, 2)`, which never raises.
"""

import atexit
import math
import os
import random
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tests.support.outcome import Outcome, RankFailure, chapter
from tests.support.run import Run
from tests.support.run_folder import Call, RunFolder, Setting
from tests.support.zygote import Zygote

T = TypeVar("T")

LIMIT = 20.0  # seconds of an idle machine: see patience.py
GRACE = 1.5  # for the others, once a rank has failed; gloo notices a dead peer within 0.3 s


class Ranks:
    """Runs functions on ranks. Without a run there is no zygote either."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None
        self._runs = 0
        self.pids: list[int] = []  # of every rank ever started, for the leak check

    def __call__(
        self,
        function: Callable[..., T],
        world_size: int,
        *args: Any,
        limit: float = LIMIT,
        backend: str | None = "gloo",
        **kwargs: Any,
    ) -> list[T]:
        """Call `function(*args, **kwargs)` on every rank of a new group; return the results in rank order.

        The function must be at module level, for the ranks import it. With `backend=None` there is no group,
        but `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are set, so that the function can make one.
        Raises `RankFailure` unless every rank returns within `limit` seconds, of an idle machine.
        """
        __tracebackhide__ = True
        call = _call(function, args, kwargs)
        outcomes = self._run(call, _setting(world_size, backend), limit, GRACE)
        if not all(outcome.returned for outcome in outcomes):
            raise RankFailure(_name(function), outcomes)
        _show(outcome for outcome in outcomes if outcome.output)
        return [outcome.result for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        limit: float = LIMIT,
        grace: float = math.inf,
        backend: str | None = "gloo",
        **kwargs: Any,
    ) -> list[Outcome]:
        """Do the same, but return how each rank ended, whatever happened.

        Ranks that outlive a failed one have `grace` seconds to end by themselves, and never more than `limit`.
        """
        call = _call(function, args, kwargs)
        outcomes = self._run(call, _setting(world_size, backend), limit, grace)
        _show(outcomes)
        return outcomes

    def warm_up(self) -> Zygote:
        """Start the zygote, if there is none, and go on at once: its imports take seconds."""
        if self._zygote is None:
            self._zygote = Zygote()
            atexit.register(self._zygote.close)
        return self._zygote

    @property
    def zygote_pid(self) -> int | None:
        """The parent of all ranks, once there is one."""
        return self._zygote.pid if self._zygote else None

    @property
    def folder(self) -> Path | None:
        """The folder of all runs, once there is one."""
        return self._zygote.folder if self._zygote else None

    def _run(self, call: Call, setting: Setting, limit: float, grace: float) -> list[Outcome]:
        zygote = self.warm_up()
        zygote.wait_until_ready()
        self._runs += 1
        folder = RunFolder.create(zygote.folder / f"run{self._runs}")
        outcomes: list[Outcome] = []
        try:
            folder.write_job(setting, call)
            outcomes = self._watch(Run(zygote, folder), setting.world_size, limit, grace)
        finally:
            # Who was killed can't tidy up; who returned should have.
            folder.remove(keep_litter=bool(outcomes) and all(outcome.returned for outcome in outcomes))
        return outcomes

    def _watch(self, run: Run, world_size: int, limit: float, grace: float) -> list[Outcome]:
        try:
            run.start(world_size)
            run.watch(limit, grace)
        finally:
            run.stop()
            self.pids += run.pids.values()
        return run.outcomes()


run_ranks = Ranks()


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(function, args, kwargs, [tuple(entry) for entry in warnings.filters])


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def _setting(world_size: int, backend: str | None) -> Setting:
    environ = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return Setting(world_size, backend, environ, list(sys.path), str(Path.cwd()))


def _free_port() -> int:
    """A port below the range from which the kernel serves outgoing connections: none of those can take it
    between our look and the moment when rank 0 listens.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def _show(outcomes: Iterable[Outcome]) -> None:
    """Hand over to pytest, which shows it if the test fails."""
    sys.stdout.writelines(chapter(outcome) + "\n" for outcome in outcomes)
