"""`with gradsync.trace(model, "out/"):` records what happens inside on all ranks, and rank 0 writes the timeline."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from gradsync import log
from gradsync.arguments import shown
from gradsync.engine.engine import Engine
from gradsync.errors import InvalidOptionError, NoProcessGroupError, WrongTypeError
from gradsync.observe.timeline.recording import Recording
from gradsync.replica import engine_of, engines_in
from gradsync.tracing.gathering import Gathering
from gradsync.tracing.tracer import Tracer

_log = log.logger()
# How long rank 0 waits for the others' records, and after an exception; how long they wait for its files.
_TELL_SECONDS, _FAULT_SECONDS, _WRITE_SECONDS = 30.0, 1.0, 600.0
_ALIKE = "Trace on all ranks, around the same steps."
_traced: Counter[str] = Counter()  # how often by module and round


@contextlib.contextmanager
def trace(module: nn.Module, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Records what happens inside on all ranks; at the end rank 0 writes a timeline into `folder`, and the others wait.

    There are then a report (report.html), the picture of a step (step.svg, and step.png if matplotlib is installed),
    and every step of every rank for Perfetto or Chrome (trace.json). All ranks enter and leave it together, around some
    whole steps; of many steps the latest are kept. What goes wrong in writing is told in the log, not raised. If
    something is raised inside, it goes on, and what was recorded until then is written.
    """
    first = engine_of(module, "trace()")
    engines = engines_in(module) or [first]
    target = folder_of(folder, first.transport.rank)
    tracer, gathering = Tracer(), gathering_of(engines[0])
    for engine in engines:
        tracer.listen(engine)
    try:
        yield
    except Exception as error:
        tracer.stop()
        finish(tracer, gathering, target, fault=f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    except BaseException:  # Ctrl-C, or the end of the process: nobody wants to wait
        tracer.stop()
        raise
    tracer.stop()
    line = finish(tracer, gathering, target)
    if line:
        _log.info("%s", line)


def folder_of(folder: object, rank: int) -> Path:
    """Made by rank 0, so that it is known at once if it can't be."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise WrongTypeError(f"trace(): the folder must be a path, but is {shown(folder)}.")
    path = Path(os.fsdecode(folder))
    if rank == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise InvalidOptionError(
                f"trace(): rank 0 can't write to {path}: {reason}. Give a folder that it can make."
            ) from None
    return path


def gathering_of(engine: Engine) -> Gathering:
    """For one trace that begins now. Known by the round: a rank that traced alone before is in step with the others."""
    lockstep = engine.reducer.lockstep
    topic = f"{lockstep.serial}/{lockstep.number}"
    _traced[topic] += 1
    try:
        return Gathering(engine.process_group, f"{topic}/{_traced[topic]}", engine.transport.check_alive)
    except KeyError:
        raise NoProcessGroupError(
            f"trace(): rank {engine.transport.rank} can't bring records to rank 0: the process group has no store. "
            "Make it with torch.distributed.init_process_group or new_group."
        ) from None


def finish(tracer: Tracer, gathering: Gathering, folder: Path, *, fault: str = "", waits: bool = True) -> str:
    """Brings all records together, and has rank 0 write them; gives it a line to say. Raises nothing.

    `fault`: what was raised here, after which nobody waits long. `waits`: whether other ranks wait for the files.
    """
    try:
        record = tracer.record(gathering.rank, fault)
        if gathering.rank != 0:
            gathering.tell(record)
            if not fault and not gathering.compare_clocks(2 * _TELL_SECONDS):
                _log.warning(
                    "rank %d: nothing is written to %s: no word from rank 0. %s", gathering.rank, folder, _ALIKE
                )
            elif not fault and waits:
                gathering.await_done(_WRITE_SECONDS)
            return ""
        try:
            records = gathering.hear(record, _FAULT_SECONDS if fault else _TELL_SECONDS)
            meetings = gathering.meetings(records)
            return _write(Recording(gathering.size, tuple(records)), meetings, folder)
        finally:
            gathering.done()
    except Exception as error:
        _log.warning("rank %d: the trace could not be written to %s: %r", gathering.rank, folder, error)
        return ""


def _write(recording: Recording, meetings: object, folder: Path) -> str:
    from gradsync.observe.timeline import clocks, files  # not before somebody traces

    if (missing := recording.missing) and not any(one.fault for one in recording.ranks):
        ranks = ", ".join(map(str, missing))
        _log.warning("the trace in %s is without rank %s: no word from there. %s", folder, ranks, _ALIKE)
    return files.write(clocks.align(recording, meetings), folder)  # type: ignore[arg-type]
