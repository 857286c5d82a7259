"""The faults of a rank, in the rank: they happen where the plan says, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.elastic.fault import FOLLOWING, Fault, Kind, Phase

FOLDER, HOST, STEPS = "PROOF_FOLDER", "PROOF_HOST", "PROOF_STEPS"
"""Variables of a rank's environment: where plan and records are, which host this is, how many steps there are."""
PLAN = "plan.json"
_SLOWEST = 0.5  # seconds a step


class PlantedError(Exception):
    """Of a script's own."""


class Planted:
    """What is planned for the slot that this process is in."""

    def __init__(self) -> None:
        self.folder, self.host = Path(os.environ[FOLDER]), int(os.environ.get(HOST, "0"))
        self.slot = int(os.environ.get("LOCAL_RANK", "0"))
        plan = self.folder / PLAN
        faults = [Fault.from_json(one) for one in json.loads(plan.read_text())] if plan.exists() else []
        self._all = [one for one in faults if not self._marker(one.number).exists()]
        self._mine = [one for one in self._all if (one.host, one.slot) == (self.host, self.slot)]
        self._mine = [one for one in self._mine if not one.is_outside]
        born = f"born.{self.host}.{self.slot}.*"
        self.is_again = len(list(self.folder.glob(born))) > 0
        (self.folder / f"born.{self.host}.{self.slot}.{os.getpid()}").write_text(str(time.monotonic()))
        self._records = os.open(self.folder / f"{self.host}.{self.slot}.{os.getpid()}.jsonl", os.O_CREAT | os.O_WRONLY)
        self._begun, self._paced = 0, 0

    def record(self, **what: Any) -> None:
        """In one write, so that it is there whole or not at all."""
        os.write(self._records, (json.dumps(what) + "\n").encode())

    # --- when ----------------------------------------------------------------------------------------

    def epoch_begins(self, step: int) -> None:
        """Of those who train together."""
        self._begun, self._paced = step, 0

    def pace(self, ranks: int) -> None:
        """Goes slowly while the next fault has to wait for ranks, which start for seconds."""
        self._all = [one for one in self._all if not self._marker(one.number).exists()]
        if self._all and (ranks < self._all[0].ranks or self._all[0].phase in FOLLOWING):
            self._paced += 1
            time.sleep(min(_SLOWEST, 0.04 * self._paced))

    def happens(self, phase: Phase, *, part: int = 0, step: int = 0, ranks: int = 0, epoch: int = 0) -> None:
        """What is planned for here and now."""
        for fault in self._mine:
            if fault.phase is not phase or fault.part != part or not self._is_due(fault, step, ranks):
                continue
            at = {"step": step, "epoch": epoch, "ranks": ranks, "pid": os.getpid()}
            if fault.is_timed:
                threading.Timer(fault.seconds, self._do, (fault, at)).start()
            else:
                self._do(fault, at)

    def _is_due(self, fault: Fault, step: int, ranks: int) -> bool:
        if self._marker(fault.number).exists():
            return False
        if not all(self._marker(number).exists() for number in range(fault.after)):
            return False
        return ranks >= fault.ranks and step >= self._begun + fault.wait if fault.phase.is_in_step else True

    def _marker(self, number: int) -> Path:
        return self.folder / f"fired.{number}"

    # --- what ----------------------------------------------------------------------------------------

    def _do(self, fault: Fault, at: dict[str, int]) -> None:
        if not mark(self.folder, fault.number, at):
            return
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.RAISE:
                raise PlantedError(f"planted, in step {at['step']}")
            case Kind.EXIT:
                sys.exit(3)
            case Kind.STOP:
                go_on = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
                with subprocess.Popen(["sh", "-c", go_on]):
                    os.kill(os.getpid(), signal.SIGSTOP)


def mark(folder: Path, number: int, at: dict[str, int]) -> bool:
    """That a fault happens now; False if it has happened."""
    part = folder / f"part.{number}.{os.getpid()}"
    part.write_text(json.dumps({"at": time.monotonic(), **at}))
    try:
        os.link(part, folder / f"fired.{number}")
    except FileExistsError:
        return False
    return True
