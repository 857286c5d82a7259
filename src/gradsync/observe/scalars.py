"""Statistics as scalars: for TensorBoard, wandb, Lightning's loggers, and whatever has one of their methods."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from gradsync import arguments, log
from gradsync.errors import InvalidOptionError, WrongTypeError
from gradsync.observe.costs import SECONDS
from gradsync.observe.statistics import Statistics, listen, unlisten

_log = log.logger()
_Write = Callable[[Mapping[str, float], int], object]


class ScalarLog:
    """Writes scalars until it is closed, or has failed. Also a context manager."""

    def __init__(
        self,
        write: _Write,
        statistics: Statistics | None,
        every: int,
        prefix: str,
        step: Callable[[], int] | None,
        every_rank: bool,
    ) -> None:
        self._write, self._every, self._prefix = write, every, prefix
        self._step, self._every_rank = step, every_rank
        self._of = weakref.ref(statistics) if statistics is not None else None
        self._is_given = statistics is not None
        listen(self._round_closed)

    def close(self) -> None:
        """Nothing is written any more. The writer is yours to close."""
        unlisten(self._round_closed)

    def __enter__(self) -> ScalarLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _round_closed(self, statistics: Statistics) -> None:
        if not self._is_given and (self._of is None or self._of() is None):  # whose round comes first, is logged
            self._of = weakref.ref(statistics)
        if self._of is None or self._of() is not statistics or statistics.rounds % self._every:
            return
        if statistics.rank != 0 and not self._every_rank:
            return
        try:
            step = statistics.rounds if self._step is None else self._step()
            self._write({self._prefix + name: value for name, value in scalars(statistics).items()}, step)
        except Exception:  # training is worth more than its log
            self.close()
            _log.exception("rank %d: statistics are not logged any more: their writer has raised", statistics.rank)


def scalars(statistics: Statistics) -> dict[str, float]:
    """Of the latest round, by name: seconds, bytes and shares. What is not known is left out."""
    costs = statistics.latest_costs
    found = {f"seconds/{'step' if name == 'seconds' else name}": getattr(costs, name) for name in SECONDS}
    found["seconds/outside"] = costs.outside
    found["overlap"] = costs.overlap
    found["overlapped_buckets"] = statistics.overlapped_buckets
    if costs.is_counted:
        found |= {"bytes/sent": costs.sent, "bytes/crossed": costs.crossed}
    if costs.bandwidth is not None:
        found["bytes/per_second"] = costs.bandwidth
    return found


def log_to(
    writer: Any,
    statistics: Statistics | None = None,
    *,
    every: int = 1,
    prefix: str = "gradsync/",
    step: Callable[[], int] | None = None,
    every_rank: bool = False,
) -> ScalarLog:
    """Writes what each `every`-th round has cost to `writer`, until the result is closed.

    `writer` has `add_scalar(name, value, step)` as TensorBoard's, `log_metrics(scalars, step=...)` as Lightning's
    loggers, or `log(scalars, step=...)` as a run of wandb's. `statistics`: of the replica that is meant, from
    `gradsync.statistics(model)`; without it that whose round comes first. `step`: called for the number that
    scalars are written with; else it is how many rounds there were. Call it on all ranks: rank 0 writes, unless
    `every_rank`. If the writer raises, the log says so, once, and training goes on without it.
    """
    if statistics is not None:
        arguments.instance("statistics", statistics, Statistics, "Pass gradsync.statistics(model).")
    arguments.instance("prefix", prefix, str, "Pass what names begin with, as 'gradsync/'.")
    if arguments.integer("every", every) < 1:
        raise InvalidOptionError(f"every must be 1 or more, but is {every}")
    if step is not None and not callable(step):
        raise WrongTypeError(f"step must be a function that gives a number, but is {arguments.shown(step)}.")
    every_rank = arguments.flag("every_rank", every_rank)
    return ScalarLog(_writing(writer), statistics, int(every), prefix, step, every_rank)


def _writing(writer: Any) -> _Write:
    """By what it has. Some have `log` besides, for something else."""
    if isinstance(writer, type):
        raise WrongTypeError(f"the writer must be an object, but is {arguments.shown(writer)}.")
    if callable(getattr(writer, "log_metrics", None)):
        return lambda scalars, step: writer.log_metrics(dict(scalars), step=step)
    if callable(getattr(writer, "add_scalar", None)):
        return lambda scalars, step: [writer.add_scalar(name, value, step) for name, value in scalars.items()]
    if callable(getattr(writer, "log", None)) and _takes_scalars(writer.log):
        return lambda scalars, step: writer.log(dict(scalars), step=step)
    raise WrongTypeError(
        f"the writer must have add_scalar(name, value, step), log_metrics(scalars, step=...) or log(scalars, "
        f"step=...), but is {arguments.shown(writer)}. Of a framework's trainer, pass its logger."
    )


def _takes_scalars(log: Callable[..., Any]) -> bool:
    try:
        inspect.signature(log).bind({}, step=0)
    except TypeError:
        return False
    except ValueError:  # it has no signature that Python knows
        pass
    return True
