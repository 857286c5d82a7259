"""Ranks that run out of data early: they take part in the others' rounds until nobody has data left."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from gradsync.errors import GradsyncError, InvalidOptionError, JoinError, ReplicaLostError
from gradsync.transport.base import Transport
from gradsync.watch.explanation import explain
from gradsync.watch.patience import lost_meanwhile

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine

T = TypeVar("T")
HAS_DATA, HAS_NO_DATA = 1, 0
_NEWS_SECONDS = 1.0  # that news of a loss may take, after c10d has noticed it
_awaited: weakref.WeakSet[Joining] = weakref.WeakSet()  # rounds that were announced and have not closed


class Joining:
    """A replicated module inside a `Join` context, on a rank that still has data.

    Ranks without data wait for word of each round, which the forward before it gives. Several forwards before one
    backward are one round; a round that no forward spoke of (a second backward, or one whose forward was inside
    `no_sync`) is announced when it opens.
    """

    def __init__(self, engine: Engine, joinable: Any, config: Any) -> None:
        self.config = config
        self._engine = engine
        self._joinable = weakref.ref(joinable)  # which has us
        self._announced = False  # a round that has not come yet
        if config.is_first_joinable:  # a new context: what one that raised has left is forgotten
            _awaited.clear()
        self._stop_dividing = engine.divide_before_arrivals()

    def forward_begins(self) -> None:
        """Says whether a round follows. Not if somebody only evaluates, perhaps on one rank alone."""
        evaluates = not torch.is_grad_enabled() and not self._engine.module.training
        if not evaluates and not self._announced:
            self._announce(self._engine.synchronizing)

    def round_opens(self) -> None:
        if not self._announced:
            self._announce(True)

    def round_closed(self) -> None:
        self._announced = False
        _awaited.discard(self)

    def left(self) -> None:
        """The context is over."""
        self.round_closed()
        self._stop_dividing()
        self._engine.reducer.rescale(with_data=1.0)

    def _announce(self, coming: bool) -> None:
        engine = self._engine
        if others := [other for other in _awaited if other._engine is not engine]:
            raise InvalidOptionError(
                f"rank {engine.transport.rank}: a forward of {type(engine.module).__name__} in a Join context, while "
                f"the backward of {type(others[0]._engine.module).__name__} has yet to come. Ranks without data shadow "
                "one replica after the other: run each one's forward and backward in turn, or replicate them as one, "
                "with gradsync.replicate([first, second])."
            )
        joinable: Any = self._joinable()
        with _left_alone(engine):
            work = Join.notify_join_context(joinable)
            if work is not None:
                work.wait()
            rows = engine.transport.gather([int(coming), HAS_DATA])
        self._announced = coming
        if coming:
            _awaited.add(self)
        if engine.counts_without_data or engine.reducer.hooked:
            # What is in `.grad` already comes from these ranks only, and must not shrink by those without data.
            engine.reducer.rescale(with_data=sum(has_data for _, has_data in rows) / len(rows))


class ShadowHook(JoinHook):
    """What torch's `Join` context calls on a rank without data, each time the others say that they have some."""

    def __init__(self, engine: Engine, divide_by_initial_world_size: bool) -> None:
        self._engine = engine
        self._shadowed = False
        engine.count_without_data(divide_by_initial_world_size)

    def main_hook(self) -> None:
        engine = self._engine
        with _left_alone(engine):
            if any(coming for coming, _ in engine.transport.gather([0, HAS_NO_DATA])):
                engine.shadow_round()
                self._shadowed = True

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take over the model of one that went on to the end."""
        engine = self._engine
        engine.join(None)
        if self._shadowed:  # others' gradients, of use to a sharded optimizer beside us, but not beyond
            engine.reducer.group.drop_gradients()
        with _left_alone(engine):
            rows = engine.transport.gather([int(is_last_joiner)])
            source = max(rank for rank, (last,) in enumerate(rows) if last)
            engine.end_join(source)


@contextlib.contextmanager
def _left_alone(engine: Engine) -> Iterator[None]:
    """What c10d says when a rank does not answer, in words that fit a `Join` context."""
    try:
        yield
    except GradsyncError:
        raise
    except RuntimeError as error:
        if "exhausted inputs" in str(error):  # `throw_on_early_termination`: torch's own words are clear
            raise
        raise left_alone(engine.transport, error) from error


def left_alone(transport: Transport, error: BaseException) -> Exception:
    """What to raise for what c10d has said: who is lost, if that is so; else where the others are."""
    where = ""
    if (watch := transport.watch) is not None:
        lost = lost_meanwhile(watch, _NEWS_SECONDS)
        if isinstance(lost, ReplicaLostError):  # else another rank has given up too
            return lost
        where = explain([row for row in watch.where() if row.rank != transport.rank], watch.ended())
    where = f"\n{where}\n" if where else " "
    return JoinError(
        f"rank {transport.rank}: inside a Join context not every rank answered: {error}. A rank that raises inside it, "
        f"or never enters it, leaves the others alone: look at its error first.{where}To go on, "
        "move the module to a new group, with change_process_group(dist.new_group()), and enter a new context."
    )


def uneven(engines: Sequence[Engine], loader: Iterable[T]) -> Iterator[T]:
    """Goes through `loader`; then, while other ranks have data, over its last batch again with weight 0.

    A rank without data runs the same code as the others, so its optimizer takes the same steps. `engines` are those
    of a module and of the replicated modules inside it.
    """
    transport = engines[0].transport
    batches = iter(loader)
    batch: list[T] = []
    try:
        while True:
            found = list(itertools.islice(batches, 1))
            if not any(row[0] for row in transport.gather([len(found)])):
                return
            batch = found or batch
            if not batch:
                raise InvalidOptionError(
                    f"rank {transport.rank}: gradsync.uneven() found no batch at all here, while other ranks "
                    "have some. A rank that has run out repeats its last batch with weight 0, so it needs at least one."
                )
            for engine in engines:
                engine.set_out_of_data(not found)
            yield batch[0]
    finally:
        for engine in engines:
            engine.set_out_of_data(None)
