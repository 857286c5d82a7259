"""Every case, on both fronts, on an accelerator: equal to one process, with every access in order."""

import pytest

from tests.ranks.cases import CASES
from tests.support import accelerator
from tests.support.accelerator.ranks import on_accelerator
from tests.support.equality import check_case

SPARSE = {"sparse_embedding", "sparse_embedding_unused_on_a_rank", "nothing_but_a_sparse_embedding"}
"""The stand-in has no sparse tensors."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - SPARSE))
@on_accelerator(2)
def test_trains_as_one_process_does(name: str) -> None:
    check_case(CASES[name], device=accelerator.NAME)
