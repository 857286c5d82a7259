"""Whether two contenders came to the same gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

# From the same parameters and data only the order of additions differs. float32 has 1.2e-7 between two numbers; a
# gradient that went through 500 layers, or was summed in another order, loses a few digits more. One that was not
# averaged, or belongs to another step, is off by more than 0.1.
TOLERANCE = 1e-4


class Difference(NamedTuple):
    """The parameter whose gradient differs most, by how much of its own norm."""

    parameter: str
    relative: float

    @property
    def wrong(self) -> bool:
        return not self.relative <= TOLERANCE  # so that nan is wrong

    def __str__(self) -> str:
        return f"gradient of {self.parameter} is off by {self.relative:.2g} of its norm, more than {TOLERANCE:g}"


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
