"""Every case with one model a host, on both fronts, over each transport, with 2 and 3 ranks, against one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.ranks.cases import CASES
from tests.ranks.memory import be_on_host
from tests.support.equality import SHARED, check_case
from tests.support.ranks import on_ranks

# LBFGS can't be cut, and shares of gradients are shares of buckets: both are refused, see test_shared_parameters.py.
REFUSED = {name for name, case in CASES.items() if "lbfgs" in name or "gradient_as_bucket_view" in case.options}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
@on_ranks("size")
def test_trains_as_one_process_does(name: str, size: int) -> None:
    check_case(CASES[name], SHARED, ["shared_memory"])
    if size == 3:
        be_on_host(dist.get_rank() // 2)
        check_case(CASES[name], ["shared"], ["hierarchical"])
    else:
        check_case(CASES[name], ["shared"], ["process_group"])
