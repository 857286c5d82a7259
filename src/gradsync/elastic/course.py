"""What a training goes over: which batches a step has. The number of the step says where in it the training is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from gradsync import arguments
from gradsync.data import Loader
from gradsync.errors import InvalidOptionError, WrongTypeError
from gradsync.invariant.shards import Shards


class Course(Protocol):
    steps: int
    """How many there are."""

    def batches(self, step: int) -> Sequence[Any]:
        """One for each of this rank's shards. Steps come one after the other, but for `look_again`."""

    def epoch(self, step: int) -> int:
        """Of the data."""

    def look_again(self) -> None:
        """This rank has other shards now, or the next step is not the one after the last."""

    def described(self) -> str:
        """In words that all ranks must have in common."""


class LoaderCourse:
    """A dataset, so many times."""

    def __init__(self, loader: Loader, epochs: int) -> None:
        self._loader, self._a_time = loader, len(loader)
        self.steps = epochs * self._a_time
        self._batches: Iterator[Any] | None = None

    def batches(self, step: int) -> Sequence[Any]:
        if self._batches is None or step % self._a_time == 0:
            self._loader.go_to(self.epoch(step), step % self._a_time)
            self._batches = iter(self._loader)
        found: Sequence[Any] = next(self._batches)
        return found

    def epoch(self, step: int) -> int:
        return step // self._a_time

    def look_again(self) -> None:
        self._batches = None  # workers of a loader end with it

    def described(self) -> str:
        return f"{self.steps} steps of {self._loader.state_dict() | {'epoch': 0, 'step': 0}}"


class FunctionCourse:
    """Batches that a function makes for a step."""

    def __init__(self, make: Callable[[int], Sequence[Any]], steps: int) -> None:
        self._make, self.steps = make, steps

    def batches(self, step: int) -> Sequence[Any]:
        return self._make(step)

    def epoch(self, step: int) -> int:
        return 0

    def look_again(self) -> None: ...

    def described(self) -> str:
        return f"{self.steps} steps"


def course_of(source: Any, epochs: int | None, steps: int | None, shards: Shards, rank: int) -> Course:
    """What was given to `Elastic.steps`, checked."""
    if isinstance(source, Loader):
        if steps is not None:
            raise InvalidOptionError(
                f"rank {rank}: steps= goes with a function; a loader is gone through epochs= times."
            )
        if source.shards is not shards:
            raise InvalidOptionError(
                f"rank {rank}: the loader cuts its dataset for other shards than these. Make it with those of the "
                "training: gradsync.data.Loader(dataset, training.shards, batch_size=...)."
            )
        count = arguments.integer("epochs", 1 if epochs is None else epochs)
        if count < 0:
            raise InvalidOptionError(f"rank {rank}: epochs must be 0 or more, but is {epochs}.")
        return LoaderCourse(source, count)
    if callable(source):
        if steps is None or epochs is not None:
            raise InvalidOptionError(
                f"rank {rank}: with a function that makes the batches of a step, say how many there are: steps=1000."
            )
        if arguments.integer("steps", steps) < 0:
            raise InvalidOptionError(f"rank {rank}: steps must be 0 or more, but is {steps}.")
        return FunctionCourse(source, arguments.integer("steps", steps))
    raise WrongTypeError(
        f"rank {rank}: training.steps() takes a gradsync.data.Loader, or a function that gives the batches of a step, "
        f"but was given {arguments.shown(source)}. Another loader can't be cut again when ranks die or come: "
        "give gradsync.data.Loader the dataset itself."
    )
