"""`gradsync.data`: every sample once an epoch, the same steps from any number of ranks, resumed anywhere."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import gradsync
from gradsync.data import Cut, Loader
from gradsync.errors import InvalidOptionError, WrongTypeError
from tests.invariant.test_equality import digest
from tests.support.ranks import Ranks, on_ranks


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_each_sample_once(samples: int, shards: int, batch_size: int, shuffle: bool, epoch: int) -> None:
    cut = Cut(samples, shards, batch_size, shuffle, False, seed=1)
    steps = [[cut.samples(epoch, step, shard) for shard in range(shards)] for step in range(cut.steps)]
    assert sorted(number for step in steps for one in step for number in one) == list(range(samples))
    assert all(len(one) == batch_size for step in steps[:-1] for one in step)
    sizes = [len(one) for one in steps[-1]]
    assert max(sizes) - min(sizes) <= 1
    whole = Cut(samples, shards, batch_size, shuffle, True, seed=1)
    assert whole.steps == samples // (shards * batch_size)


class Augmented(Dataset[Any]):
    """Numbers with noise of all three kinds."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return torch.arange(4.0) * index / 37 + noise, index


def train(workers: int, state: dict[str, Any] | None, steps: int) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    module = gradsync.replicate(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
    shards = gradsync.Shards(module, 5, seed=9)
    loader = Loader(Augmented(), shards, batch_size=3, num_workers=workers)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    if state is not None:
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        shards.load_state_dict(state["shards"])
        loader.load_state_dict(state["loader"])
    seen: list[Any] = []
    found: list[Any] = []
    while len(found) < steps:
        for batches in loader:
            for x, index in shards.each(batches):
                seen.append((loader.epoch, loader.step, index.tolist()))
                module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(digest(module))
            if len(found) == steps:
                break
    assert seen
    left = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    return found, {**left, "shards": shards.state_dict(), "loader": loader.state_dict()}


def test_the_same_from_any_number_of_ranks(ranks: Ranks) -> None:
    """Two epochs and a part of the third, of which each ends with a step of 7 samples for 5 shards."""
    alone = ranks(train, 1, 0, None, 8)[0][0]
    for size, workers in ((1, 2), (2, 0), (3, 1), (4, 0)):
        for found, _ in ranks(train, size, workers, None, 8):
            assert found == alone, f"{size} ranks, {workers} workers"


@pytest.mark.parametrize("done", [2, 3])
def test_goes_on_in_the_middle_and_at_the_end_of_an_epoch(ranks: Ranks, done: int) -> None:
    alone = ranks(train, 1, 0, None, 7)[0][0]
    before, state = ranks(train, 4, 0, None, done)[0]
    after = ranks(train, 3, 0, state, 7 - done)[0][0]
    assert before + after == alone


@on_ranks(1)
def test_every_sample_of_a_last_step_counts_alike() -> None:
    module = nn.Linear(1, 1, bias=False)
    shards = gradsync.Shards(gradsync.replicate(module), 4)
    data = torch.arange(1.0, 7.0)[:, None]
    (batches,) = Loader(TensorDataset(data), shards, batch_size=2, shuffle=False)
    assert batches.weights == [1.0, 1.0, 0.5, 0.5]
    for (x,) in shards.each(batches):
        module(x).mean().backward()
    torch.testing.assert_close(module.weight.grad, data.mean()[None, None])
    module.zero_grad()
    (batches,) = Loader(TensorDataset(data[:3]), shards, batch_size=2, shuffle=False)
    assert batches[3] is None
    for (x,) in shards.each(batches):
        module(x).mean().backward()
    torch.testing.assert_close(module.weight.grad, data[:3].mean()[None, None])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


@on_ranks(1)
def test_what_is_refused() -> None:
    shards = gradsync.Shards(gradsync.replicate(nn.Linear(1, 1)), 4)
    data: Any = TensorDataset(torch.zeros(8, 1))
    with pytest.raises(WrongTypeError, match="can't be cut into shards"):
        Loader(Stream(), shards, 1)
    with pytest.raises(WrongTypeError, match="Give the dataset itself, not a loader"):
        Loader(torch.utils.data.DataLoader(data), shards, 1)
    with pytest.raises(WrongTypeError, match="shards must be a Shards"):
        Loader(data, 4, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="batch_size must be 1 or more"):
        Loader(data, shards, 0)
    with pytest.raises(InvalidOptionError, match="sampler can't be given"):
        Loader(data, shards, 1, sampler=[1])
    with pytest.raises(InvalidOptionError, match="8 samples, not enough for one step of 4 shards"):
        Loader(data, shards, 3, drop_last=True)
    loader = Loader(data, shards, 1)
    with pytest.raises(InvalidOptionError, match="made with batch_size=2, but here it is 1"):
        loader.load_state_dict({**loader.state_dict(), "batch_size": 2})
    with pytest.raises(InvalidOptionError, match="a batch of 7 samples can't be cut into 4 shards"):
        gradsync.data.cut(shards, torch.zeros(7))
    parts = gradsync.data.cut(shards, torch.arange(8), torch.arange(8) * 2)
    assert [x.tolist() for x, _ in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
