"""The same cases on torch's own DistributedDataParallel, where it supports them."""

import pytest
from torch import nn

from tests.ranks.cases import CASES
from tests.ranks.uses import USES, check_use
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


def used(names: list[str]) -> None:
    for name in names:
        check_use(name, nn.parallel.DistributedDataParallel)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_torchs_own_class_allows_all_uses_of_gradients(ranks: Ranks) -> None:
    """With its defaults: so code may rely on them."""
    ranks(used, 2, list(USES), limit=60)
