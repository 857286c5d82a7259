"""The same cases on torch's own DistributedDataParallel, where it supports them."""

import pytest

from tests.ranks.cases import CASES
from tests.support.equality import check_case
from tests.support.ranks import Ranks

SUPPORTED = [name for name, case in CASES.items() if case.torch is not None]


def body(names: list[str]) -> None:
    """All in one go: torch's class takes seconds to be made for the first time in a process."""
    for name in names:
        check_case(CASES[name], fronts=["torch"])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("size", [2, 3])
def test_torchs_own_class_agrees_with_the_oracle(ranks: Ranks, size: int) -> None:
    """Ours agrees with the same oracle, to the same tolerance, in tests/ranks: so both agree."""
    assert len(SUPPORTED) > 15
    ranks(body, size, SUPPORTED, limit=60)
