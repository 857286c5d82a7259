"""Every case, on both fronts, over both transports, with 2 and 3 ranks, against one process."""

import pytest

from tests.ranks.cases import CASES
from tests.support.equality import check_case
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
@on_ranks("size")
def test_trains_as_one_process_does(name: str, size: int) -> None:
    check_case(CASES[name], transports=["shared_memory", "process_group"])
    check_case(CASES[name], fronts=["copies"], transports=["shared_memory"])
