"""Every case, on both fronts, over both transports, with 2 and 3 ranks, against one process."""

import pytest

from tests.ranks.cases import CASES
from tests.support.equality import check_case
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CASES)
@on_ranks("size")
def test_trains_as_one_process_does(name: str, size: int) -> None:
    check_case(CASES[name], transports=["shared_memory", "process_group"])
    check_case(CASES[name], fronts=["copies"], transports=["shared_memory"])


@pytest.mark.parametrize("name", CASES)
@on_ranks(3)
def test_with_three_ranks(name: str) -> None:
    """Each front and each transport; all combinations of them if thorough."""
    check_case(CASES[name], fronts=["replicate"], transports=["shared_memory"])
    check_case(CASES[name], fronts=["ddp"], transports=["process_group"])
