"""One rank of a disturbed training, from the fork to its end."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from gradsync.cli import kernel
from gradsync.cli.chaos.belongings import belongings, left_behind
from gradsync.cli.chaos.fault import Fault, Kind, Phase
from gradsync.cli.chaos.hosts import Host
from gradsync.cli.chaos.judge import EXIT_CODE, RAISED_WORDS
from gradsync.cli.chaos.script import Meeting, Script
from gradsync.cli.report import Reporter

DUMP_STACKS = signal.SIGUSR1


class _ScriptOver(BaseException):
    """The script ends here, in good order. Its traceback keeps what the script has, as globals would."""


class Injection:
    """The fault, in the rank that has it."""

    def __init__(self, fault: Fault, rank: int, report: Reporter, go: int) -> None:
        """`go`: where a byte comes when a link that this rank asked to be cut is cut."""
        self._fault, self._report, self._go = fault, report, go
        self._is_due = rank == fault.rank

    def reach(self, phase: Phase, step: int, bucket: int = 0, after: bool = False) -> None:
        """The script has come to this place."""
        fault = self._fault
        if not self._is_due or (phase, step, bucket, after) != (fault.phase, fault.step, fault.bucket, fault.after):
            return
        self._is_due = False
        if fault.kind.may_come_late and (fault.delay or fault.kind.needs_hosts):
            self._report.send("point")  # the process that has started us does the rest
            if not fault.delay:
                os.read(self._go, 1)
        else:
            self._act()

    def _act(self) -> None:
        kind = self._fault.kind
        if kind not in (Kind.RAISE, Kind.END):  # which happen when Python ends the process
            self._report.send("fault", at=time.monotonic())
        if kind is Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind is Kind.EXIT:
            os._exit(EXIT_CODE)
        elif kind is Kind.RAISE:
            raise ValueError(RAISED_WORDS)
        elif kind in (Kind.STOP, Kind.HALT):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind is Kind.LOOP:
            while True:
                time.sleep(0.001)  # a core of this machine is not the point
        elif kind is Kind.LOCK:
            ctypes.PyDLL(None).pause()  # unlike `CDLL`, it does not let go of the lock
        elif kind is Kind.SLOW:
            time.sleep(self._fault.seconds)
        elif kind is Kind.END:
            raise _ScriptOver


def run_rank(
    fault: Fault,
    rank: int,
    meeting: Meeting,
    host: Host | None,
    output: Path,
    report: Reporter,
    go: int,
    parent: int,
    limit: float,
) -> NoReturn:
    """Never returns, whatever happens. `limit`: that of the process group."""
    try:
        kernel.die_with(parent)
        _redirect_output(output)
        os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
        if host is not None:
            host.enter()
        script = Script(fault, rank, Injection(fault, rank, report, go).reach)
        _run(fault, rank, script, meeting, report, limit)
    except BaseException:  # a fault of ours, and this process must not go on as a second parent
        traceback.print_exc()
    finally:
        os._exit(70)


def _run(fault: Fault, rank: int, script: Script, meeting: Meeting, report: Reporter, limit: float) -> None:
    is_master = rank == 0 and fault.store_in_rank_0
    store = [meeting.store(is_master)]
    if is_master:
        report.send("listening")
    before = belongings()  # with what remains of a store, which is torch's
    error: BaseException | None = None
    try:
        script.join(store[0], limit)
        report.send("finished", fingerprint=script.train())
    except BaseException as raised:
        error = raised
        report.send("raised", **_described(raised))
    # Not inside of the `except`: nothing is being handled any more when Python ends.
    if error is not None and rank == fault.rank and fault.kind in (Kind.RAISE, Kind.END):
        report.send("fault", at=time.monotonic())
        _end_as_python_does(error)
    if error is not None and not fault.caught:
        _end_as_python_does(error)
    error = None  # and with it all that its traceback holds
    store.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    report.send("left", what=left_behind(before))
    _end_as_python_does(None)


def _described(error: BaseException) -> dict[str, Any]:
    traceback.print_exception(error)
    return {
        "at": time.monotonic(),
        "error": type(error).__name__,
        "text": str(error),
        "blamed": list(getattr(error, "ranks", ())),
    }


def _end_as_python_does(error: BaseException | None) -> NoReturn:
    """What Python does at the end of a script, but for the parent's part of it, of which this process is a copy."""
    if isinstance(error, _ScriptOver):
        error = None
    if error is not None:
        sys.last_value = error
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


def _redirect_output(path: Path) -> None:
    """That of C++ included; by lines, so that a kill loses none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, all_threads=True)
