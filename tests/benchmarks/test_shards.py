"""`python -m benchmarks shards`: its verdict, and a tiny run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.models import MODELS
from benchmarks.shards_result import ShardsCost, ShardsResult


def test_it_is_judged_by_all_models_and_the_shards_that_were_aimed_at() -> None:
    def value(ranks: int = 2, shards: int = 4, models: int = len(MODELS)) -> float | None:
        ratios = {model.key: [1.0, 1.02 + place % 2, 3.0] for place, model in enumerate(MODELS[:models])}
        cost = ShardsCost(transport="shared_memory", by_model=ratios)
        (target,) = ShardsResult(ranks=ranks, shards_a_rank=shards, costs=[cost]).targets()
        assert target.limit == 1.05
        return target.value

    assert value() == pytest.approx((1.02**3 * 2.02**2) ** (1 / 5))
    assert value(ranks=3) is value(shards=2) is value(models=4) is None


@pytest.mark.thorough  # test_style.py has one that is interrupted
def test_a_run(tmp_path: Path) -> None:
    file = tmp_path / "shards.json"
    done = CliRunner().invoke(app, ["shards", "--repetitions", "2", "--shards-a-rank", "2", "--json", str(file)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["complete"]
    assert [cost["transport"] for cost in result["costs"]] == ["shared_memory", "process_group"]
    assert all(len(cost["by_model"]) == len(MODELS) for cost in result["costs"])
    assert re.search(r"to accumulating, process group +\S* *≤ 1.05 +not measured", done.output), done.output
