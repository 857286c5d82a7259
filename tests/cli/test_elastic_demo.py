"""`gradsync demo --elastic` from the outside, and how its steps are put together."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradsync.cli import kernel
from gradsync.cli.app import app
from gradsync.cli.demo import make_elastic_job
from gradsync.cli.display import PlainDisplay, make_console
from gradsync.cli.elastic_demo.history import ShardHistory
from gradsync.cli.elastic_demo.run import ElasticDemo
from gradsync.cli.style import Output
from tests.cli.conftest import TINY, Command, Result

ELASTIC = ["--elastic", "--ranks", "2", *TINY]
# While a rank is missing steps are slow, so that there are some left when another one comes.
WITH_TIME = ["--steps", "150", "--pause", "0.25"]


@dataclass(frozen=True)
class Endings:
    finished: Result
    interrupted: Result
    command_killed: Result


def descendants(pid: int) -> list[int]:
    found = kernel.children(pid)
    return sorted(found.union(*(descendants(one) for one in found)))


def interrupt(run: Command) -> Result:
    """When a rank was killed just now, and another one is started."""
    run.wait_for("killed rank ")
    there = descendants(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    return run.result(there)


def kill(run: Command) -> Result:
    run.wait_for("step ")
    there = descendants(run.process.pid)
    run.process.kill()
    return run.result(there)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endings]:
    folder = tmp_path_factory.mktemp("elastic_demo")
    runs: list[tuple[Callable[[Command], Result], Command]] = [
        (lambda run: run.result([]), Command(*ELASTIC, *WITH_TIME, folder=folder / "finished")),
        (interrupt, Command(*ELASTIC, "--steps", "300", "--pause", "1", folder=folder / "interrupted")),
        (kill, Command(*ELASTIC, "--steps", "100000", folder=folder / "killed")),
    ]
    try:
        with ThreadPoolExecutor() as pool:
            yield Endings(*pool.map(lambda pair: pair[0](pair[1]), runs))
    finally:
        for _, run in runs:
            run.process.kill()
            run.process.communicate()


def test_the_model_is_the_one_of_an_undisturbed_run(endings: Endings) -> None:
    run = endings.finished
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["identical"]
    assert summary["fingerprints"] == [summary["undisturbed_fingerprint"]] * 2
    assert summary["differs_from_step"] is None
    assert f"bitwise the same model as undisturbed: {summary['undisturbed_fingerprint']}" in run.output
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", run.output), "plain lines, where there is no terminal"


def test_a_rank_was_killed_and_another_one_came(endings: Endings) -> None:
    run = endings.finished
    events = {one["event"]: one for one in run.metrics}
    assert [name for name in events if name not in ("step", "validation")] == ["killed", "went on", "ready", "joined"]
    assert events["killed"]["at"] < events["went on"]["at"] < events["ready"]["at"] < events["joined"]["at"]
    for name in ("killed", "went on", "ready", "joined"):
        assert events[name]["line"] in run.output
    sizes = {one["step"]: one["ranks"] for one in run.metrics if one["event"] == "step"}
    assert list(sizes) == list(range(1, 151))
    killed, joined = run.summary["killed_after_step"], run.summary["joined_in_step"]
    assert killed == 50
    assert killed < joined < 150
    assert (sizes[killed], sizes[killed + 2], sizes[joined - 1], sizes[joined]) == (2, 1, 1, 2)
    assert run.summary["went_on_seconds"] > 0
    assert run.summary["joined_seconds"] > 0


def test_what_was_written_is_there_and_named(endings: Endings) -> None:
    run = endings.finished
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("loss.png", "metrics.jsonl", "summary.json"):
        assert f"wrote {run.folder / name}" in run.output


def test_an_interrupt_leaves_nothing_running(endings: Endings) -> None:
    run = endings.interrupted
    assert run.code == 130
    assert not run.survivors
    assert run.seconds < 8
    assert re.search(r"Stopped after step \d+ of 300; all ranks have ended\.", run.output)
    assert "Traceback" not in run.output
    assert run.metrics


def test_launcher_and_ranks_end_with_the_command_however_it_ends(endings: Endings) -> None:
    assert endings.command_killed.code == -signal.SIGKILL
    assert not endings.command_killed.survivors


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--ranks 1", "--ranks: with --elastic there must be 2 or more"),
        ("--steps 2", "--steps: with --elastic there must be 3 or more"),
        ("--width 18", "not a multiple"),
    ],
)
def test_bad_values_are_refused_at_once(words: str, complaint: str) -> None:
    done = CliRunner().invoke(app, ["demo", "--elastic", *words.split(), "--out", "/proc/nowhere"])
    assert done.exit_code == 2
    assert complaint in done.output


def test_who_is_killed_depends_on_the_seed() -> None:
    told = {"folder": "", "context": 16, "layers": 1, "heads": 4, "width": 16, "learning_rate": 0.1}
    jobs = [make_elastic_job(3, 30, 2, 0.0, {**told, "seed": seed}) for seed in range(20)]
    assert {job.kills for job in jobs} == {0, 1, 2}
    assert jobs[0] == make_elastic_job(3, 30, 2, 0.0, {**told, "seed": 0})


# --- steps, put together ---------------------------------------------------------------------------------


def part(step: int, shard: int, losses: list[float], ranks: int = 2) -> dict[str, Any]:
    told = {"event": "step", "pid": os.getpid(), "rank": 0, "ranks": ranks, "step": step, "shard": shard}
    return {**told, "losses": losses, "seconds": 1.0, "waited": 0.5, "at": 10.0 * step + shard}


def history(*parts: dict[str, Any]) -> ShardHistory:
    made = ShardHistory(ranks=2, steps=3, shards=4, tokens_per_step=1)
    for one in parts:
        list(made.take(one))
    return made


def test_a_step_is_whole_when_all_its_shards_are_known() -> None:
    assert not history(part(1, 0, [1.0, 2.0])).steps
    (step,) = history(part(1, 2, [3.0, 4.0]), part(1, 0, [1.0, 2.0])).steps
    assert step.loss == 2.5


def test_what_a_killed_rank_did_not_tell_is_not_waited_for() -> None:
    found = history(part(1, 0, [1.0, 2.0]), part(2, 0, [1.0, 2.0, 3.0, 4.0], ranks=1))
    assert [step.loss for step in found.steps] == [1.5, 2.5]
    assert found.sizes == [2, 1]
    assert found.times == [10.0, 20.0]


def test_a_step_that_is_made_again_counts_once() -> None:
    whole = part(1, 0, [1.0, 2.0, 3.0, 4.0], ranks=1)
    assert len(history(part(1, 0, [1.0, 2.0]), whole, whole).steps) == 1


def test_models_that_differ_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"folder": "", "seed": 1, "context": 16, "layers": 1, "heads": 4, "width": 16, "learning_rate": 0.1}
    job = dataclasses.replace(make_elastic_job(2, 3, 2, 0.0, told), shards=4)
    demo = ElasticDemo(job, tmp_path, Output())
    display = PlainDisplay(make_console(), 2)
    display.ready(1)
    for run, last in ((demo.disturbed, 4.0), (demo.undisturbed, 5.0)):
        for step, loss in ((1, 4.0), (2, 4.0), (3, last)):
            list(run.take(part(step, 0, [1.0, 2.0, 3.0, loss]), display))
        list(run.take({"event": "validation", "step": 3, "loss": 1.0}, display))
        for rank in range(2):
            list(run.take({"event": "fingerprint", "rank": rank, "value": f"bits of {last}"}, display))
    assert demo.finish() == 1
    shown = capsys.readouterr().out
    assert "the models DIFFER: the loss differs from step 3 on" in shown
    assert "  bits of 5.0  undisturbed\n  bits of 4.0  rank 0\n  bits of 4.0  rank 1\n" in shown
    assert not json.loads((tmp_path / "summary.json").read_text())["identical"]
