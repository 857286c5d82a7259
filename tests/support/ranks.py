"""Run a function on real ranks.

A test whose body is all that happens runs on the ranks itself:

    @pytest.mark.parametrize("scale", [1.0, 10.0])
    @on_ranks(2)
    def test_sum(scale: float) -> None:
        total = torch.tensor([scale * dist.get_rank()])
        dist.all_reduce(total)
        assert total == scale

One that looks at what the ranks brought back, or means them to raise, leave or die, is a function for the ranks and
another one for pytest. `ranks` raises unless all return; `ranks.outcomes` never does.

    def body(scale: float) -> float:
        ...

    def test_what_comes_back(ranks: Ranks) -> None:
        assert ranks(body, 2, 10.0) == [10.0, 10.0]
        first, second = ranks.outcomes(body, 2, math.nan)
"""

import atexit
import functools
import inspect
import math
import os
import random
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from tests.support.fork_server import ForkServer
from tests.support.outcome import Outcome, RankFailure, section
from tests.support.run import Run
from tests.support.run_folder import RANK_BODY, Call, RunFolder, Setting

T = TypeVar("T")
P = ParamSpec("P")

LIMIT = 20.0  # seconds of an idle machine: see patience.py
GRACE = 1.5  # for the others, once a rank has failed; gloo notices a dead peer within 0.3 s


class Ranks:
    """Runs functions on ranks. Without a run there is no fork server either."""

    def __init__(self) -> None:
        self._fork_server: ForkServer | None = None
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

    def warm_up(self) -> ForkServer:
        """Start the fork server, if there is none, and go on at once: its imports take seconds."""
        if self._fork_server is None:
            self._fork_server = ForkServer()
            atexit.register(self._fork_server.close)
        return self._fork_server

    @property
    def fork_server_pid(self) -> int | None:
        """The parent of all ranks, once there is one."""
        return self._fork_server.pid if self._fork_server else None

    @property
    def folder(self) -> Path | None:
        """The folder of all runs, once there is one."""
        return self._fork_server.folder if self._fork_server else None

    def _run(self, call: Call, setting: Setting, limit: float, grace: float) -> list[Outcome]:
        fork_server = self.warm_up()
        fork_server.wait_until_ready()
        self._runs += 1
        folder = RunFolder.create(fork_server.folder / f"run{self._runs}")
        outcomes: list[Outcome] = []
        try:
            folder.write_job(setting, call)
            outcomes = self._watch(Run(fork_server, folder), setting.world_size, limit, grace)
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


def on_ranks(
    world_size: int | str, *, limit: float = LIMIT, backend: str | None = "gloo"
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make a test of a function at module level: it runs on this many ranks, and all of them must return.

    `world_size` may be the name of a parameter of the test. All that pytest passes goes on to the ranks, so it must be
    picklable, as parameters and `tmp_path` are. `limit` and `backend` are those of `Ranks`.
    """

    def make_test(body: Callable[P, None]) -> Callable[P, None]:
        if body.__qualname__ != body.__name__:
            raise TypeError(f"{_name(body)} is not at module level, where the ranks could find it")
        signature = inspect.signature(body)

        @pytest.mark.usefixtures("ranks")  # tells pytest_collection_finish to start the fork server
        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            bound = signature.bind(*args, **kwargs)
            size = bound.arguments[world_size] if isinstance(world_size, str) else world_size
            # By position: a parameter may be called `limit`, too.
            run_ranks(test, size, *bound.args, limit=limit, backend=backend, **bound.kwargs)

        vars(test)[RANK_BODY] = body
        return test

    return make_test


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
    sys.stdout.writelines(section(outcome) + "\n" for outcome in outcomes)
