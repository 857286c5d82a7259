"""A dataset cut into the shards of each step: every sample exactly once an epoch, the same ones on any number of ranks.

    loader = gradsync.data.Loader(dataset, shards, batch_size=16, num_workers=2)
    for batches in loader:                   # a step: one batch for each of this rank's shards
        for x, y in shards.each(batches):
            ...

An epoch is a permutation by seed and epoch, cut into steps, and each step into shards. What is random in loading a
sample (augmentation) belongs to the shard and the step, also in workers. `state_dict()` says how far it is, and any
number of ranks goes on from there, in the middle of an epoch too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from gradsync import arguments
from gradsync.errors import InvalidOptionError, WrongTypeError
from gradsync.invariant.random_state import Outside, seed_all, seed_of
from gradsync.invariant.shards import Shards

_OURS = ("sampler", "batch_sampler", "batch_size", "generator", "dataset")


class Batches(list[Any]):
    """Of one step, one for each of this rank's shards; None where the dataset had nothing left for a shard."""

    def __init__(self, batches: Iterable[Any] = (), weights: list[float] | None = None) -> None:
        super().__init__(batches)
        self.weights = weights
        """How much the shards count, if they have different numbers of samples."""


class Cut:
    """Which samples each shard of each step has: pure arithmetic, the same on all ranks."""

    def __init__(self, samples: int, shards: int, batch_size: int, shuffle: bool, drop_last: bool, seed: int) -> None:
        self.shards, self.batch_size, self.seed = shards, batch_size, seed
        self._samples, self._shuffle = samples, shuffle
        whole, rest = divmod(samples, shards * batch_size)
        self.steps = whole if drop_last or not rest else whole + 1
        self._permuted: tuple[int, torch.Tensor] | None = None

    def bounds(self, step: int, shard: int) -> tuple[int, int]:
        """Where in the epoch's order the samples are. The last step has what is left, as evenly as it goes."""
        first = step * self.shards * self.batch_size
        count = min(self._samples - first, self.shards * self.batch_size)
        each, more = divmod(count, self.shards)
        start = first + shard * each + min(shard, more)
        return start, start + each + (shard < more)

    def counts(self, step: int) -> list[int]:
        """How many each shard has."""
        return [stop - start for start, stop in (self.bounds(step, shard) for shard in range(self.shards))]

    def samples(self, epoch: int, step: int, shard: int) -> list[int]:
        """Their numbers in the dataset."""
        start, stop = self.bounds(step, shard)
        if not self._shuffle:
            return list(range(start, stop))
        if self._permuted is None or self._permuted[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            self._permuted = epoch, torch.randperm(self._samples, generator=generator)
        found: list[int] = self._permuted[1][start:stop].tolist()
        return found


class _Numbers(list[int]):
    """Of the samples of one batch, with the seed for what is random in loading them."""

    def __init__(self, numbers: Iterable[int], seed: int) -> None:
        super().__init__(numbers)
        self.seed = seed

    def __reduce__(self) -> Any:
        return _Numbers, (list(self), self.seed)


class _Wanted:
    """The batches of some shards, step after step, as torch's loader asks for them."""

    def __init__(self, cut: Cut, epoch: int, step: int, shards: Sequence[int]) -> None:
        self._cut, self._epoch, self._first, self._mine = cut, epoch, step, shards

    def __iter__(self) -> Iterator[_Numbers]:
        for step in range(self._first, self._cut.steps):
            for shard in self._mine:
                if found := self._cut.samples(self._epoch, step, shard):
                    yield _Numbers(found, seed_of(self._cut.seed, self._epoch, step, shard))


class _Seeded:
    """The dataset, which gives whole batches, and draws the same random numbers for each wherever it is loaded."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, numbers: _Numbers) -> Any:
        outside = Outside() if get_worker_info() is None else None  # a worker has its generators for this alone
        try:
            seed_all(numbers.seed)
            several = getattr(self._dataset, "__getitems__", None)
            found = [self._dataset[one] for one in numbers] if several is None else several(list(numbers))
            return self._collate(found)
        finally:
            if outside is not None:
                outside.put_back()


def _as_it_is(batch: Any) -> Any:
    return batch


class Loader:
    """`for batches in loader`: a step's batches, one for each of this rank's shards, for `shards.each(batches)`."""

    def __init__(
        self,
        dataset: Any,
        shards: Shards,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """`dataset`: anything with `len()` and numbers. `batch_size`: samples of one shard in one step.

        `drop_last`: leaves out the last step if it is not whole; else its shards have fewer samples, and each sample
        counts alike. `seed`: of the order; that of `shards`, if not given. `options` are those of torch's `DataLoader`:
        `num_workers`, `collate_fn`, `pin_memory` and so on.
        """
        arguments.instance("shards", shards, Shards, "Make them first: gradsync.Shards(model, 8).")
        if isinstance(dataset, (DataLoader, IterableDataset)) or not hasattr(dataset, "__getitem__"):
            raise WrongTypeError(
                f"the dataset must have len() and numbered samples, but is {arguments.shown(dataset)}: what comes one "
                "after the other can't be cut into shards. Give the dataset itself, not a loader; or read a stream "
                "by shard in your own code, a list with a batch for each of shards.mine, for shards.each()."
            )
        if not hasattr(dataset, "__len__"):
            raise WrongTypeError(f"the dataset must have len(), but is {arguments.shown(dataset)}.")
        self.batch_size = arguments.integer("batch_size", batch_size)
        if self.batch_size < 1:
            raise InvalidOptionError(f"batch_size must be 1 or more, the samples of one shard, but is {batch_size}.")
        for name in _OURS:
            if name in options:
                raise InvalidOptionError(
                    f"{name} can't be given: which samples a batch has is decided by the shards. Choose shuffle, "
                    "drop_last and seed instead."
                )
        self._shards, self._dataset = shards, dataset
        self._shuffle, self._drop_last = arguments.flag("shuffle", shuffle), arguments.flag("drop_last", drop_last)
        self.seed = shards.seed if seed is None else arguments.integer("seed", seed)
        self._options = options
        self._collate = options.pop("collate_fn", None) or default_collate
        self._cut = self._make_cut()
        if not self._cut.steps:
            raise InvalidOptionError(
                f"the dataset has {len(dataset)} samples, not enough for one step of {shards.shards} shards with "
                f"{self.batch_size} samples each. Make batch_size smaller, or leave out drop_last."
            )
        self.epoch = 0
        """The one under way, or the next one; each new `for` begins the next."""
        self.step = 0
        """How many steps of it have been given."""
        self._begun = False

    def _make_cut(self) -> Cut:
        samples = len(self._dataset)
        return Cut(samples, self._shards.shards, self.batch_size, self._shuffle, self._drop_last, self.seed)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._cut.steps

    def __iter__(self) -> Iterator[Batches]:
        if self._begun or self.step >= len(self):
            self.epoch, self.step = self.epoch + 1, 0
        self._begun = True
        return self._steps(self.epoch)

    def _steps(self, epoch: int) -> Iterator[Batches]:
        mine = self._shards.mine
        loader: DataLoader[Any] = DataLoader(
            _Seeded(self._dataset, self._collate),  # type: ignore[arg-type]
            batch_sampler=_Wanted(self._cut, epoch, self.step, mine),
            collate_fn=_as_it_is,
            **self._options,
        )
        loaded = iter(loader)
        while self.step < len(self):
            counts = self._cut.counts(self.step)
            batches = [next(loaded) if counts[shard] else None for shard in mine]
            weights = [counts[shard] / self.batch_size for shard in mine] if len(set(counts)) > 1 else None
            self.step += 1
            yield Batches(batches, weights)

    def state_dict(self) -> dict[str, int]:
        """How far it is, for a checkpoint: the steps that were given are done."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "samples": len(self._dataset),
        } | self._shape()

    @property
    def shards(self) -> Shards:
        """For which it cuts the dataset."""
        return self._shards

    def go_to(self, epoch: int, step: int) -> None:
        """The next `for` begins there."""
        self.epoch, self.step, self._begun = epoch, step, False

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next `for` goes on from there."""
        for name, here in {**self._shape(), "samples": len(self._dataset)}.items():
            if state.get(name) != here:
                raise InvalidOptionError(
                    f"the checkpoint was made with {name}={state.get(name)}, but here it is {here}: the steps would "
                    "have other samples. Use the same, or begin a new epoch without loading the loader's state."
                )
        self.seed = int(state["seed"])
        self.go_to(int(state["epoch"]), int(state["step"]))
        self._cut = self._make_cut()

    def _shape(self) -> dict[str, int]:
        return {"shards": self._shards.shards, "batch_size": self.batch_size}


def cut(shards: Shards, *tensors: torch.Tensor) -> list[Any]:
    """This rank's parts of a step's whole batch, one for each of its shards: tensors, or tuples of several."""
    lengths = {len(one) for one in tensors}
    if len(lengths) != 1 or lengths.pop() % shards.shards:
        raise InvalidOptionError(
            f"a batch of {', '.join(str(len(one)) for one in tensors) or 'nothing'} samples can't be cut into "
            f"{shards.shards} shards of the same size. Make its size a multiple of {shards.shards}, or use "
            "gradsync.data.Loader."
        )
    parts = [tuple(one.chunk(shards.shards)[shard] for one in tensors) for shard in shards.mine]
    return [part if len(tensors) > 1 else part[0] for part in parts]


__all__: Sequence[str] = ["Batches", "Loader", "cut"]
