"""One rank's part: listens to engines, and describes them when all is recorded."""

from __future__ import annotations

import os
import platform
import weakref
from pathlib import Path

import torch

from gradsync.engine.engine import Engine
from gradsync.observe.timeline.recorder import ModuleRecorder
from gradsync.observe.timeline.recording import BucketContents, ModuleRecord, PhaseSpan, RankRecord


class Tracer:
    """Listens to some engines of this rank. While it does not, it costs nothing."""

    def __init__(self) -> None:
        self._recorders: weakref.WeakKeyDictionary[Engine, ModuleRecorder] = weakref.WeakKeyDictionary()

    def listen(self, engine: Engine) -> None:
        """From now on."""
        self._recorders[engine] = recorder = ModuleRecorder(engine.transport.size)
        engine.add_recorder(recorder.round_closed)
        engine.stopwatch.listen(recorder.phase_ended)

    def stop(self) -> None:
        """What was recorded stays. Not to be called by a recorder."""
        for engine, recorder in self._recorders.items():
            engine.remove_recorder(recorder.round_closed)
            engine.stopwatch.unlisten(recorder.phase_ended)

    def forget(self) -> None:
        """What was recorded so far."""
        for recorder in self._recorders.values():
            recorder.forget()

    @property
    def rounds(self) -> int:
        """How many are kept."""
        return sum(len(recorder.rounds) for recorder in self._recorders.values())

    def record(self, rank: int, fault: str = "") -> RankRecord:
        """All of it. `fault`: what has ended it before its time."""
        found = [(_serial(engine), engine, recorder) for engine, recorder in self._recorders.items()]
        found.sort(key=lambda one: one[0])
        spans = [PhaseSpan(serial, *span) for serial, _, recorder in found for span in recorder.spans]
        rounds = [event for _, _, recorder in found for event in recorder.rounds]
        return RankRecord(
            rank=rank,
            host=platform.node(),
            clock=_clock(),
            threads=torch.get_num_threads(),
            cpus=tuple(sorted(os.sched_getaffinity(0))),
            modules=tuple(_describe(engine, recorder.left_out) for _, engine, recorder in found),
            spans=tuple(sorted(spans, key=lambda span: span.began_at)),
            rounds=tuple(sorted(rounds, key=lambda event: event.closed_at)),
            fault=fault,
        )


def _serial(engine: Engine) -> int:
    return engine.reducer.lockstep.serial


def _describe(engine: Engine, left_out: int) -> ModuleRecord:
    group, transport = engine.reducer.group, engine.transport
    buckets = []
    for bucket in group.plan.buckets if group.plan is not None else ():
        names = [group.name(place.index) for place in bucket.places]
        buckets.append(BucketContents(bucket.nbytes, len(names), names[0], names[-1]))
    name, hook = type(engine.module).__name__, engine.statistics.hook
    return ModuleRecord(_serial(engine), name, transport.name, transport.reason, hook, tuple(buckets), left_out)


def _clock() -> str:
    """The same for processes in which `time.perf_counter` reads the same: the kernel, and its time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return f"{platform.node()}/{os.getpid()}"
