"""One elastic training that is disturbed, from the start of its launchers to what its ranks have left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from gradsync.cli import kernel
from gradsync.cli.chaos.hosts import Host
from gradsync.cli.crowding import Stopwatch, crowding
from tests.elastic.fault import Fault, Kind
from tests.elastic.planted import FOLDER, HOST, PLAN, STEPS, mark

SCRIPT = Path(__file__).with_name("script.py")
ROOT = Path(__file__).parents[2]
_LOOK_SECONDS = 0.02
_QUIET_SECONDS = 40.0  # on an idle machine: where nothing happens for so long, it hangs
_LONGEST_STOP = 2.0
_PORT = 29_600  # on hosts of our own
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to start, and what is to happen to it."""

    transport: str
    steps: int
    ranks: str = "2:4"
    faults: Sequence[Fault] = ()
    hosts: Sequence[Host] = ()
    """Two of them, or none: then it is this machine."""
    slots: int = 2
    """Ranks of each host, if there are some."""
    max_restarts: int = 20
    wait: float | None = None
    options: Sequence[str] = ()


@dataclass
class Result:
    codes: list[int]
    """Of launchers that were not killed."""
    said: str
    records: dict[str, list[Record]]
    """By process; in the order of its steps."""
    fired: dict[int, Record]
    hung: str = ""
    """Where everybody was, if it did not end."""
    seconds: float = 0.0
    stops: list[Record] = field(default_factory=list)
    """What has not lasted."""
    born: dict[str, float] = field(default_factory=dict)
    """When each process began."""

    @property
    def steps(self) -> Iterator[tuple[str, Record]]:
        """All that were finished anywhere."""
        return ((name, one) for name, records in self.records.items() for one in records if "step" in one)

    @property
    def ends(self) -> list[Record]:
        """What those had who saw the end."""
        return [one for records in self.records.values() for one in records if "end" in one]

    def wrong(self, truth: Result) -> list[str]:
        """In what it differs from an undisturbed training, in words."""
        (undisturbed,) = truth.records.values()
        right = {one["step"]: one for one in undisturbed if "step" in one}
        wrong = [f"hangs:\n{self.hung}"] if self.hung else []
        wrong += [f"exit codes {self.codes}"] if any(self.codes) else []
        for name, one in self.steps:
            step, there = one["step"], right[one["step"]]
            if one["fingerprint"] != there["fingerprint"]:
                wrong.append(f"{name}: other parameters after step {step}")
            if one["stepped"] != step + 1:
                wrong.append(f"{name}: {one['stepped']} steps of the optimizer after step {step}")
            if one["samples"] != _share(there["samples"], one["rank"], one["ranks"]):
                wrong.append(f"{name}: other samples in step {step}: {one['samples']}")
        for name, records in self.records.items():
            steps = [one["step"] for one in records if "step" in one]
            if any(after <= before for before, after in pairwise(steps)):
                wrong.append(f"{name}: a step twice: {steps}")
        if not self.hung and not any(self.codes):
            wrong += [] if self.ends else ["nobody has seen the end"]
            for one in self.ends:
                at_end = right[one["steps"] - 1]["fingerprint"] if one["steps"] else ""
                if one["fingerprint"] != at_end or one["steps"] != self._last + 1:
                    wrong.append(f"ended with {one['steps']} steps, or other parameters")
        return wrong

    @property
    def _last(self) -> int:
        return max((one["step"] for _, one in self.steps), default=-1)

    def seconds_lost(self, fault: Fault) -> float | None:
        """From a loss to the first step that survivors have finished in a later epoch, beyond a step's time."""
        at = self.fired[fault.number]
        took = sorted(one["took"] for _, one in self.steps)
        if any(-_LONGEST_STOP < at["at"] - one["at"] < _LONGEST_STOP for one in self.stops):
            return None  # somebody was waited for who would come back
        later = [
            one["at"]
            for name, one in self.steps
            if self.born.get(name, 0.0) < at["at"] < one["at"] and one["epoch"] > at["epoch"]
        ]
        return max(0.0, min(later) - at["at"] - took[len(took) // 2]) if later else None


def _share(samples: Sequence[Sequence[int]], rank: int, ranks: int) -> list[Sequence[int]]:
    """Of a step: the shards of a rank."""
    from gradsync.transport.tree import shards_of

    begin, end = shards_of(rank, ranks, 8)
    return list(samples[begin:end])


def truth(steps: int) -> Result:
    """What one rank comes to, which nobody disturbs."""
    with _folder() as folder:
        done = subprocess.run(
            [sys.executable, SCRIPT], env=_environment(folder, steps), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return _result(folder, [0])


def run(plan: Plan, dice: Random, folder: Path | None = None) -> Result:
    """`folder`: where a checkpoint may be, and is left."""
    with _folder(folder) as here:
        return _Job(plan, dice, here).run()


class _Job:
    def __init__(self, plan: Plan, dice: Random, folder: Path) -> None:
        self._plan, self._dice, self._folder = plan, dice, folder
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: list[int] = []
        self._outside = [one for one in plan.faults if one.is_outside]
        self._due: tuple[float, Fault] | None = None
        self._again: list[tuple[float, int]] = []
        self._started_again: dict[int, float] = {}
        (folder / PLAN).write_text(json.dumps([one.to_json() for one in plan.faults]))

    def run(self) -> Result:
        began, hung = time.monotonic(), ""
        try:
            self._launch(0)
            if self._plan.hosts:
                self._again.append((time.monotonic() + self._dice.uniform(0.5, 4.0), 1))
            watch, seen = Stopwatch(), 0
            while not self._is_over():
                time.sleep(_LOOK_SECONDS)
                self._act()
                if (now := self._progress()) != seen:
                    watch, seen = Stopwatch(), now
                if watch.seconds > _QUIET_SECONDS:
                    hung = self._ask_where()
                    break
        finally:
            self._end()
        result = _result(self._folder, self._codes)
        result.stops = [
            result.fired[one.number]
            for one in self._plan.faults
            if one.kind is Kind.STOP and one.number in result.fired
        ]
        result.hung, result.seconds = hung, time.monotonic() - began
        return result

    # --- launchers -----------------------------------------------------------------------------------

    def _launch(self, host: int) -> None:
        plan = self._plan
        ranks = ["--ranks", plan.ranks]
        prefix: list[str] = []
        if plan.hosts:
            prefix = ["ip", "netns", "exec", plan.hosts[host].namespace]
            where = f"{plan.hosts[0].address}:{_PORT}"
            # A host of our own has the machine's name, by which torch looks for the one with the endpoint.
            configuration = f"is_host={int(host == 0)}"
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-conf", configuration]
            ranks = ["--nnodes", f"1:{len(plan.hosts)}", "--nproc-per-node", str(plan.slots), *meeting]
        command = [*prefix, sys.executable, "-m", "gradsync.cli", "run", "--elastic", *ranks]
        command += ["--max-restarts", str(plan.max_restarts), *(["--wait", str(plan.wait)] if plan.wait else [])]
        variables = {"GRADSYNC_TRANSPORT": plan.transport, HOST: str(host)}
        if plan.hosts:
            variables["GLOO_SOCKET_IFNAME"] = plan.hosts[host].interface
        with (self._folder / f"said.{host}").open("ab") as output:
            self._launchers[host] = subprocess.Popen(
                [*command, *plan.options, str(SCRIPT)],
                env={**_environment(self._folder, plan.steps), **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _is_over(self) -> bool:
        for host, one in list(self._launchers.items()):
            if one.poll() is not None:
                self._codes.append(one.returncode)
                del self._launchers[host]
        if 0 not in self._launchers:
            self._end_late()
        return not self._launchers

    def _end_late(self) -> None:
        """Who was started again, and has met nobody before all was over."""
        for host, one in list(self._launchers.items()):
            if host in self._started_again and not any(
                path.stat().st_mtime > self._started_again[host] for path in self._folder.glob(f"born.{host}.*")
            ):
                one.kill()
                one.wait()
                del self._launchers[host]

    def _end(self) -> None:
        for one in self._launchers.values():
            one.kill()
            one.wait()
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- ranks ---------------------------------------------------------------------------------------

    def _pids(self, host: int | None = None, slot: int | None = None) -> list[int]:
        """Of ranks that live, the latest last."""
        found: list[tuple[float, int]] = []
        for path in self._folder.glob(f"born.{'*' if host is None else host}.{'*' if slot is None else slot}.*"):
            pid = int(path.suffix[1:])
            if kernel.is_running(pid) and str(SCRIPT) in kernel.command_line(pid):
                found.append((path.stat().st_mtime, pid))
        return [pid for _, pid in sorted(found)]

    def _progress(self) -> int:
        """Grows with all that happens."""
        total = 0
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                total += 1 + path.stat().st_size
        return total

    def _ask_where(self) -> str:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0 * crowding())
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("said.*")))

    # --- faults from outside -------------------------------------------------------------------------

    def _act(self) -> None:
        now = time.monotonic()
        for due, host in self._again:
            if now > due and 0 in self._launchers:  # else there is nobody to join
                self._launch(host)
                self._started_again[host] = time.time()
        self._again = [(due, host) for due, host in self._again if now <= due]
        if self._due is None and self._outside:
            fault = self._outside[0]
            if all((self._folder / f"fired.{number}").exists() for number in range(fault.after)):
                latest = self._latest()
                if latest.get("ranks", 0) >= fault.ranks:
                    self._due = now + fault.wait * 0.02 + fault.seconds, fault
        elif self._due is not None and now > self._due[0]:
            if self._do(self._due[1]):
                self._outside.pop(0)
            self._due = None

    def _latest(self) -> Record:
        """The step that was finished last, by anybody."""
        found: Record = {}
        for path in self._folder.glob("*.jsonl"):
            lines = _lines(path)
            if lines and lines[-1].get("at", 0.0) > found.get("at", 0.0) and "step" in lines[-1]:
                found = lines[-1]
        return found

    def _do(self, fault: Fault) -> bool:
        pids = self._pids(fault.host, None if fault.kind.is_of_host else fault.slot)
        if not pids or (fault.kind.needs_hosts and fault.host not in self._launchers):
            return False
        latest = self._latest()
        at = {"step": latest["step"], "epoch": latest["epoch"], "ranks": latest["ranks"], "pid": pids[-1]}
        if fault.kind.needs_hosts:
            one = self._launchers.pop(fault.host)
            one.kill()
            one.wait()
            self._again.append((time.monotonic() + 0.5, fault.host))
        for pid in () if fault.kind is Kind.LAUNCHER else pids if fault.kind.is_of_host else pids[-1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        mark(self._folder, fault.number, at)
        return True


def _environment(folder: Path, steps: int) -> Mapping[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        FOLDER: str(folder),
        STEPS: str(steps),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def _folder(given: Path | None = None) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="gradsync-proof-")) if given is None else given
    made.mkdir(exist_ok=True)
    try:
        yield made
    finally:
        if given is None:
            shutil.rmtree(made)


def _lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _result(folder: Path, codes: list[int]) -> Result:
    said = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("said.*")))
    return Result(
        codes=codes,
        said=said,
        records={path.stem: _lines(path) for path in sorted(folder.glob("*.jsonl"))},
        fired={int(path.suffix[1:]): json.loads(path.read_text()) for path in folder.glob("fired.*")},
        born={path.name.partition(".")[2]: float(path.read_text() or 0) for path in folder.glob("born.*")},
    )
