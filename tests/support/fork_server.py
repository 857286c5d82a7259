"""The process that has torch loaded and forks, signals and reaps ranks.

A fresh process needs seconds to import torch; a fork of one that did needs milliseconds. pytest itself can't
be forked, since any earlier test may have started threads in it. Hence this third process, which imports
everything and runs nothing.

Only the fork server signals ranks. It also reaps them, so an id that it still holds can't belong to anyone else.
Should pytest die, even by SIGKILL, its end of the channel closes; the fork server then kills every rank with its
family, removes the folder and leaves. Should the fork server die, the kernel kills its ranks.
"""

import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from gradsync.cli import kernel
from tests.support.channel import Channel, Ended, Fork, Ready, Signal
from tests.support.patience import crowding

# The first optimizer of a process imports dynamo, which takes longer than all other tests of a rank together.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn",
    "torch.optim",
    "torch._dynamo",
    "hypothesis",
    "gradsync",
)
# Each of these libraries starts a pool of threads when it is loaded, and threads don't survive a fork.
_NO_POOLS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_RANK_PROCESS = "tests.support.rank_process"  # by name: it imports torch, which pytest may not need
_START_LIMIT = 120.0
_COMMAND = "import sys; from tests.support.fork_server import serve; serve(int(sys.argv[1]), sys.argv[2])"


class ForkServer:
    """pytest's handle on the fork server. Starting returns at once; the first message waits for the imports."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gradsync-ranks-"))
        self._log = self.folder / "fork-server.log"
        self._channel, far_end = Channel.pair()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(far_end.fileno()), str(self.folder)],
                env={**os.environ, **_NO_POOLS, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops the ranks
            )
        far_end.close()
        self._ready = False

    @property
    def pid(self) -> int:
        """The parent of all ranks."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait for the imports, so that no run has to count them against its limit."""
        if not self._ready:
            self._ready = isinstance(self.receive(_START_LIMIT * crowding()), Ready)

    def send(self, command: Fork | Signal) -> None:
        """Have a rank forked or signalled."""
        with self._death_explained():
            self._channel.send(command)

    def receive(self, timeout: float) -> object:
        """The next message of the fork server or of a rank, or `TimeoutError`."""
        with self._death_explained():
            return self._channel.receive(timeout)

    def close(self) -> None:
        """End the fork server and remove the folder of the session."""
        self._channel.close()
        if not self._ready:
            self._process.kill()  # it has no ranks yet, and imports are tedious to wait for
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # the fork server did that, unless it died

    @contextmanager
    def _death_explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the fork server has died:\n{self._log.read_text(errors='replace')}") from error


def serve(descriptor: int, folder: str) -> NoReturn:
    """The main function of the fork server."""
    kernel.adopt_orphans()
    _preload()
    channel = Channel(socket.socket(fileno=descriptor))
    children = _Children(channel)
    with suppress(EOFError, ConnectionError):  # pytest has closed its end
        channel.send(Ready())
        children.serve()
    children.close()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # to take down all that torch has set up would keep pytest waiting


def _preload() -> None:
    importlib.import_module(_RANK_PROCESS)
    _rewrite_assertions()
    for name in PRELOADED:
        # What can't be imported is for the test that needs it to say, not for the fork server.
        with suppress(Exception):
            importlib.import_module(name)
    if kernel.thread_count() != 1:
        raise RuntimeError("an import started a thread; a rank forked from here could deadlock")
    gc.collect()
    gc.freeze()  # spares the ranks from copying every page when the collector marks objects


def _rewrite_assertions() -> None:
    """Let `assert a == b` show both values in a rank, as it does in pytest."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


class _Children:
    """The ranks that are not reaped yet, by rank."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pids: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        """Obey and reap, until the channel raises."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._channel:
                    self._obey(self._channel.receive())
                else:
                    self._reap(rank=key.data, pidfd=key.fd)

    def close(self) -> None:
        """Kill all that lives. Nobody is left to be told."""
        for pid in self._pids.values():
            _kill_family(pid)
        _end_orphans()

    def _obey(self, command: Fork | Signal) -> None:
        if isinstance(command, Fork):
            self._fork(command)
        elif command.rank in self._pids:
            os.kill(self._pids[command.rank], command.number)

    def _fork(self, order: Fork) -> None:
        fork_server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_rank(order, self._channel, fork_server)
        self._pids[order.rank] = pid
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=order.rank)

    def _reap(self, rank: int, pidfd: int) -> None:
        """Kill the family before reaping its head, whose id nobody else can be given until then."""
        pid = self._pids.pop(rank)
        _kill_family(pid)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if not self._pids:
            _end_orphans()
        self._channel.send(Ended(rank, os.waitstatus_to_exitcode(status), time.monotonic()))


def _run_rank(order: Fork, channel: Channel, fork_server: int) -> NoReturn:
    try:
        importlib.import_module(_RANK_PROCESS).run_rank(order, channel, fork_server)
    except BaseException:  # a fault of the harness, and this process must never go on as a second fork server
        traceback.print_exc()
    finally:
        os._exit(70)


def _kill_family(pid: int) -> None:
    """Kill a rank and whatever it started in its own process group."""
    with suppress(ProcessLookupError):  # it has not come to lead a group yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def _end_orphans() -> None:
    """Without ranks, every child is a grandchild that outlived its rank, even one with an own session.

    Again until none is left: whoever ends may leave us its own children.
    """
    while orphans := kernel.children(os.getpid()):
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
