"""`python -m benchmarks step`: who is admitted to the race, and quick runs."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from benchmarks import mpi, mpi_ranks
from benchmarks.app import app
from benchmarks.contenders import PLAIN, TORCH, TORCH_REPLICATES, TORCH_SIZES, Contender, Prepared, layers
from benchmarks.models import MODELS, Model, classify, numbers_batch
from benchmarks.step_rank import Field
from tests.support.ranks import Ranks


def make_tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


TINY = Model("tiny", "tiny", make_tiny, partial(numbers_batch, rows=6, shape=(4,), classes=3), classify)


def refuse_on_rank_1(module: nn.Module) -> Prepared:
    if dist.get_rank() == 1:
        raise ValueError("not here")
    return Prepared(module)


def admit() -> Any:
    torch.set_num_threads(1)
    local = Contender("local", "every rank for itself", "gradsync", Prepared)
    refused = Contender("refused", "refused", "gradsync", refuse_on_rank_1)
    batch = TINY.batch(torch.Generator().manual_seed(dist.get_rank()))
    field = Field([PLAIN, TORCH, TORCH_SIZES[0], *TORCH_REPLICATES, local, refused], TINY, batch)
    return [entrant.key for entrant in field.entrants], field.absent, field.wrong, field.parameters


def test_who_is_wrong_or_absent_on_one_rank_is_so_on_all_and_not_measured(ranks: Ranks) -> None:
    for entrants, absent, wrong, parameters in ranks(admit, 2):
        assert entrants == ["plain", "torch", "torch_best_5", "torch_replicate", "torch_replicate_fsdp"]
        assert absent == {"refused": "ValueError: not here"}
        assert list(wrong) == ["local"]
        assert "off by" in wrong["local"]
        assert parameters == 4 * 8 + 8 + 8 + 8 + 8 * 3 + 3


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_models_are_what_they_are_called(model: Model) -> None:
    module = model.make()
    sizes = [parameter.numel() for parameter in module.parameters()]
    low, high, count = {
        "gpt": (9e6, 11e6, None),
        "mlp": (33e6, 34e6, None),
        "small": (0, 1e6, 1000),
        "conv": (5e6, 15e6, None),
        "embedding": (6.4e6, 6.5e6, None),
    }[model.key]
    assert low <= sum(sizes) <= high
    assert count in (None, len(sizes))
    assert (model.key == "conv") is any(isinstance(one, nn.BatchNorm2d) for one in module.modules())
    members = list(layers(module))
    assert len(members) > 1
    assert sum(p.numel() for member in members for p in member.parameters()) > 0.95 * sum(sizes)


def run(tmp_path: Path, *options: str) -> tuple[str, dict[str, Any]]:
    files = {"--json": tmp_path / "deep" / "step.json", "--picture": tmp_path / "step.png"}
    written = [str(word) for pair in files.items() for word in pair]
    done = CliRunner().invoke(app, ["step", *options, *written])
    assert done.exit_code == 0, done.output
    assert files["--picture"].read_bytes().startswith(b"\x89PNG")
    for file in files.values():
        assert f"wrote {file}" in done.output
    return done.output, json.loads(files["--json"].read_text())


def test_a_quick_run(tmp_path: Path) -> None:
    output, result = run(
        tmp_path, "--quick", "--repetitions", "2", "--ranks", "2", "--models", "small", "--contenders", "process_group"
    )
    assert "measuring 1,000 small, ranks: 2" in output
    assert "2 ranks: time of a step, to no communication" in output
    assert re.search(r"gradsync, process group +\d+\.\d\d ±", output)
    assert "targets for gradsync, process group" in output
    (race,) = result["races"]
    assert [set(times) for times in race["repetitions"]] == [{"plain", "torch", "process_group"}] * 2
    assert race["absent"] == race["wrong"] == {}
    ratios = race["figures"]["process_group"]["to_no_communication"]
    assert 0.2 < ratios["low"] <= ratios["median"] <= ratios["high"] < 50


def test_both_fronts_beside_each_other(tmp_path: Path) -> None:
    options = {"--ranks": "2", "--models": "small", "--contenders": "shared_memory,wrapper", "--repetitions": "1"}
    output, result = run(tmp_path, *(word for pair in options.items() for word in pair))
    (race,) = result["races"]
    assert set(race["figures"]) == {"plain", "torch", "shared_memory", "wrapper"}, (race["absent"], race["wrong"])
    _, _, table = output.partition("2 ranks: time of a step, to gradsync.replicate")
    assert re.search(r"gradsync DDP, defaults +\d+\.\d\d ±", table)
    assert re.search(r"gradsync DDP to replicate, worst model +\d+\.\d\d +≤ 1.03", table)


@pytest.mark.skipif(mpi_ranks.missing() is not None, reason=str(mpi_ranks.missing()))
def test_mpi_comes_to_the_same_gradients(tmp_path: Path) -> None:
    options = {"--ranks": "2", "--models": "conv", "--contenders": "mpi_4,mpi_blocking", "--repetitions": "1"}
    _, result = run(tmp_path, *(word for pair in options.items() for word in pair))
    (race,) = result["races"]
    assert set(race["figures"]) == {"plain", "torch", "mpi_4", "mpi_blocking"}, (race["absent"], race["wrong"])
    assert race["mpi_best"] in ("mpi_4", "mpi_blocking")


def test_without_mpi_the_reason_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(mpi, "library", mpi.library.__wrapped__)
    with pytest.raises(RuntimeError, match=r"mpi4py is not installed: pip install -e '.\[bench\]'"):
        mpi.world(2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "gpt,bert"], "bert: not one of gpt, mlp, small, conv, embedding"),
        (["--contenders", "horovod"], "horovod: not one of plain, torch"),
        (["--ranks", "two"], "'two' is not a list of numbers"),
        (["--repetitions", "0"], "--repetitions"),
        (["--json", str(Path(__file__) / "step.json")], "can't write"),
    ],
)
def test_wrong_names_are_refused_at_once(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    files = ["--picture", str(tmp_path / "out" / "step.png")]
    refused = CliRunner().invoke(app, ["step", *files, *arguments])
    assert refused.exit_code == 2
    assert complaint in re.sub(r"[\s│]+", " ", refused.output)
    assert not (tmp_path / "out").exists()


def test_help_names_all_subjects() -> None:
    shown = CliRunner().invoke(app, []).output
    assert all(subject in shown for subject in ("step", "bandwidth", "footprint", "engine"))
