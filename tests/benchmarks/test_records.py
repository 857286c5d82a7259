"""`python -m benchmarks records`: a tiny run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.app import app


@pytest.mark.thorough  # test_style.py has one that is interrupted, test_watch.py one of the same kind
def test_a_run(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    done = CliRunner().invoke(app, ["records", "--repetitions", "2", "--json", str(file)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["complete"]
    assert [cost["transport"] for cost in result["costs"]] == ["shared_memory", "process_group"]
    for transport in ("shared_memory", "process_group"):
        assert re.search(rf"{transport} +2 +\d\.\d+ ± \d.* -?\d+ µs", done.output), done.output
