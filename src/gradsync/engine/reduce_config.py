"""How gradients become a mean in one round: their scaling, and what a user has set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from gradsync.engine.shard_sums import ShardSums
from gradsync.engine.sparse_rows import KnownRows
from gradsync.hooks.comm_hook import Hook
from gradsync.hooks.optimizer_overlap import ShareStepper, Stepper
from gradsync.options import Options

if TYPE_CHECKING:
    from gradsync.engine.shared_parameters import SharedParameters

_FINE = 2**20  # a weight of one, as an integer


@dataclass(frozen=True)
class Scaling:
    """How one rank's gradients count in a round.

    Scaled before the sum, not after it: a sum of float16 gradients overflows easily. For the same reason weights,
    which may be numbers of tokens, are measured in units of about their mean.
    """

    ranks: int
    mean: bool = True
    """Mean over the ranks; if False, sum."""
    divisor: float | None = None
    """Set: a gradient is the sum over the ranks divided by this, whatever their weights."""
    weight: float = 1.0
    """This rank's, in the round under way or the next one."""
    usual_weight: float = 1.0
    """What it is again after that: 0 on a rank that has run out of data."""
    unit: float = 1.0
    with_data: float = 1.0
    """The fraction of ranks that have data; in a `Join` context some may have run out of it."""
    hooked: bool = False
    """A communication hook alone decides what becomes of the gradients."""
    shards: int = 0
    """What is added up are gradients of so many shards, of which each has its weight, whatever the ranks' number."""

    @property
    def factor(self) -> float:
        """What this rank multiplies its gradients by."""
        if self.shards:
            return 1.0
        if self.divisor is not None:
            return 1 / self.divisor
        return self.weight / (self.unit * self.ranks) if self.mean else 1.0

    @property
    def is_weighted_mean(self) -> bool:
        """Whether the sum has to be divided by the weights of all ranks."""
        return self.mean and self.divisor is None

    @property
    def multiplicity(self) -> float:
        """How often something that all ranks have in common is in the result: once in a mean, N times in a sum."""
        if self.shards:
            return 1.0
        if self.hooked:
            return self.with_data
        if self.divisor is not None:
            return self.with_data * self.ranks / self.divisor
        return self.with_data * (1.0 if self.mean else float(self.ranks))

    def weight_as_integer(self) -> int:
        return round(self.weight * _FINE)

    def in_units_of(self, weights: Sequence[int]) -> Scaling:
        """Before the first sum: measures weights in units of the ranks' mean, by their `weight_as_integer`."""
        mean = sum(weights) / len(weights) / _FINE
        return replace(self, unit=mean) if self.mean and mean > 0 and not self.shards else self

    def unit_after(self, total_weight: float) -> float:
        """For the next round: this one's mean weight, by the total that was read from it."""
        return self.unit * total_weight if total_weight > 0 and not self.shards else self.unit


@dataclass(frozen=True)
class ReduceConfig:
    """What a round does with gradients: as it was set when the round opened; what is set meanwhile is for the next."""

    options: Options
    scaling: Scaling
    comm_hook: tuple[Hook, object] | None = None
    """Reduces the buckets instead of the transport; with its state."""
    see_reduced: Callable[[Tensor], None] | None = None
    """Sees each bucket's reduced gradients before they are delivered."""
    stepper: Stepper | None = None
    """Steps an optimizer for the parameters of each bucket as soon as it is delivered."""
    share_stepper: ShareStepper | None = None
    """The same for an optimizer of which each rank steps its share; then there are no gradients to deliver."""
    shared: SharedParameters | None = None
    """Where parameters lie that the ranks of a host have once."""
    shards: ShardSums | None = None
    """What the shards of this rank have brought, if gradients are added up in the order of a tree over shards."""
    known_rows: Mapping[str, KnownRows] | None = None
    """Of parameters with sparse gradients: the rows that any rank will use."""

    @property
    def steps_in_backward(self) -> bool:
        return self.stepper is not None or self.share_stepper is not None

    @property
    def strict(self) -> bool:
        """torch's strictness, for those who ask for it."""
        return self.options.find_unused_parameters is False and not self.options.static_graph
