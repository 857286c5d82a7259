"""Runs one test in processes of its own, forked from one that has torch loaded."""

import ctypes
import faulthandler
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import suite
import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.distributed import distributed_test

FORK = multiprocessing.get_context("fork")
# How long the other ranks have to end once one has failed.
GRACE_SECONDS = 1.0
PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    status: str  # "pass", "fail", "skip" or "timeout"
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0
    processes: int = 0
    used_class: bool = False


# --- in the parent ----------------------------------------------------------


class Running:
    """One test under way, a process for each rank."""

    def __init__(self, case, implementation, asked_for, timeout):
        self.case = case
        self.timeout = timeout
        self.world_size = case.processes(asked_for)
        self.folder = Path(tempfile.mkdtemp(prefix="conformance-"))
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.pids = {}
        self.ended = {}  # how each rank ended that did so of itself
        # Kept as long as the test: memory of a barrier that is gone goes to the next one.
        self.barrier = FORK.Barrier(self.world_size)
        for rank in range(self.world_size):
            self.pids[rank] = _fork(case, implementation, rank, self.world_size, self.folder, self.barrier, timeout)

    def poll(self):
        """The outcome, once the test has ended or its time is up; None before."""
        for rank in self._going_on():
            end = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end:
                self.ended[rank] = end
                if self._report(rank)["status"] == "fail":
                    self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)
        if self._going_on() and time.monotonic() < self.deadline:
            return None
        if self._going_on():
            self._ask_for_stacks()
        outcome = self._judge()
        outcome.seconds = round(time.monotonic() - self.started, 2)
        outcome.processes = self.world_size
        self.close()
        return outcome

    def close(self):
        """Ends what still runs of the test.  A rank's own processes are in its group."""
        for pid in self.pids.values():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.waitpid(pid, 0)
        self.pids = {}
        shutil.rmtree(self.folder, ignore_errors=True)

    def _going_on(self):
        return sorted(self.pids.keys() - self.ended.keys())

    def _ask_for_stacks(self):
        for rank in self._going_on():
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.2)

    def _report(self, rank):
        path = _report_path(self.folder, rank)
        if path.exists():
            return json.loads(path.read_text())
        if rank in self.ended:
            return _report("fail", f"{_end(self.ended[rank])} in {_where(self._log(rank))}")
        return _report("timeout", f"no end after {self.timeout:g} s, in {_where(self._log(rank))}")

    def _log(self, rank):
        path = _log_path(self.folder, rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _judge(self):
        reports = {rank: self._report(rank) for rank in self.pids}
        used_class = any(report["used_class"] for report in reports.values())
        for status in ("fail", "timeout", "skip"):
            ranks = [rank for rank, report in reports.items() if report["status"] == status]
            if not ranks:
                continue
            # A rank that fails breaks its peers' connections: show the one that began.
            first = min(ranks, key=lambda r: ("gloo" in reports[r]["reason"], reports[r]["at"]))
            detail = "".join(
                f"--- rank {rank}: {report['status']} ---\n{report['detail']}{self._log(rank)}\n"
                for rank, report in reports.items()
                if report["status"] != "pass"
            )
            return Outcome(status, f"rank {first}: {reports[first]['reason']}", detail, used_class=used_class)
        return Outcome("pass", used_class=used_class)


def _fork(case, implementation, rank, world_size, folder, barrier, timeout):
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        _lead_group(pid)
        return pid
    try:
        _lead_group(0)
        _die_with(parent)
        report = _be_rank(case, implementation, rank, world_size, folder, barrier, timeout)
    except BaseException:
        report = _report_of_exception()
    finally:
        path = _report_path(folder, rank)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(report))
        unfinished.rename(path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _lead_group(pid):
    """Puts a rank in a group of its own; both it and its parent do, to be sure."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass


def _report_path(folder, rank):
    return folder / f"report{rank}.json"


def _log_path(folder, rank):
    return folder / f"log{rank}.txt"


def _report(status, reason="", detail=""):
    return {
        "status": status,
        "reason": reason,
        "detail": detail,
        "at": time.monotonic(),
        "used_class": False,
    }


def _report_of_exception():
    """Of the exception in hand: a line of it, and all of it."""
    kind, error, trace = sys.exc_info()
    frames = [f for f in traceback.extract_tb(trace) if "torch/testing/_internal" in f.filename]
    in_test = [f for f in frames if "/_internal/distributed/" in f.filename] or frames
    place = f" ({Path(in_test[-1].filename).name}:{in_test[-1].lineno})" if in_test else ""
    text = " ".join(str(error).split())
    return _report("fail", f"{kind.__name__}: {text[:160]}{place}", traceback.format_exc())


def _end(end):
    if end.si_code == os.CLD_EXITED:
        return f"ended with code {end.si_status}"
    return f"killed by {signal.Signals(end.si_status).name}"


def _where(log):
    """The innermost line, and the test's own, in a stack that a rank has written."""
    stack = log.rpartition("Current thread")[2].partition("\nThread ")[0]
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack)
    if not frames:
        return "an unknown place"
    in_test = next((f for f in frames if "/_internal/distributed/" in f[0]), frames[0])
    return " under ".join(
        f"{Path(path).name}:{line} ({function})" for path, line, function in dict.fromkeys([frames[0], in_test])
    )


# --- in a rank --------------------------------------------------------------


def _die_with(parent):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _be_rank(case, implementation, rank, world_size, folder, barrier, timeout):
    log = os.open(_log_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    _set_environment(world_size, folder)
    _share_barrier(barrier, world_size, timeout)
    use = _watch(implementation)

    try:
        _run_test(case, rank, world_size, folder, timeout)
        report = _report("pass")
    except unittest.SkipTest as skip:
        report = _report("skip", str(skip))
    except SystemExit as exit_:
        report = _report_of_exit(exit_.code)
    except BaseException:
        report = _report_of_exception()
    return report | {"used_class": use["times"] > 0}


def _set_environment(world_size, folder):
    for name in ("barrier", "test_dir", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    tempfile.tempdir = str(folder / "tmp")
    os.environ.update(
        WORLD_SIZE=str(world_size),
        TEMP_DIR=str(folder),
        TMPDIR=tempfile.tempdir,
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1",
    )


def _share_barrier(barrier, world_size, timeout):
    """Has the tests wait for each other by a semaphore, not by polling files."""
    by_files = distributed_test.Barrier.sync

    def sync(wait_for=None, timeout=timeout):
        if wait_for not in (None, world_size):
            return by_files(wait_for, timeout)
        try:
            barrier.wait(timeout)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"a peer was not at the barrier in {timeout:g} s") from None

    distributed_test.Barrier.sync = sync


def _watch(implementation):
    """Counts how often the class under test is made."""
    use = {"times": 0}
    real_init = implementation.__init__

    def __init__(self, *args, **kwargs):
        use["times"] += 1
        real_init(self, *args, **kwargs)

    implementation.__init__ = __init__
    return use


def _run_test(case, rank, world_size, folder, timeout):
    if case.name in suite.NEVER_RELOADED:
        distributed_test.INIT_METHOD = "env://"
    if case.name in suite.NEVER_COMPILED:
        torch._dynamo.config.disable = True
    _keep_groups()
    test = case.test_class(case.method)
    test.rank = rank
    test.file_name = str(folder / "store")
    if case.own_process_group:
        dist.init_process_group = _then_meet(dist.init_process_group)
    else:
        dist.init_process_group(
            "gloo",
            init_method=test.init_method,
            world_size=world_size,
            rank=rank,
            timeout=_group_timeout(case.method, timeout),
        )
        dist.init_process_group = _elsewhere(dist.init_process_group)
        test._barrier()
    common_utils.set_rng_seed()
    getattr(test, case.method)()
    if not case.own_process_group:
        test._barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _keep_groups():
    """Keeps each process group while the rank lives.

    Else, with torch's own class, about one run in 60 of ``test_ddp_comparison`` hung
    as its model was freed, the last to hold the group.  Why is not established; with
    the groups kept it was not seen again in 236 runs.
    """
    kept = []
    real_init, real_new = dist.init_process_group, dist.new_group

    def init_process_group(*args, **kwargs):
        real_init(*args, **kwargs)
        kept.append(dist.group.WORLD)

    def new_group(*args, **kwargs):
        kept.append(real_new(*args, **kwargs))
        return kept[-1]

    dist.init_process_group, dist.new_group = init_process_group, new_group


def _then_meet(init_process_group):
    """No rank goes on before all have the group: tests call into their peers."""

    def init_and_meet(*args, **kwargs):
        init_process_group(*args, **kwargs)
        distributed_test.Barrier.sync()

    return init_and_meet


def _elsewhere(init_process_group):
    """A default group made anew meets at a file of its own, not one in use before."""

    def init_at_own_file(*args, init_method, world_size, **kwargs):
        init_method = f"{init_method}-{world_size}"
        init_process_group(*args, init_method=init_method, world_size=world_size, **kwargs)

    return init_at_own_file


def _group_timeout(method, timeout):
    """Below the test's own limit, so that a collective that hangs says so."""
    upstream = distributed_test.CUSTOM_PG_TIMEOUT.get(method, distributed_test.default_pg_timeout)
    return timedelta(seconds=min(upstream, max(1.0, timeout * 0.5)))


def _report_of_exit(code):
    for skip in common_distributed.TEST_SKIPS.values():
        if skip.exit_code == code:
            return _report("skip", skip.message)
    return _report("fail", f"exit code {code}") if code else _report("pass")
