"""Every case, on both fronts, on an accelerator: equal to one process, with every access in order."""

import pytest

from tests.ranks.cases import CASES
from tests.support import accelerator
from tests.support.accelerator.ranks import on_accelerator
from tests.support.equality import check_case


@pytest.mark.parametrize("name", CASES)
@on_accelerator(2)
def test_trains_as_one_process_does(name: str) -> None:
    check_case(CASES[name], device=accelerator.NAME)
