"""The exception family. Every message says which rank, which parameter or step, and the cure.

Where torch raises `RuntimeError`, `ValueError`, `TypeError` or `AssertionError` for the same mistake, the class
derives from that too, so that handlers written for torch's own front still catch ours.
"""

from __future__ import annotations

from collections.abc import Sequence


class GradsyncError(Exception):
    """Anything that gradsync itself raises."""


class NoProcessGroupError(GradsyncError, RuntimeError, ValueError):
    """There is no process group to synchronize over, and the environment describes none."""


class InvalidOptionError(GradsyncError, ValueError, RuntimeError):
    """An option has a value, or is combined with another, in a way that makes no sense."""


class WrongTypeError(InvalidOptionError, TypeError):
    """An option or an argument is of a type that it can't have."""


class UnsuitableModuleError(GradsyncError, RuntimeError, ValueError):
    """The module can't be replicated as it is."""


class NotAModuleError(UnsuitableModuleError, TypeError):
    """Something else was given where a module is expected."""


class NotReplicatedError(UnsuitableModuleError, TypeError):
    """A plain module was given where a replicated one is expected."""


class AlreadyAppliedError(GradsyncError, AssertionError, RuntimeError):
    """A composable API was applied to a module that has it already."""


class AlreadyReplicatedError(AlreadyAppliedError):
    """`replicate` was called on a module that is replicated already."""


class NamesChangedError(GradsyncError, RuntimeError):
    """A composable API renamed or reordered a module's parameters, buffers or submodules."""


class ModulesMissingError(GradsyncError, AssertionError):
    """A composable API returned another number of modules than it was given."""


class UnsuitableForCheckpointError(GradsyncError, ValueError):
    """There is no forward whose activations could be recomputed."""


class ModelMismatchError(GradsyncError, RuntimeError):
    """The ranks hold different models: other parameters, shapes, dtypes or strides."""


class OptionsMismatchError(GradsyncError, ValueError, RuntimeError):
    """The ranks were given different options or hooks."""


class ReplicaDivergedError(GradsyncError, RuntimeError):
    """The replicas' values differ although they should be identical.

    `parameters` are the names of what differs. `ranks` are those that differ from the majority; all, if there is none.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.parameters = list(parameters)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.ranks, self.parameters)


class NonFiniteGradientError(GradsyncError, FloatingPointError, RuntimeError):
    """Gradients have NaN or Inf. `parameters` are their names, in the order of arrival; `ranks` brought them."""

    def __init__(self, message: str, ranks: Sequence[int] = (), parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)
        self.parameters = list(parameters)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.ranks, self.parameters)


class RoundMismatchError(GradsyncError, RuntimeError):
    """The ranks were in different rounds: one made a backward that others did not make, or left one out."""


class UnfinishedRoundError(GradsyncError, RuntimeError):
    """A round was left open: its backward raised, or did not reach what it had to reach.

    `ranks`: those because of which; none, if that is this one.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class ShardsError(GradsyncError, RuntimeError):
    """A step by shards in a way in which its result would depend on the number of ranks."""


class SecondOrderError(GradsyncError, RuntimeError):
    """A loss on gradients that were synchronized: what it would need of the other ranks is not there."""


class UnsynchronizedStepError(GradsyncError, RuntimeError):
    """`optimizer.step()` was called on gradients that were never synchronized."""


class ParametersChangedError(GradsyncError, RuntimeError):
    """Parameters were added, removed, frozen or converted in a way that differs between ranks."""


class JoinError(GradsyncError, RuntimeError):
    """A rank left a `Join` context by an exception, or never entered it, while others went on."""


class HookError(GradsyncError, RuntimeError):
    """A communication hook was registered twice, or brought something that is no reduced bucket, or nothing at all."""

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class ReplicaLostError(GradsyncError, RuntimeError):
    """A rank is gone: its process ended, or no longer takes part. `ranks` are those that are missing."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class RoundTimeoutError(GradsyncError, RuntimeError):
    """A rank that is alive did not come within the time limit. `ranks` are those that were waited for."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class NotSupportedError(GradsyncError, NotImplementedError):
    """Something of torch's that gradsync can't work with yet."""


class ForkedError(GradsyncError, RuntimeError):
    """A process that was forked from a rank tried to take the rank's part."""


class SharedMemoryError(GradsyncError, MemoryError, RuntimeError):
    """The ranks of a host could not get, or not share, the memory they need."""


class ElasticError(GradsyncError, RuntimeError):
    """Training that goes on without lost ranks can't go on: too few are left, or none has a whole model."""
