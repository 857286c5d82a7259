"""Whether two contenders came to the same gradients, or to the same parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

# From the same parameters and data only the order of additions differs. float32 has 1.2e-7 between two numbers; a
# gradient that went through 500 layers, or was summed in another order, loses a few digits more. One that was not
# averaged, or belongs to another step, is off by more than 0.1.
TOLERANCE = 1e-4


# Of what a few steps have changed. AdamW divides a gradient by its own size: where it is next to nothing, its last
# digits decide how far and in which direction an element moves. Such elements are left out; the others lose more digits
# than a gradient does. A rank that steps alone is off by 1.
CHANGE_TOLERANCE = 1e-2
NEXT_TO_NOTHING = 1e-3  # of the root mean square of a parameter's gradient; and 1e-6 of the largest of those
NOISE = 1e-6


class Difference(NamedTuple):
    """The parameter that differs most, by how much of its own norm."""

    parameter: str
    relative: float
    what: str = "gradient"
    tolerance: float = TOLERANCE

    @property
    def wrong(self) -> bool:
        return not self.relative <= self.tolerance  # so that nan is wrong

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.parameter} is off by {self.relative:.2g} of its norm, more than {self.tolerance:g}"
        )


def worst(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda one: math.inf if math.isnan(one.relative) else one.relative)


def difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Difference:
    return worst(Difference(name, _relative(expected[name], found[name])) for name in expected)


def _relative(expected: Tensor, found: Tensor) -> float:
    """Infinite where there is no gradient; 0 of 0 is no difference."""
    if expected.shape != found.shape:
        return math.inf
    off, norm = (found - expected).norm().item(), expected.norm().item()
    return 0.0 if off == 0 else off / norm if norm else math.inf


class Changes:
    """What the steps of the contender that is right have changed."""

    def __init__(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """`gradients`: of the last of these steps."""
        sizes = {name: float(gradient.square().mean().sqrt()) for name, gradient in gradients.items()}
        least = NOISE * max(sizes.values())
        self._before = {name: tensor.clone() for name, tensor in before.items()}
        self._compared = {
            name: (gradient == 0) | (gradient.abs() > max(NEXT_TO_NOTHING * sizes[name], least))
            for name, gradient in gradients.items()
        }
        self._changes = {name: self._change(name, after[name]) for name in before}

    def difference(self, after: Mapping[str, Tensor]) -> Difference:
        """Of another contender, from the same parameters."""
        return worst(
            Difference(name, _relative(change, self._change(name, after[name])), "change", CHANGE_TOLERANCE)
            for name, change in self._changes.items()
        )

    def _change(self, name: str, after: Tensor) -> Tensor:
        return (after - self._before[name])[self._compared[name]]
