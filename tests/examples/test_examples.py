"""The scripts in examples/ run in all ways in which people start them, learn, and do what they say."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.ranks.small import same_everywhere
from tests.support.patience import crowding
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
LIMIT = 60.0


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="example")


def run(name: str, *arguments: str) -> tuple[Any, str]:
    """What its `main` returns and prints on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = load(name)["main"](list(arguments))
    return model, printed.getvalue()


def figures(printed: str, what: str = "loss") -> list[float]:
    return [float(one) for one in re.findall(rf"{what} (\d+\.\d+)", printed)]


def replicas_in(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, gradsync.ReplicateModule)]


def trained(name: str, *arguments: str) -> tuple[nn.Module, str]:
    """On a rank that torchrun has started; the group ends with it."""
    model, printed = run(name, *arguments)
    assert (printed == "") == (dist.get_rank() > 0), "rank 0 speaks for all"
    assert replicas_in(model)
    for replica in replicas_in(model):
        same_everywhere(replica)
    return model, printed


# --- each learns, and does what it is an example of -------------------------------------------------------


def learns(name: str, steps: int, what: str, share: float) -> None:
    model, printed = trained(name, "--steps", str(steps))
    if dist.get_rank() == 0:
        found = figures(printed, what)
        assert found[-1] < share * found[0], printed
    globals()[f"look_at_{name}"](model, printed)
    dist.destroy_process_group()


def look_at_gpt(model: nn.Module, printed: str) -> None:
    assert gradsync.statistics(model).rounds == 30  # one a step, although each has two backwards


def look_at_image_classifier(model: nn.Module, printed: str) -> None:
    if dist.get_rank() == 0:
        assert figures(printed, "accuracy")[0] > 0.5  # of ten classes
    assert model.get_parameter("0.weight").dtype is torch.float32


def look_at_lora(model: nn.Module, printed: str) -> None:
    """The base is what it was, and only the adapters were sent."""
    namespace = load("lora")
    base = namespace["pretrained"]().state_dict()
    kept = {name.replace("base.", ""): value for name, value in model.state_dict().items() if ".base." in name}
    assert kept.keys() == base.keys()
    assert all(torch.equal(kept[name], base[name]) for name in base)
    elements = sum(value.numel() for value in namespace["adapters"](model).values())
    assert elements < 0.1 * sum(value.numel() for value in base.values())
    statistics = gradsync.statistics(model)
    assert statistics.bytes_reduced <= 1.05 * 4 * elements * statistics.rounds  # a bucket has a tail


def look_at_gan(model: nn.Module, printed: str) -> None:
    generator, discriminator = model.children()
    assert gradsync.statistics(generator).rounds == gradsync.statistics(discriminator).rounds == 400


def look_at_gpu_check(model: nn.Module, printed: str) -> None:
    if dist.get_rank() == 0:
        (error,) = re.findall(r"largest relative error (\S+)", printed)
        assert float(error) < 1e-4
        assert "equal to the last bit" in printed
        assert re.search(r"beside DDP +\d+\.\d\d of its time", printed)


def look_at_recommender(model: nn.Module, printed: str) -> None:
    gradient = model.get_parameter("users.weight").grad
    assert gradient is not None
    assert gradient.is_sparse
    if dist.get_rank() == 0:
        assert figures(printed, "accuracy")[0] > 0.6
        rows = int(re.findall(r"this step: (\d+) of 2000", printed)[-1])
        assert 512 < rows < 1024, "those of both ranks"


@pytest.mark.parametrize(
    ("name", "steps", "what", "share"),
    [
        ("gpt", 30, "loss", 0.6),
        ("image_classifier", 40, "loss", 0.6),
        ("lora", 60, "loss", 0.6),
        ("gan", 400, "distance", 0.3),
        ("recommender", 150, "loss", 0.8),
    ],
)
def test_it_learns(ranks: Ranks, name: str, steps: int, what: str, share: float) -> None:
    ranks(learns, 2, name, steps, what, share, limit=LIMIT, backend=None)


def checks() -> None:
    model, printed = trained("gpu_check", "--steps", "2", "--width", "16", "--layers", "3")
    look_at_gpu_check(model, printed)
    dist.destroy_process_group()


def test_the_check_of_accelerators_runs_on_a_cpu(ranks: Ranks) -> None:
    ranks(checks, 2, limit=LIMIT, backend=None)


def test_each_example_is_tested_and_described() -> None:
    assert all(f"look_at_{name}" in globals() for name in NAMES)
    page = (FOLDER / "README.md").read_text()
    assert sorted(re.findall(r"\[(\w+)\.py\]\(\1\.py\)", page)) == NAMES


# --- what gpt.py says of its checkpoints and batches ------------------------------------------------------


def gpt_with_checkpoint(steps: int, path: Path) -> None:
    trained("gpt", "--steps", str(steps), "--checkpoint", str(path))
    dist.destroy_process_group()


def test_gpt_resumes_to_the_last_bit(ranks: Ranks, tmp_path: Path) -> None:
    """4 steps at once; 2, and then 2 more by processes that begin anew."""
    for steps, name in ((4, "whole.pt"), (2, "parts.pt"), (4, "parts.pt")):
        ranks(gpt_with_checkpoint, 2, steps, tmp_path / name, limit=LIMIT, backend=None)
    whole, parts = (torch.load(tmp_path / name) for name in ("whole.pt", "parts.pt"))
    assert whole["step"] == parts["step"] == 4
    assert_same(whole, parts, "checkpoint")
    assert not list(tmp_path.glob("*.tmp"))


def assert_same(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}, {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}, {index}")
    else:
        assert one == other, where


def gpt_parameters() -> list[torch.Tensor]:
    model, _ = trained("gpt", "--steps", "3")
    dist.destroy_process_group()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_gpt_is_the_same_with_any_number_of_ranks(ranks: Ranks) -> None:
    """It is one batch that the ranks share. AdamW makes much of what rounding does to gradients near zero."""
    (alone,), (first, _) = (ranks(gpt_parameters, size, limit=LIMIT, backend=None) for size in (1, 2))
    for one, other in zip(alone, first, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def wrong_batch() -> str:
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), pytest.raises(SystemExit):
        run("gpt", "--batch", "6")
    dist.destroy_process_group()
    return shown.getvalue()


def test_gpt_refuses_a_batch_that_can_not_be_shared(ranks: Ranks) -> None:
    for said in ranks(wrong_batch, 2, limit=LIMIT, backend=None):
        assert "--batch 6 can't be divided by 2 ranks x 2 backwards" in said


# --- what lora.py saves -----------------------------------------------------------------------------------


def saved_adapters(path: Path) -> None:
    model, _ = trained("lora", "--steps", "5", "--out", str(path))
    dist.barrier()  # rank 0 has saved
    namespace = load("lora")
    fresh = namespace["adapt"](namespace["pretrained"](), 4)
    missing, unexpected = fresh.load_state_dict(torch.load(path), strict=False)
    assert not unexpected
    assert all(".base." in name for name in missing)
    x = torch.randn(3, 128)
    assert torch.equal(fresh(x), model(x))
    dist.destroy_process_group()


def test_lora_saves_what_it_has_trained(ranks: Ranks, tmp_path: Path) -> None:
    ranks(saved_adapters, 2, tmp_path / "adapters.pt", limit=LIMIT, backend=None)


# --- started any way --------------------------------------------------------------------------------------


def help_of(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        load(name)["main"](["--help"])
    assert ended.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_help(ranks: Ranks, name: str) -> None:
    (shown,) = ranks(help_of, 1, name, limit=LIMIT, backend=None)
    assert "--steps" in shown
    assert f"gradsync run --ranks 2 examples/{name}.py" in shown


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "examples/image_classifier.py"],
        [sys.executable, "-m", "gradsync.run", "--ranks", "2", "examples/gan.py"],
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "examples/recommender.py",
        ],
    ],
    ids=["python", "gradsync run", "torchrun"],
)
def test_as_people_start_it(command: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--steps", "3"],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100 * crowding(),
    )
    assert done.returncode == 0, done.stderr
    assert "step 2 " in done.stdout
