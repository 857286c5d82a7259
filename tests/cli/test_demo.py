"""`gradsync demo` from the outside."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradsync.cli
from gradsync._version import __version__
from gradsync.cli.app import app
from gradsync.cli.demo import describe_difference
from gradsync.cli.text import NoText, choose
from tests.cli.conftest import TINY, Command, Result, alive, children, wait_until


def test_a_run_ends_well_and_proves_that_replicas_are_identical(finished: Result) -> None:
    assert finished.code == 0, finished.output
    fingerprints = finished.summary["fingerprints"]
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1
    assert f"replicas identical: {fingerprints[0]}" in finished.output


def test_plain_lines_without_control_characters(finished: Result) -> None:
    assert re.search(r"^step  6/12   loss \d\.\d{3} ", finished.output, re.MULTILINE)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", finished.output)


def test_every_step_and_validation_is_kept(finished: Result) -> None:
    steps = [m["step"] for m in finished.metrics if m["event"] == "step"]
    assert steps == list(range(1, 13))
    assert [m["step"] for m in finished.metrics if m["event"] == "validation"][-1] == 12
    assert finished.summary["tokens"] == 12 * 2 * 2 * 16
    assert 0 <= finished.summary["waiting_share"] <= 1
    assert 4.3 < finished.summary["first_loss"] < 4.8


def test_what_was_written_is_there_and_named(finished: Result) -> None:
    assert (finished.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("loss.png", "metrics.jsonl", "summary.json"):
        assert f"wrote {finished.folder / name}" in finished.output


def test_interrupt_stops_cleanly(command: Callable[..., Command]) -> None:
    run = command("--steps", "100000", *TINY)
    run.wait_for("step ")
    run.process.send_signal(signal.SIGINT)
    result = run.finish(limit=5)
    assert result.code == 130
    assert len(run.ranks) == 2
    assert not any(map(alive, run.ranks))
    assert "Stopped after step " in result.output
    assert "Traceback" not in result.output
    assert f"wrote {result.folder / 'metrics.jsonl'}" in result.output
    assert result.metrics


def test_a_killed_rank_is_named(command: Callable[..., Command]) -> None:
    run = command("--steps", "100000", *TINY)
    run.wait_for("step ")
    os.kill(run.ranks[1], signal.SIGKILL)
    result = run.finish(limit=10)
    assert result.code == 1
    assert "rank 1 was ended by SIGKILL; the others were stopped." in result.output
    assert not any(map(alive, run.ranks))


def test_ranks_end_with_the_command_however_it_ends(command: Callable[..., Command]) -> None:
    run = command("--ranks", "1", *TINY)
    run.wait_for("starting")
    wait_until(lambda: bool(children(run.process.pid)))
    ranks = children(run.process.pid)
    run.process.kill()
    wait_until(lambda: not any(map(alive, ranks)))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--steps", "0"], "--steps"),
        (["--out", __file__], "is a file"),
        (["--text", "/nowhere"], "0 bytes of Python sources"),
        (["--width", "18"], "not a multiple"),
    ],
)
def test_bad_values_are_refused_at_once(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["demo", *arguments, *out])
    assert result.exit_code == 2
    assert complaint in re.sub(r"[\s│]+", " ", result.output)
    assert not (tmp_path / "out").exists()


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"gradsync {__version__}\n"
    assert "demo" in CliRunner().invoke(app, ["--help"]).output


def test_without_the_extra_main_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit, match=r"needs rich: pip install 'gradsync\[cli\]'") as stopped:
        gradsync.cli.main()
    assert isinstance(stopped.value.code, str)  # Python prints it and exits with 1


def test_replicas_that_differ_are_told_apart() -> None:
    described = describe_difference(["aa", "bb", "aa"])
    assert described.splitlines() == [
        "replicas DIFFER: 2 versions of the parameters",
        "  aa  rank 0, 2",
        "  bb  rank 1",
    ]


def test_text_needs_two_files(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n" * 1000)
    with pytest.raises(NoText):
        choose(tmp_path)
