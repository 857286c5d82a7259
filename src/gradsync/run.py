"""`gradsync run` and `python -m gradsync.run`: torchrun, and an unchanged script trains on our engine.

The process that is started reads the options, which are torchrun's and a few more, and lets torchrun start the ranks.
Each rank calls `as_rank`: it puts gradsync in the place of torch's own (see `dropin.py`), and becomes what it would be
if Python had been started with the script itself. Needs torch alone.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from gradsync import launchers, log
from gradsync.elastic import command as elastic
from gradsync.watch import position

EPILOG = """\
examples:
  gradsync run --ranks 2 train.py --epochs 3
  gradsync run --ranks 2 -m package.train --epochs 3
  gradsync run --ranks 2 --trace out/ --steps 20:25 train.py
  gradsync run --elastic --ranks 2:4 train.py
  gradsync run --elastic --nnodes 1:3 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint host:29500 train.py
  gradsync run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 train.py

Every option of torchrun works as it does there; options after the script are the script's own.
In each rank torch.nn.parallel.DistributedDataParallel and both replicate() of torch.distributed._composable
are gradsync's before the script begins; gradsync.dropin.install() does the same in code.

With --elastic, training goes on when ranks die, and others come in their place: the script's loop is one of
gradsync.Elastic, and the model ends with the same bits as without a fault (docs/elastic.md)."""

# Run by `python -c` in each rank. Python has put the current folder first, from which nothing may be imported: with a
# script, its folder stands there, which `as_rank` sees to.
BOOT = """\
import sys
if not getattr(sys.flags, "safe_path", False): del sys.path[0]
try: from gradsync.run import as_rank
except KeyboardInterrupt: sys.exit(130)
as_rank(sys.argv[1:])
"""
# What a rank is told of its program. Before the program's name all words begin with a dash: torchrun calls the run by
# the first that does not.
MODULE, SCRIPT = "--as-module", "--as-script"
# Before that, if it is to be traced: where to, and which rounds.
TRACE, STEPS, USUAL_STEPS = "--trace=", "--steps=", "20:25"


class _Parser(argparse.ArgumentParser):
    """torchrun's, with one line for what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help\n")


def parser(prog: str) -> argparse.ArgumentParser:
    made = _Parser(
        prog=prog,
        description="Train an unchanged script on gradsync's engine: torchrun with torch's data parallelism replaced.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun.get_args_parser()],
        add_help=False,  # torchrun's parser has it
        usage=f"{prog} [--ranks N] [torchrun's options] script.py [the script's options]",
    )
    made.add_argument(
        "--ranks",
        metavar="N",
        help="Ranks on this machine: --standalone --nproc-per-node N. With --elastic also LEAST:MOST, as 2:4.",
    )
    made.add_argument("--elastic", action="store_true", help="Go on when ranks die or come; see docs/elastic.md.")
    made.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help=f"With --elastic: how long to wait while there are fewer ranks than the least ({elastic.WAIT_SECONDS:g}).",
    )
    made.set_defaults(max_restarts=None)
    made.add_argument("--trace", metavar="FOLDER", help="Write a timeline of some steps of all ranks there.")
    made.add_argument(
        "--steps",
        metavar="FIRST:STOP",
        help=f"Which, as in Python's slices: {USUAL_STEPS}, which is usual, is rounds 20 to 24, counted from 0.",
    )
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "python -m gradsync.run") -> None:
    """Entry point of both. Ends the process if something is wrong, as torchrun does."""
    reader = parser(prog)
    options = reader.parse_args(arguments)
    wrong = _wrong_with_ranks(options) or _wrong_with_program(options) or _wrong_with_trace(options)
    wrong = wrong or elastic.wrong_with(options)
    if wrong:
        reader.error(wrong)
    try:
        if options.elastic:
            sys.exit(elastic.run(options, _command(options), prog))
        _run(_for_torchrun(options))
    except (ValueError, AssertionError) as error:  # of torchrun's, for options that don't go together
        reader.error(str(error).strip().splitlines()[0])
    except ChildFailedError as failed:  # the ranks have shown where; how torchrun called itself tells nothing
        sys.stderr.write(f"{prog}: {str(failed).strip()}\n")
        sys.exit(1)
    except SignalException as stopped:  # Ctrl-C: torchrun has ended the ranks
        sys.stderr.write(f"{prog}: stopped by {stopped.sigval.name}; all ranks have ended\n")
        sys.exit(128 + stopped.sigval)
    except KeyboardInterrupt:  # before there were any
        sys.stderr.write(f"{prog}: stopped by SIGINT; no rank had been started\n")
        sys.exit(128 + signal.SIGINT)


def _for_torchrun(options: argparse.Namespace) -> argparse.Namespace:
    """The same in torchrun's words; the command is one that lets a rank begin with us."""
    python, *words = _command(options)
    changed: dict[str, Any] = {
        "training_script": python,
        "training_script_args": words,
        "max_restarts": options.max_restarts or 0,
        "no_python": True,  # of its own, that is
        "module": False,
        "run_path": False,
    }
    if options.ranks is not None:
        changed |= {"nproc_per_node": str(options.ranks), "standalone": True}
    return argparse.Namespace(**{**vars(options), **changed})


def _command(options: argparse.Namespace) -> list[str]:
    """What a rank is started with."""
    kind = MODULE if options.module else SCRIPT
    traced = [f"{TRACE}{options.trace}", f"{STEPS}{options.steps or USUAL_STEPS}"] if options.trace else []
    program = [kind, options.training_script, *options.training_script_args]
    return [os.environ.get("PYTHON_EXEC", sys.executable), "-u", f"-c{BOOT}", *traced, *program]


@record
def _run(options: argparse.Namespace) -> None:
    torchrun.run(options)


def _wrong_with_ranks(options: argparse.Namespace) -> str:
    if options.ranks is None:
        return ""
    least, _ = elastic.range_of(options.ranks) or (None, None)
    if least is None:
        return f"--ranks must be a number, or LEAST:MOST with --elastic, but is {options.ranks}"
    if least < 1:
        return f"--ranks must be 1 or more, but is {options.ranks}"
    if ":" in options.ranks and not options.elastic:
        return f"--ranks {options.ranks} says that ranks may come and go, and goes with --elastic"
    defaults = torchrun.get_args_parser()
    for name in ("nnodes", "nproc_per_node", "rdzv_endpoint"):
        if getattr(options, name) != defaults.get_default(name):
            return f"--ranks is for this machine alone; leave out --{name.replace('_', '-')}, or --ranks"
    return ""


def _wrong_with_trace(options: argparse.Namespace) -> str:
    if options.trace is None:
        return "--steps says what to trace, and goes with --trace FOLDER" if options.steps is not None else ""
    if not options.trace:
        return "--trace needs a folder"
    if Path(options.trace).exists() and not Path(options.trace).is_dir():
        return f"--trace needs a folder, but {options.trace} is none"
    from gradsync.tracing.planned import Rounds

    try:
        Rounds.read(options.steps or USUAL_STEPS)
    except ValueError as error:
        return f"--steps {error}"
    if options.nnodes in ("1", "1:1"):  # of several hosts, that of rank 0 has to have it
        try:
            Path(options.trace).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--trace can't write to {options.trace}: {error.strerror}"
    return ""


def _wrong_with_program(options: argparse.Namespace) -> str:
    """What torchrun would find out in each rank, after they were started."""
    program = options.training_script
    if options.no_python:
        return "--no-python starts a command in which nothing can be replaced; give a Python script, or -m and a module"
    if options.module:
        package = program.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, ["", *sys.path]) is None:
            return f"there is no module named {package}"
    elif not Path(program).exists():
        return f"can't open {program}: there is no such file"
    return ""


# --- in a rank --------------------------------------------------------------------------------------------

# What Python itself calls for `-m`, and for folders, in the main module that there is (3.10 to 3.13).
_run_as_main: Callable[..., Any] = vars(runpy)["_run_module_as_main"]


def as_rank(arguments: list[str]) -> None:
    """Runs the program as Python would: `[what to trace..., kind, script or module, its arguments...]`."""
    from gradsync import dropin
    from gradsync.elastic import control

    if arguments[0].startswith(TRACE):
        folder, steps, *arguments = arguments
        _trace(folder.removeprefix(TRACE), steps.removeprefix(STEPS))
    kind, program, *rest = arguments

    done = dropin.install()
    if os.environ.get("RANK", "0") == "0" and os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"gradsync run: {done}\n")
    sys.argv[:] = [program, *rest]
    try:
        _as_module(program) if kind == MODULE else _as_script(program)
    except BaseException as error:
        _show_without_us()
        if isinstance(error, SystemExit) and error.code and launchers.is_elastic(os.environ):
            control.script_fails()
        raise


def _trace(folder: str, steps: str) -> None:
    from gradsync.tracing.planned import Rounds, plan_trace

    plan_trace(folder, Rounds.read(steps))


def _as_module(name: str) -> None:
    if not _safe_path():
        sys.path.insert(0, str(Path.cwd()))
    _clear_main()
    _run_as_main(name)


def _as_script(name: str) -> None:
    path = Path(name)
    if pkgutil.get_importer(name) is not None:  # a folder or an archive, with a __main__.py in it
        sys.path.insert(0, os.path.abspath(name))  # noqa: PTH100
        _clear_main()
        _run_as_main("__main__", False)
        return
    if not _safe_path():
        sys.path.insert(0, str(path.resolve().parent))
    file = os.path.abspath(name)  # noqa: PTH100  # as Python does: symbolic links stay
    main = _clear_main()
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    vars(main).update(__file__=file, __loader__=loader, __cached__=None)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))


def _safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))


def _clear_main() -> ModuleType:
    """The main module as Python makes it: what `BOOT` has imported is not there."""
    main = sys.modules["__main__"]
    vars(main).clear()
    names: dict[str, Any] = dict.fromkeys(("__doc__", "__package__", "__loader__", "__spec__"))
    vars(main).update(__name__="__main__", **names, __annotations__={}, __builtins__=builtins)
    return main


def _show_without_us() -> None:
    """The traceback, should Python show one, begins in the script. Ctrl-C is one line for each rank."""
    show = sys.excepthook

    def shorter(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            place = position.user_line_of(error)
            sys.stderr.write(f"gradsync run: rank {log.rank()} was interrupted{place and f' at {place}'}\n")
            return
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<string>"):
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    vars(sys)["excepthook"] = shorter


if __name__ == "__main__":
    main()
