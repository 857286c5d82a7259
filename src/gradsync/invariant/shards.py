"""`gradsync.Shards`: the same model, to the bit, from any number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from gradsync import arguments
from gradsync.engine.sharded_step import end_together
from gradsync.errors import InvalidOptionError, WrongTypeError
from gradsync.invariant.normalization import normalized_alone
from gradsync.invariant.random_state import Outside, seed_all, seed_of
from gradsync.replica import engines_in
from gradsync.transport.tree import shards_of

T = TypeVar("T")


class Shards:
    """Cuts each step of a replicated module into shards, a number that stays, however many ranks share them.

        shards = gradsync.Shards(model, 8)                      # after replicating it
        for batches in gradsync.data.Loader(dataset, shards, batch_size=16):
            for x, y in shards.each(batches):                   # this rank's shards, one after the other
                loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Gradients are added up in the order of a binary tree over the shards, buffers too, and random numbers belong to the
    shard and the step: 1, 2, 3, 4 or 8 ranks end with bitwise the same model.
    """

    def __init__(self, module: nn.Module | Sequence[nn.Module], shards: int, *, seed: int = 0, overlap: bool = True):
        """All ranks do this alike, after the module (or several, which are trained together) was replicated.

        `shards`: at least as many as there will ever be ranks. `seed`: of what is drawn in shards. `overlap`: the last
        shard's backward sends gradients while it computes; turn it off if shards run now one backward, now several.
        """
        modules = arguments.modules(module, "gradsync.Shards()")
        self.shards = arguments.integer("shards", shards)
        self.seed = arguments.integer("seed", seed)
        overlap = arguments.flag("overlap", overlap)
        engines = list(dict.fromkeys(engine for one in modules for engine in engines_in(one)))
        if not engines:
            raise InvalidOptionError(
                "gradsync.Shards() needs a replicated module: call gradsync.replicate(module) first, or wrap it."
            )
        self._transport = engines[0].transport
        if self.shards < 1:
            raise InvalidOptionError(f"shards must be 1 or more, but is {shards}.")
        self._engines = engines
        self._check_ranks()
        self._steps = [engine.add_up_shards(self.shards, overlap) for engine in engines]
        self._by_shard = [layer for one in modules for layer in one.modules() if isinstance(layer, nn.SyncBatchNorm)]
        self.step = 0
        """The number of the step under way, or of the next one."""
        self._latest: Callable[[], Generator[Any, None, None] | None] = lambda: None
        self._begun: int | None = None  # the step that was begun last

    @property
    def mine(self) -> range:
        """The shards that this rank computes, by their numbers."""
        self._check_ranks()
        transport = self._engines[0].transport
        return range(*shards_of(transport.rank, transport.size, self.shards))

    def each(self, batches: Sequence[T]) -> Iterator[T]:
        """This rank's batches of one step, one for each of its shards (`mine`).

        Inside the loop run forward and backward of a shard: once, or several times to accumulate. A shard that runs no
        backward counts for nothing. Behind the loop `.grad` is the mean over all shards, of all ranks.
        """
        mine = self.mine
        if isinstance(batches, (str, bytes)) or not isinstance(batches, Sequence):
            raise WrongTypeError(
                f"rank {self._rank}: shards.each() takes a list with a batch for each of this rank's shards, but was "
                f"given {arguments.shown(batches)}. gradsync.data.Loader makes such lists."
            )
        if len(batches) != len(mine):
            raise InvalidOptionError(
                f"rank {self._rank}: shards.each() was given {len(batches)} batches, but this rank computes "
                f"{len(mine)} of {self.shards} shards ({mine.start} to {mine.stop - 1}): it needs one for each. "
                "gradsync.data.Loader makes such lists."
            )
        if (latest := self._latest()) is not None:
            latest.close()
        made = self._each(batches, mine, getattr(batches, "weights", None))
        self._latest = weakref.ref(made)  # ends with the loop, also with one that raises
        return made

    def _each(self, batches: Sequence[T], mine: range, weights: Sequence[float] | None) -> Generator[T, None, None]:
        outside = Outside()
        step, self.step = self.step, self.step + 1
        ended = False
        try:
            self._begun = step
            for one in self._steps:
                one.begin(step)
            with normalized_alone(self._by_shard):
                for at, shard in enumerate(mine):
                    seed_all(seed_of(self.seed, step, shard))
                    last = at == len(mine) - 1
                    for one in self._steps:
                        one.begin_shard(last)
                        if weights is not None:
                            one.weigh(weights[at])
                    if weights is None or weights[at]:  # else there is nothing in it
                        yield batches[at]
                    for one in self._steps:
                        one.end_shard(last)
            end_together(self._steps)
            for one in self._steps:
                one.end()
            ended = True
        finally:
            for one in self._steps:
                one.leave()
            outside.put_back()
            if not ended:
                self.step = step

    def take_back(self, step: int) -> None:
        """As if this step, the one under way or the next one, had not been begun: also if it was computed to its end,
        as long as no optimizer has used it. Gradients are dropped."""
        if (latest := self._latest()) is not None:
            latest.close()
        if self._begun == step:
            for one in self._steps:
                one.take_back()
        self.step, self._begun = step, None

    def drop_gradients(self) -> None:
        for one in self._steps:
            one.drop_gradients()

    def go_to(self, step: int) -> None:
        """The next step is this one, of a state that was taken over."""
        self.step, self._begun = step, None

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs to go on with the same random numbers, on however many ranks."""
        return {"shards": self.shards, "seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where a training with as many shards was."""
        if state.get("shards") != self.shards:
            raise InvalidOptionError(
                f"rank {self._rank}: the checkpoint was made with {state.get('shards')} shards, but there are "
                f"{self.shards} now. The number stays for the whole training: give the same one."
            )
        self.seed = int(state["seed"])
        self.go_to(int(state["step"]))

    @property
    def _rank(self) -> int:
        return self._engines[0].transport.rank

    def _check_ranks(self) -> None:
        for engine in self._engines:
            if engine.transport.size > self.shards:
                raise InvalidOptionError(
                    f"rank {self._rank}: {engine.transport.size} ranks can't share {self.shards} shards: some would "
                    "have none. Give at least as many shards as there will ever be ranks, from the first step on."
                )
