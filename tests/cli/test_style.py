"""One style for all commands: a table of them, and what holds for each."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.app import PROGRAM
from benchmarks.app import app as benchmarks
from gradsync._version import __version__
from gradsync.cli import kernel
from gradsync.cli.app import app as gradsync
from gradsync.cli.chaos.hosts import NotAllowed, make_hosts
from gradsync.cli.style import spell_out_json
from gradsync.run import main as run_main
from tests.support.patience import crowding, wait_until

ROOT = Path(__file__).parents[2]
TINY = "--layers 1 --width 16 --context 16 --batch 2"
SLOW = "slow rank=1 phase=loading transport=process_group ranks=2 step=1 seconds=500"


@dataclass(frozen=True)
class Row:
    """A command; words that are bad input, with what is said of them; and a run that takes long."""

    name: str
    bad: str
    complaint: str
    long: str
    """{out} is a folder."""
    kept: str = ""
    """What is there, in that folder, when something was measured."""
    said: str = "Interrupted; all ranks have ended."
    ranks: int = 1
    """Processes that are there at least when the signal comes."""
    is_benchmark: bool = False

    @property
    def words(self) -> list[str]:
        module = "benchmarks" if self.is_benchmark else "gradsync"
        return [sys.executable, "-m", module, self.name]

    @property
    def program(self) -> str:
        return f"{PROGRAM if self.is_benchmark else 'gradsync'} {self.name}"

    @property
    def app(self) -> typer.Typer:
        return benchmarks if self.is_benchmark else gradsync


def benchmark(name: str, bad: str, complaint: str, long: str) -> Row:
    file = f"{name}.json"
    return Row(name, bad, complaint, f"{long} --json {{out}}/{file}", kept=file, is_benchmark=True)


PICTURE = "--picture {out}/picture.png"
TABLE = [
    Row(
        "demo",
        "--ranks 0",
        "'--ranks'",
        f"--ranks 2 --steps 100000 {TINY} --out {{out}}",
        kept="metrics.jsonl",
        said="all ranks have ended.",
        ranks=2,
    ),
    Row("chaos", "--transport pigeons", "'pigeons' is none of", f"--fault '{SLOW}'", said="Stopped;", ranks=4),
    Row("doctor", "--ranks 0", "'--ranks'", "--limit 600", said="nothing was left running.", ranks=2),
    Row("run", "--ranks 0 x.py", "must be 1 or more", "--ranks 2 {out}/wait.py", said="stopped by SIGINT", ranks=2),
    benchmark("step", "--models bert", "bert: not one of", f"--ranks 2 --models small --repetitions 100000 {PICTURE}"),
    benchmark(
        "sharing",
        "--optimizers lion",
        "lion: not one of",
        f"--ranks 2 --optimizers sgd --models small --repetitions 100000 {PICTURE}",
    ),
    benchmark("hosts", "--ranks none", "is not a list", "--ranks 1 --rates 1gbit --models small --repetitions 100000"),
    benchmark("bandwidth", "--sizes big", "'big' is not a list", "--sizes 1 --repetitions 100000"),
    benchmark("footprint", "--repetitions 0", "'--repetitions'", "--width 0 --repetitions 100000"),
    benchmark("engine", "--parameters 15", "multiples of 10", f"--rounds 100000 --parameters 20 {PICTURE}"),
    benchmark("watch", "--ranks 1", "'--ranks'", "--repetitions 100000"),
    benchmark("records", "--ranks 1", "'--ranks'", "--repetitions 100000"),
    benchmark("shards", "--ranks 0", "'--ranks'", "--repetitions 100000"),
    benchmark("elastic", "--tracks pigeons", "pigeons: not one of", f"--tracks shared_memory --layers 1 {PICTURE}"),
]
WAIT = """\
import os, time
open(os.path.dirname(__file__) + "/here" + os.environ["RANK"], "w").close()
time.sleep(600)  # torchrun passes the signal on
"""
each = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


def test_the_table_has_all_commands() -> None:
    for app, is_benchmark in ((gradsync, False), (benchmarks, True)):
        known = {row.name for row in TABLE if row.is_benchmark is is_benchmark}
        assert set(typer.main.get_command(app).commands) == known  # type: ignore[attr-defined]


def called(row: Row, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    """In this process: exit code, standard output and error."""
    if row.name == "run":  # has torchrun's parser
        with pytest.raises(SystemExit) as ended:
            run_main(words, prog=row.program)
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err
    done = CliRunner().invoke(row.app, [row.name, *words], prog_name=row.program.rpartition(" ")[0])
    return done.exit_code, done.stdout, done.stderr


def examples(text: str) -> list[str]:
    _, _, shown = text.partition("xamples:\n")
    return [line.strip() for line in shown.split("\n\n")[0].splitlines()]


@each
def test_help_is_plain_and_has_examples_that_are_accepted(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(row, "--help", capsys=capsys)
    assert (code, err) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f│╭]", out), "plain, where there is no terminal"
    assert ("--json [FILE]" in out) is (row.name != "run")
    shown = [one for one in examples(out) if one.startswith(row.program)]
    assert len(shown) >= 2
    if row.name != "run":
        command = typer.main.get_command(row.app).commands[row.name]  # type: ignore[attr-defined]
        for one in shown:
            words = shlex.split(one.removeprefix(row.program))
            assert command.make_context(row.name, words).params is not None


@each
@pytest.mark.parametrize("how", ["value", "option", "no value"])
def test_bad_input_is_one_line_and_exit_code_2(row: Row, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = row.bad.split()[0]
    words, said = {
        "value": (shlex.split(row.bad), row.complaint),
        "option": (["--nonsense", "x"], "--nonsense"),
        "no value": ([option], option),
    }[how]
    code, out, err = called(row, *words, capsys=capsys)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"{row.program}: ")
    assert said in line
    assert line.endswith(f". See {row.program} --help")


@each
def test_a_file_that_can_not_be_written_is_bad_input(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    if row.name == "run":
        return
    code, out, err = called(row, "--json", "/proc/nowhere/x.json", capsys=capsys)
    assert (code, out) == (2, "")
    assert "can't write /proc/nowhere/x.json" in err
    assert len(err.splitlines()) == 1


def test_no_such_command() -> None:
    done = CliRunner().invoke(gradsync, ["dokter"], prog_name="gradsync")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "gradsync: No such command 'dokter'. Did you mean 'doctor'? See gradsync --help\n"


def test_no_command_is_answered_by_help() -> None:
    done = CliRunner().invoke(gradsync, [], prog_name="gradsync")
    assert done.exit_code == 2
    for row in TABLE:
        assert (f"  {row.name} " in done.output) is not row.is_benchmark


def test_a_bare_json_is_standard_output() -> None:
    assert spell_out_json(["--json"]) == ["--json=-"]
    assert spell_out_json(["--json", "--ranks", "2"]) == ["--json=-", "--ranks", "2"]
    assert spell_out_json(["--json", "x.json", "--quick"]) == ["--json", "x.json", "--quick"]
    assert spell_out_json([]) == []


# --- real processes ----------------------------------------------------------------------------------------


def descendants(pid: int) -> set[int]:
    found = kernel.children(pid)
    return found.union(*map(descendants, found))


def namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def interrupt(row: Row, folder: Path) -> tuple[int, str, str, set[int]]:
    """Ctrl-C as soon as it has ranks, and has measured something. Also: which of its processes are still there."""
    folder.mkdir()
    (folder / "wait.py").write_text(WAIT)
    process = subprocess.Popen(
        [*row.words, *shlex.split(row.long.format(out=folder))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FORCE_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def is_time() -> bool:
        kept = folder / row.kept
        is_there = kept.exists() and (not kept.is_file() or kept.stat().st_size > 0)
        if row.name == "run":
            is_there = all((folder / f"here{rank}").exists() for rank in range(2))
        return process.poll() is not None or (is_there and len(descendants(process.pid)) >= row.ranks)

    try:
        assert wait_until(is_time, 100)
        there = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60 * crowding())
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(kernel.is_running, there)), 3)
    return process.returncode, out, err, set(filter(kernel.is_running, there))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """All commands, a few at the same time: most of it is importing torch."""
    folder = tmp_path_factory.mktemp("interrupted")
    rows = TABLE if can_make_hosts() else [row for row in TABLE if row.name != "hosts"]
    with ThreadPoolExecutor(3) as pool:
        ends = pool.map(lambda row: interrupt(row, folder / row.name), rows)
        return {row.name: (folder / row.name, end) for row, end in zip(rows, ends, strict=True)}


def can_make_hosts() -> bool:
    try:
        with make_hosts(1):
            return True
    except NotAllowed:
        return False


@each
def test_an_interrupt_leaves_nothing_running_and_keeps_what_was_measured(
    row: Row, interrupted: dict[str, tuple[Path, Any]]
) -> None:
    if row.name not in interrupted:
        pytest.skip("no network namespaces can be made here")
    folder, (code, out, err, running) = interrupted[row.name]
    assert code == 130, (out, err)
    assert not running
    assert "Traceback" not in out + err
    assert row.said in (err if row.name == "run" else out)
    assert "\x1b" not in out, "plain lines, where there is no terminal"
    if row.kept:
        assert f"wrote {folder / row.kept}" in out
    if row.is_benchmark:
        assert err == ""
        kept = json.loads((folder / row.kept).read_text())
        assert kept["complete"] is False
        measured = next(kept[name] for name in ("races", "tracks", "costs", "importing") if kept.get(name))
        assert measured
        assert "Not all was measured. What was:" in out


def test_hosts_are_gone_after_an_interrupt(interrupted: dict[str, tuple[Path, Any]]) -> None:
    assert "hosts" not in interrupted or not [name for name in namespaces() if _is_dead(name)]


def _is_dead(name: str) -> bool:
    """`gradsync-PID-...`, of a process that has ended."""
    found = re.fullmatch(r"gradsync-(\d+)-\w+", name)
    return found is not None and not kernel.is_running(int(found[1]))


def on_a_terminal(*words: str) -> str:
    """What a process shows there."""
    inside, outside = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(words, stdin=outside, stdout=outside, stderr=outside, env=environment, cwd=ROOT):
        os.close(outside)
        shown = b""
        while True:
            try:
                shown += (read := os.read(inside, 4096))
            except OSError:  # all have closed it
                break
            if not read:
                break
    os.close(inside)
    return shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("words", "shown"),
    [("gradsync --help", "╭─"), ("gradsync doctor --ranks 1 --limit 240", "\x1b[32mok")],
)
def test_rich_on_a_terminal(words: str, shown: str) -> None:
    assert shown in on_a_terminal(sys.executable, "-m", *words.split())


COMPLETION = """
eval "$(_GRADSYNC_COMPLETE=source_bash gradsync)"
for line in "gradsync " "gradsync d" "gradsync doctor --li"; do
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
  _gradsync_completion gradsync
  echo "${COMPREPLY[@]}"
done
"""


def test_completion_in_a_shell() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", COMPLETION], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["demo run doctor chaos", "demo doctor", "--limit"], done.stderr


@pytest.mark.parametrize("module", ["gradsync", "gradsync.cli"])
def test_version(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"gradsync {__version__}\n", "")


QUICK = """
import sys
from gradsync.cli.app import app
assert not {"matplotlib", "torch._dynamo"} & sys.modules.keys()
"""


def test_commands_begin_quickly() -> None:
    """Each Tab of a completion waits for this."""
    subprocess.run([sys.executable, "-c", QUICK], check=True)
