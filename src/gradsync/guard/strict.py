"""torch's strictness, for those who pass `find_unused_parameters=False`: the errors."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.errors import UnfinishedRoundError

_CURE = (
    "find_unused_parameters=False was given, which makes this an error; leave the argument out (as good as passing the "
    "keyword argument `find_unused_parameters=True`)"
)


def not_all_used(rank: int, round: int, missing: Sequence[int], names: Sequence[str]) -> UnfinishedRoundError:
    """A round left parameters without a gradient: `missing` here, or if that is empty on another rank."""
    which = "Parameters of another rank did not receive grad"
    if missing:
        which = (
            f"Parameters which did not receive grad for rank {rank}: {', '.join(names[i] for i in missing)}. "
            f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}"
        )
    return UnfinishedRoundError(
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"{which} (round {round}). {_CURE} and parameters may be used or not, or see to it that all "
        "`forward` function outputs participate in calculating loss. No need to set the environment variable "
        "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL: these are all the names."
    )


def ready_twice(rank: int, index: int, name: str) -> UnfinishedRoundError:
    return UnfinishedRoundError(
        f"Expected to mark a variable ready only once. rank {rank}: Parameter at index {index} with name {name} "
        "received a gradient more than once in one backward, as happens with reentrant checkpointing. "
        f"{_CURE} and it is right."
    )
