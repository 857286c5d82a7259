"""`gradsync run`: real launches of real scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gradsync.run import BOOT, MODULE, SCRIPT, _wrong_with_trace, main, parser
from tests.support.patience import crowding

LAUNCH = [sys.executable, "-m", "gradsync.run"]
SAID = "gradsync run: torch's DistributedDataParallel and both its replicate() are gradsync's from here on"
# What a script can see of how it was started. The addresses of objects differ between processes.
SHOW = """\
'''What it is.'''
import json, os, re, sys
import beside
seen = {name: re.sub("0x[0-9a-f]+", "", repr(value)) for name, value in globals().items() if name.startswith("__")}
seen |= {"argv": sys.argv, "path": sys.path, "orig_argv_is_there": bool(sys.orig_argv), "beside": beside.__file__}
seen |= {"is_main": sys.modules["__main__"].__dict__ is globals(), "annotated": "x" in __annotations__}
x: int = len(sys.argv)
assert __annotations__["x"] is int  # no `from __future__` of somebody else's
seen.pop("__builtins__")
print(json.dumps(seen))
if "fail" in sys.argv:
    raise ValueError("broken")
"""
TRAIN = """\
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(3, 2))
model(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
assert model.module.bias.grad.tolist() == [2.0, 2.0] and model.module.weight.grad[0, 0] == 3.0
told = type(model).__module__, dist.get_rank(), dist.get_world_size(), sys.argv[1:]
with open(f"told{dist.get_rank()}", "w") as file:  # lines of two ranks may mix
    file.write(repr(told))
dist.destroy_process_group()
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100 * crowding(),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script in a folder, a package, and an archive; started from another folder, in which a trap lies."""
    inside = tmp_path / "inside"
    (inside / "package").mkdir(parents=True)
    for path in (inside / "show.py", inside / "package" / "__main__.py", inside / "package" / "show.py"):
        path.write_text(SHOW)
    for where in (inside, inside / "package", tmp_path):
        (where / "beside.py").touch()
    (inside / "package" / "__init__.py").touch()
    (tmp_path / "linked.py").symlink_to(inside / "show.py")
    (tmp_path / "random.py").write_text("raise RuntimeError('the current folder is not to be imported from')")
    with zipfile.ZipFile(inside / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
        archive.writestr("beside.py", "")
    return tmp_path


@pytest.mark.parametrize(
    "program",
    ["inside/show.py", "linked.py", "inside/package", "inside/archive.zip", "-m package", "-m package.show"],
)
def test_a_script_sees_what_python_shows_it(folder: Path, program: str) -> None:
    cwd = folder / "inside" if program.startswith("-m") else folder
    words = ["one", "--two=3", "-m", "fail"]
    plain = run(sys.executable, *program.split(), *words, cwd=cwd)
    kind = MODULE if program.startswith("-m") else SCRIPT
    rank = run(sys.executable, f"-c{BOOT}", kind, program.removeprefix("-m "), *words, cwd=cwd)
    assert "ValueError: broken" in plain.stderr
    assert json.loads(rank.stdout) == json.loads(plain.stdout)
    assert rank.returncode == plain.returncode == 1
    assert rank.stderr == f"{SAID}\n{plain.stderr}"


def test_ranks_train_on_our_engine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(*LAUNCH, "--ranks", "2", "train.py", "--ranks", "7", "-x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        told = (tmp_path / f"told{rank}").read_text()
        assert told == repr(("gradsync.dropin", rank, 2, ["--ranks", "7", "-x"]))
    assert done.stderr.count(SAID) == 1


def test_torchruns_options_are_torchruns(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = Path(sys.executable).with_name("gradsync")
    options = ("--standalone", "--nproc_per_node=2", "--log-dir", "logs", "--redirects", "3", "-m")
    done = run(str(command), "run", *options, "train", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told1").read_text() == repr(("gradsync.dropin", 1, 2, []))
    assert SAID in next((tmp_path / "logs").rglob("0/stderr.log")).read_text()


STEPS = """\
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
assert len(sys.argv) == 2
"""


def test_an_unchanged_script_is_traced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    done = run(*LAUNCH, "--ranks", "2", "--trace", "out/", "--steps", "3:5", "train.py", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = f"trace of rounds 3 to 4 written to {tmp_path}/out/: report.html, trace.json, step.svg, step.png"
    assert done.stderr.splitlines().count(f"gradsync run: {said}") == 1
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    ends = {(one["pid"], one["args"]["round"]) for one in trace["traceEvents"] if one["name"] == "end of backward"}
    assert ends == {(0, 3), (0, 4), (1, 3), (1, 4)}


def test_a_script_that_ends_before_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    done = run(*LAUNCH, "--ranks", "2", "--trace", "out", "train.py", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = "gradsync run: no trace: the script ended after round 3, and rounds 20 to 24 were to be traced"
    assert done.stderr.splitlines().count(said) == 1
    assert not any((tmp_path / "out").iterdir())  # made before anything was trained, to see that it can be


def test_a_rank_that_fails_is_told_of_without_the_launchers_own_calls(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise ValueError('broken')\n")
    done = run(*LAUNCH, "--ranks", "1", "fail.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "Root Cause" in done.stderr
    assert done.stderr.count("ValueError: broken") == 1
    assert "ChildFailedError" not in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr


def test_an_interrupted_rank_says_where_it_was_in_one_line(tmp_path: Path) -> None:
    text = "import signal\ndef step():\n    sorted([1, 2], key=lambda _: signal.raise_signal(signal.SIGINT))\nstep()\n"
    (tmp_path / "script.py").write_text(text)
    rank = run(sys.executable, f"-c{BOOT}", SCRIPT, "script.py", cwd=tmp_path, RANK="1")
    assert rank.returncode == -signal.SIGINT
    assert rank.stderr == "gradsync run: rank 1 was interrupted at script.py:3 in <lambda>\n"


SYNTAX, EXIT = "x = = 3\n", "import sys\nsys.exit(7)\n"


@pytest.mark.parametrize(("text", "status", "shown"), [(SYNTAX, 1, "SyntaxError"), (EXIT, 7, "")])
def test_scripts_that_end_otherwise(tmp_path: Path, text: str, status: int, shown: str) -> None:
    """The rank itself: torchrun makes 1 of any exit code."""
    (tmp_path / "script.py").write_text(text)
    plain = run(sys.executable, "script.py", cwd=tmp_path)
    rank = run(sys.executable, f"-c{BOOT}", SCRIPT, "script.py", cwd=tmp_path)
    assert plain.returncode == rank.returncode == status
    assert rank.stderr == f"{SAID}\n{plain.stderr}"
    assert shown in rank.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "can't open nowhere.py: there is no such file"),
        (["-m", "nowhere.at_all"], "there is no module named nowhere"),
        (["--ranks", "0", "x.py"], "--ranks must be 1 or more, but is 0"),
        (["--ranks", "two", "x.py"], "--ranks must be a number, or LEAST:MOST with --elastic, but is two"),
        (["--ranks", "2", "--nproc-per-node", "2", "x.py"], "leave out --nproc-per-node, or --ranks"),
        (["--no-such-option", "x.py"], "--no-such-option"),
        (["--trace", "out", "--steps", "20", "x.py"], "--steps must be two numbers of rounds, as in 20:25"),
        (["--trace", "out", "--steps", "5:5", "x.py"], "--steps must end behind its beginning"),
        (["--trace", "out", "--steps=-3:5", "x.py"], "--steps must be two numbers of rounds"),
        (["--steps", "20:25", "x.py"], "--steps says what to trace, and goes with --trace FOLDER"),
        (["--trace", "x.py", "x.py"], "--trace needs a folder, but x.py is none"),
        (["--trace", "/proc/nowhere", "x.py"], "--trace can't write to /proc/nowhere: No such file or directory"),
        (["--ranks", "2", "--trace", "x.py/out", "x.py"], "--trace can't write to x.py/out: Not a directory"),
        (["--no-python", "x.py"], "--no-python starts a command in which nothing can be replaced"),
        ([], "the following arguments are required: training_script"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words, prog="gradsync run")
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert said in line
    assert line.startswith("gradsync run: ")


def test_the_folder_of_a_trace_may_be_on_another_host(tmp_path: Path) -> None:
    """That of rank 0 has to have it."""
    several = parser("gradsync run").parse_args(["--nnodes", "2", "--trace", "/proc/nowhere", "x.py"])
    assert not _wrong_with_trace(several)


def test_bad_input_to_the_command(tmp_path: Path) -> None:
    """What torchrun itself finds wrong, too."""
    (tmp_path / "x.py").touch()
    done = run(*LAUNCH, "--nproc-per-node", "many", "x.py", cwd=tmp_path)
    line = "python -m gradsync.run: Unsupported nproc_per_node value: many. See python -m gradsync.run --help\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_help_has_examples_and_torchruns_options(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("gradsync")
    done = run(str(command), "run", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for words in ("gradsync run --ranks 2 train.py", "--rdzv-endpoint", "--ranks N", "--max-restarts"):
        assert words in done.stdout
    assert "run " in run(str(command), "--help", cwd=tmp_path).stdout


NO_EXTRAS = """
import sys
for name in ("typer", "rich", "matplotlib"):
    sys.modules[name] = None
sys.argv = ["gradsync", "run", "--help"]
from gradsync.cli import main
main()
"""


def test_it_needs_torch_alone(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", NO_EXTRAS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--ranks N" in done.stdout
