"""Which tests are left to a thorough run: `make thorough`, or `pytest --thorough`.

A test on ranks may have several of these axes: the front, the transport, the number of ranks. All combinations are
seldom needed to see that something is broken: of a whole product every second one is run, as the black fields of a
chessboard, so that no front, no transport and no number of ranks is left out. All else that a test is parametrized
with stays whole. What is asked for by name, or with `-k`, is no whole product, and runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

AXES = ("front", "transport", "size", "world")
T = TypeVar("T", bound=Hashable)


def white_fields(fields: Iterable[tuple[T, Hashable, Mapping[str, Any]]]) -> set[T]:
    """Of tests, given as (name, function, parameters), those that only a thorough run has."""
    boards: dict[Hashable, dict[T, tuple[Any, ...]]] = defaultdict(dict)
    for name, function, parameters in fields:
        axes = tuple(axis for axis in AXES if axis in parameters)
        # The values of a parametrization are the same objects in all its tests; many of them can't be compared.
        rest = tuple((key, id(value)) for key, value in parameters.items() if key not in AXES)
        boards[function, axes, frozenset(rest)][name] = tuple(parameters[axis] for axis in axes)
    return {name for board in boards.values() for name in _white(board)}


def _white(board: Mapping[T, tuple[Any, ...]]) -> set[T]:
    """None, where there is no product of two axes."""
    sides = [list(dict.fromkeys(values)) for values in zip(*board.values(), strict=True)]
    is_product = len(set(board.values())) == len(board) == math.prod(map(len, sides))
    if not is_product or sum(len(side) > 1 for side in sides) < 2:
        return set()
    return {
        name
        for name, values in board.items()
        if sum(side.index(value) for side, value in zip(sides, values, strict=True)) % 2
    }
