"""`gradsync demo` from the outside."""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradsync.cli
from gradsync._version import __version__
from gradsync.cli.app import app
from gradsync.cli.demo import describe_difference
from gradsync.cli.text import NoText, choose
from tests.cli.conftest import Endings


def test_a_run_ends_well_and_proves_that_replicas_are_identical(endings: Endings) -> None:
    run = endings.finished
    assert run.code == 0, run.output
    fingerprints = run.summary["fingerprints"]
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1
    assert f"replicas identical: {fingerprints[0]}" in run.output


def test_plain_lines_without_control_characters(endings: Endings) -> None:
    assert re.search(r"^step  6/12   loss \d\.\d{3} ", endings.finished.output, re.MULTILINE)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", endings.finished.output)


def test_every_step_and_validation_is_kept(endings: Endings) -> None:
    run = endings.finished
    assert [m["step"] for m in run.metrics if m["event"] == "step"] == list(range(1, 13))
    assert [m["step"] for m in run.metrics if m["event"] == "validation"][-1] == 12
    assert run.summary["tokens"] == 12 * 2 * 2 * 16
    assert 0 <= run.summary["waiting_share"] <= 1
    assert 4.3 < run.summary["first_loss"] < 4.8


def test_what_was_written_is_there_and_named(endings: Endings) -> None:
    run = endings.finished
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("loss.png", "metrics.jsonl", "summary.json"):
        assert f"wrote {run.folder / name}" in run.output


def test_interrupt_stops_cleanly(endings: Endings) -> None:
    run = endings.interrupted
    assert run.code == 130
    assert run.seconds < 5
    assert not run.survivors
    assert "Stopped after step " in run.output
    assert "Traceback" not in run.output
    assert f"wrote {run.folder / 'metrics.jsonl'}" in run.output
    assert run.metrics


def test_a_killed_rank_is_named(endings: Endings) -> None:
    run = endings.rank_killed
    assert run.code == 1
    assert "rank 1 was ended by SIGKILL; the others were stopped." in run.output
    assert not run.survivors


def test_ranks_end_with_the_command_however_it_ends(endings: Endings) -> None:
    assert endings.command_killed.code == -signal.SIGKILL
    assert not endings.command_killed.survivors


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
