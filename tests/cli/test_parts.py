"""The pieces of the demo, each alone: text, model, history, display, picture."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gradsync.cli import picture, text
from gradsync.cli.demo_rank import Job, learning_rate, validates_after, validation_windows
from gradsync.cli.display import LiveDisplay, duration, sparkline
from gradsync.cli.gpt import GPT, Shape, generate, next_character_loss
from gradsync.cli.history import History, waiting_share

SHAPE = Shape(vocabulary=text.VOCABULARY, context=16, layers=2, heads=2, width=8)
JOB = Job(ranks=2, steps=40, seed=0, folder="", batch=2, context=16, layers=1, heads=4, width=16, learning_rate=1e-3)


def history(steps: int = 40, ranks: int = 2) -> History:
    made = History(ranks=ranks, steps=steps, tokens_per_step=64)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            made.add({"event": "step", "step": step, "loss": 4.0 / step + rank, "seconds": 0.5, "waited": 0.1})
            if step % 10 == 0:
                made.add({"event": "validation", "step": step, "loss": 1.0 + rank})
    return made


def test_text_is_deterministic_and_held_out_files_are_not_trained_on() -> None:
    files, again = text.choose(text.stdlib()), text.choose(text.stdlib())
    assert files == again
    assert set(files.training).isdisjoint(files.validation)
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files.training)


def test_text_loads_the_same_twice(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / f"{name}.py").write_text(f"{name} = 'π\t'\n" * 1000)
    one, two = text.load(tmp_path), text.load(tmp_path)
    assert torch.equal(one.training, two.training)
    assert torch.equal(one.validation, two.validation)
    assert one.training.max() == text.UNKNOWN


def test_encode_and_decode_are_inverse() -> None:
    assert text.decode(text.encode(text.ALPHABET)) == text.ALPHABET
    assert text.decode(text.encode("é")) == "·"


def test_ranks_read_different_batches_and_validation_windows() -> None:
    row = torch.arange(4000) % text.VOCABULARY
    batches = [
        text.random_windows(row, batch=4, length=17, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    shares = [validation_windows(row, JOB, rank) for rank in range(2)]
    assert shares[0].shape == shares[1].shape == (64, 17)
    assert not torch.equal(*shares)


def test_the_model_does_not_see_the_future() -> None:
    model = GPT(SHAPE)
    one = torch.zeros(1, 16, dtype=torch.long)
    two = one.clone()
    two[0, 10:] = 5
    assert torch.allclose(model(one)[:, :10], model(two)[:, :10], atol=1e-6)
    assert not torch.allclose(model(one)[:, 10:], model(two)[:, 10:], atol=1e-6)


def test_the_model_starts_near_chance_and_generates_what_was_asked() -> None:
    model = GPT(SHAPE)
    tokens = torch.randint(text.VOCABULARY, (4, 17))
    assert next_character_loss(model, tokens).item() == pytest.approx(4.57, abs=0.2)
    written = generate(model, text.encode("def "), 30, generator=torch.Generator().manual_seed(0))
    assert written.shape == (34,)
    assert text.decode(written).startswith("def ")


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(JOB, step) for step in range(JOB.steps)]
    assert rates[0] < rates[1] <= JOB.learning_rate
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.1 * JOB.learning_rate


@pytest.mark.parametrize("steps", [1, 3, 10, 600])
def test_validation_comes_ten_times_and_last(steps: int) -> None:
    when = [step for step in range(1, steps + 1) if validates_after(step, steps)]
    assert when[-1] == steps
    assert len(when) == min(steps, 10)


def test_history_averages_over_ranks() -> None:
    made = history()
    assert made.steps[0].loss == pytest.approx(4.5)
    assert made.validations[-1].loss == pytest.approx(1.5)
    assert waiting_share(made.steps) == pytest.approx(0.2)
    assert made.tokens_per_second(made.steps) == pytest.approx(128)


def test_history_waits_for_the_last_rank() -> None:
    made = History(ranks=2, steps=1, tokens_per_step=1)
    part = {"event": "step", "step": 1, "loss": 1.0, "seconds": 1.0, "waited": 0.0}
    assert made.add(part) is None
    assert made.add(part) is made.steps[0]


def test_sparkline_grows_to_the_right() -> None:
    assert sparkline([4.0], planned=100, width=10) == "▁"
    assert sparkline([8.0, 4.5, 1.0], planned=6, width=6) == "█▅▁"
    assert len(sparkline([1.0] * 100, planned=100, width=10)) == 10


def test_live_display_shows_the_figures() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LiveDisplay(console, ranks=2) as display:
        display.ready(parameters=12345)
        display.update(history())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for words in ("12,345 parameters", "128", "20.0%", "40/40"):
        assert words in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("steps", [1, 40])
def test_picture_is_written(tmp_path: Path, steps: int) -> None:
    picture.draw(history(steps), parameters=12345, path=tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_duration() -> None:
    assert [duration(s) for s in (0.4, 59.6, 61, 3600)] == ["0:00", "1:00", "1:01", "60:00"]
