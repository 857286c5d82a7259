"""What a run leaves out that is not thorough: see `tests/support/sample.py`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.sample import white_fields

FRONTS, TRANSPORTS, SIZES = ["replicate", "wrapper"], ["shared_memory", "process_group", "hierarchical"], [2, 3]


def product(**axes: list[Any]) -> list[tuple[str, str, dict[str, Any]]]:
    fields = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [(str(values), "function", values) for values in fields]


def kept(fields: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    left_out = white_fields(fields)
    return [values for name, _, values in fields if name not in left_out]


@pytest.mark.parametrize(
    "axes",
    [
        {"front": FRONTS, "transport": TRANSPORTS[:2]},
        {"transport": TRANSPORTS, "front": FRONTS},
        {"front": FRONTS, "transport": TRANSPORTS, "size": SIZES},
        {"transport": TRANSPORTS, "world": SIZES},
    ],
    ids=str,
)
def test_half_of_a_product_with_every_value_in_it(axes: dict[str, list[Any]]) -> None:
    fields = product(**axes)
    found = kept(fields)
    assert len(found) == len(fields) / 2
    for axis, values in axes.items():
        assert {one[axis] for one in found} == set(values)


def test_three_axes_of_which_all_pairs_are_there() -> None:
    found = kept(product(front=FRONTS, transport=TRANSPORTS, size=SIZES))
    for one, other in itertools.combinations(["front", "transport", "size"], 2):
        pairs = {(values[one], values[other]) for values in found}
        assert len(pairs) == len({pair[0] for pair in pairs}) * len({pair[1] for pair in pairs})


def test_all_else_is_whole() -> None:
    found = kept(product(how=[object(), object(), object()], front=FRONTS, transport=TRANSPORTS))
    assert len(found) == 9
    for how in {values["how"] for values in found}:
        assert {values["front"] for values in found if values["how"] is how} == set(FRONTS)


def test_what_is_no_product_stays() -> None:
    places = [("replicate", "shared_memory"), ("replicate", "process_group"), ("wrapper", "shared_memory")]
    some = [(str(number), "function", {"front": a, "transport": b}) for number, (a, b) in enumerate(places)]
    assert len(kept(some)) == 3
    assert len(kept(product(front=FRONTS))) == 2
    assert len(kept(product(front=FRONTS, transport=TRANSPORTS[:1]))) == 2
    assert len(kept(product(how=[1, 2, 3]))) == 3


def test_tests_of_other_functions_are_other_products() -> None:
    one, other = product(front=FRONTS, transport=["shared_memory"]), product(front=FRONTS, transport=["process_group"])
    assert len(kept(one + [(name, "another function", values) for name, _, values in other])) == 4
