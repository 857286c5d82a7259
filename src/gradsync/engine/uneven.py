"""Ranks that run out of data early: they take part in the others' rounds until nobody has data left."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from torch.distributed.algorithms.join import JoinHook

from gradsync.errors import InvalidOptionError

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine

T = TypeVar("T")


class ShadowHook(JoinHook):
    """What torch's `Join` context calls on a rank without data, once for each forward of the others."""

    def __init__(self, engine: Engine, divide_by_initial_world_size: bool) -> None:
        self._engine = engine
        self._counted = divide_by_initial_world_size
        self._shadowed = False
        engine.buffers.joined = False
        engine.statistics.joined = True

    def main_hook(self) -> None:
        engine = self._engine
        engine.buffers.joined = True
        if announce_round(engine, False):
            engine.reducer.shadow(counted=self._counted)
            self._shadowed = True

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take over the model of one that went on to the end."""
        engine = self._engine
        engine.buffers.joined = None
        if self._shadowed:  # others' gradients, of use to a sharded optimizer beside us, but not beyond
            engine.reducer.drop_gradients()
        rows = engine.transport.gather([int(is_last_joiner)])
        source = max(rank for rank, (last,) in enumerate(rows) if last)
        engine.broadcast_from(source)
        engine.final_source = source


def announce_round(engine: Engine, coming: bool) -> bool:
    """In a `Join` context each forward says whether a round will follow; ranks without data listen."""
    return any(row[0] for row in engine.transport.gather([int(coming)]))


def uneven(engine: Engine, loader: Iterable[T]) -> Iterator[T]:
    """Goes through `loader`; then, while other ranks have data, over its last batch again with weight 0.

    A rank without data runs the same code as the others, so its optimizer takes the same steps.
    """
    batches = iter(loader)
    batch: list[T] = []
    try:
        while True:
            found = list(itertools.islice(batches, 1))
            if not any(row[0] for row in engine.transport.gather([len(found)])):
                return
            batch = found or batch
            if not batch:
                raise InvalidOptionError(
                    f"rank {engine.transport.rank}: gradsync.uneven() found no batch at all here, while other ranks "
                    "have some. A rank that has run out repeats its last batch with weight 0, so it needs at least one."
                )
            engine.sit_out(not found)
            yield batch[0]
    finally:
        engine.sit_out(None)
