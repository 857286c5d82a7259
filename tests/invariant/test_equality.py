"""Every case that trains as one process does, cut into shards: bitwise the same from 1, 2, 3 and 4 ranks."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from tests.ranks.cases import CASES
from tests.support import equality
from tests.support.equality import STEPS, Case, Env
from tests.support.ranks import Ranks

SHARDS = 5
OF_THREE = ("weighted", "weighted_with_ranks_without_data", "weighted_by_many_tokens")  # numbers for three ranks
LEFT_OUT = (
    "lbfgs_with_a_closure",  # these step in the body,
    "grad_scaler_and_clipping",
    "freezing_and_unfreezing",  # these change the module in it: see test_shards.py
    "unfrozen_later",
    "frozen_while_a_backward_passes_through",
    "converted_to_double_in_the_middle",
    "loaded_by_assignment_in_the_middle",
    "zeroing_before_forward_and_never_stepping",  # and this one zeroes
)
NAMES = [name for name in CASES if name not in LEFT_OUT]
CHUNKS = [NAMES[start::4] for start in range(4)]


def train(names: list[str], front: str, transport: str) -> dict[str, list[str]]:
    """On a rank: what each step of each case has come to."""
    found = {}
    for name in names:
        with equality._default_dtype(CASES[name].dtype):
            try:
                found[name] = _train(CASES[name], front, transport)
            except Exception as error:
                raise AssertionError(f"case {name}, front {front}, transport {transport}: {error!r}") from error
    return found


def _train(case: Case, front: str, transport: str) -> list[str]:
    shards = 3 if case.name in OF_THREE else SHARDS
    torch.manual_seed(7)
    module = case.build()
    oracle = copy.deepcopy(module)
    replica: Any = equality.FRONTS[front](case, module, transport)
    cut = gradsync.Shards(replica, shards, seed=3)
    optimizer, expected = case.optimizer(module.parameters()), case.optimizer(oracle.parameters())
    digests = []
    for step in range(STEPS):
        for shard in range(shards):
            case.step(Env(oracle, oracle, shard, shards, step, alone=True))
        for shard in cut.each(cut.mine):
            case.step(Env(replica, module, shard, shards, step, alone=False))
        equality._compare_gradients(module, oracle, case.tolerance, step)
        digests.append(digest(module))
        for each in (optimizer, expected):
            if case.zero is not None:
                each.step()
                each.zero_grad(set_to_none=case.zero)
        equality._compare(module, oracle, case.tolerance, step)
        digests.append(digest(module))
    return digests


def digest(module: nn.Module) -> str:
    """Of parameters, buffers and gradients, to the bit."""
    found = hashlib.sha256()
    for tensor in (*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())):
        found.update(b"none" if tensor is None else _bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("names", CHUNKS, ids=["first", "second", "third", "fourth"])
@pytest.mark.parametrize("front", ["replicate", "ddp"])
def test_the_same_from_any_number_of_ranks(ranks: Ranks, names: list[str], front: str) -> None:
    alone = ranks(train, 1, names, front, "auto")[0]
    for size in (2, 3, 4):
        fitting = [name for name in names if size < 4 or name not in OF_THREE]
        for transport in ("shared_memory", "process_group"):
            for found in ranks(train, size, fitting, front, transport):
                for name in fitting:
                    assert found[name] == alone[name], f"{name}, {size} ranks, {transport}"
