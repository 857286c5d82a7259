"""The same cases on torch's own DistributedDataParallel, where it supports them."""

import pytest
from torch import nn

from tests.ranks.cases import CASES
from tests.ranks.uses import USES, check_use
from tests.support.equality import check_case
from tests.support.ranks import on_ranks

SUPPORTED = [name for name, case in CASES.items() if case.torch is not None]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size", limit=60)
def test_torchs_own_class_agrees_with_the_oracle(size: int) -> None:
    """Ours agrees with the same oracle, to the same tolerance, in tests/ranks: so both agree.

    All in one go: torch's class takes seconds to be made for the first time in a process.
    """
    assert len(SUPPORTED) > 15
    for name in SUPPORTED:
        check_case(CASES[name], fronts=["torch"])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@on_ranks(2, limit=60)
def test_torchs_own_class_allows_all_uses_of_gradients() -> None:
    """With its defaults: so code may rely on them."""
    for name in USES:
        check_use(name, nn.parallel.DistributedDataParallel)
