"""What all commands have in common: how they look, how they refuse bad input, where their results go, how they end.

Rich on a terminal, plain lines elsewhere. Bad input gets one line and exit code 2. `--json` alone prints the result on
standard output, and everything else on standard error; `--json FILE` writes it there. Ctrl-C is exit code 130.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from gradsync.cli.display import make_console

BAD_INPUT, INTERRUPTED = 2, 130  # the second is what a shell reports for Ctrl-C
STDOUT = "-"
JSON_HELP = "The result as JSON: to FILE, or alone on standard output."
# click's, or of the copy that newer versions of typer have of it.
_Refused: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


class Group(TyperGroup):
    """All commands of a program."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *given: Any, **more: Any) -> Any:
        """As typer's, but for bad input: one line."""
        more["standalone_mode"] = False
        try:
            code = super().main(args, prog_name, *given, **more)
        except _Refused as error:
            sys.exit(_refuse(error, prog_name))
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def _refuse(error: Any, program: str | None) -> int:
    context = getattr(error, "ctx", None)
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help())
        return BAD_INPUT
    name = context.command_path if context is not None else program or "gradsync"
    said = " ".join(error.format_message().split()).rstrip(".")
    typer.echo(f"{name}: {said}{'' if said.endswith('?') else '.'} See {name} --help", err=True)
    return BAD_INPUT


class Command(TyperCommand):
    """One of them. Its epilog is examples, line by line, and shown as it is written."""

    def __init__(self, *given: Any, epilog: str | None = None, **more: Any) -> None:
        super().__init__(*given, **more)
        self._examples = epilog or ""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        if self._examples:
            lines = "".join(f"  {line}\n" for line in self._examples.splitlines())
            formatter.write(f"\nExamples:\n{lines}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, spell_out_json(args))
        except _Refused as error:
            if getattr(error, "ctx", None) is None:  # of an option without its value, nobody says whose it is
                vars(error)["ctx"] = ctx
            raise


def spell_out_json(words: Sequence[str]) -> list[str]:
    """`--json` that no file follows is `--json=-`."""
    after = [*words, "--"][1:]
    bare = [word == "--json" and then.startswith("--") for word, then in zip(words, after, strict=True)]
    return [f"--json={STDOUT}" if alone else word for word, alone in zip(words, bare, strict=True)]


def make_app(name: str, about: str, completion: bool = True) -> typer.Typer:
    return typer.Typer(
        name=name,
        help=about,
        cls=Group,
        no_args_is_help=True,
        add_completion=completion,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        pretty_exceptions_enable=False,  # a bug should show Python's own traceback
    )


def add(app: typer.Typer, command: Callable[..., None], *examples: str, **more: Any) -> None:
    """With examples of how it is called, for `--help`. The rest of that is its docstring, in paragraphs."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    about = "\n\n".join(" ".join(one.split()) for one in paragraphs)
    app.command(cls=Command, help=about, epilog="\n".join(examples), **more)(command)


class Output:
    """Where a command speaks, and where its result goes."""

    def __init__(self, target: str | Path | None = None, option: str = "--json") -> None:
        """`target`: a file, "-" for standard output, nothing for nowhere. Refused if it can't be written."""
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # where there is no UTF-8, ? is better than a traceback
        self._to = str(target or "")
        self.console = make_console(stderr=self._to == STDOUT)
        if self.file is not None:
            check_writable(self.file, option)

    @property
    def file(self) -> Path | None:
        return None if self._to in ("", STDOUT) else Path(self._to)

    def working(self, line: str) -> AbstractContextManager[object]:
        """Inside, something takes its time: a line that is alive on a terminal."""
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            return self.console.status(Text(line), spinner="dots")
        self.say(line)
        return nullcontext()

    def write(self, result: Mapping[str, Any]) -> None:
        """Once, at the end."""
        if self.file is not None:
            write_json(self.file, result)
            self.say(f"wrote {self.file}")
        elif self._to == STDOUT:
            sys.stdout.write(json.dumps(result, indent=2) + "\n")
            sys.stdout.flush()

    def add_line(self, line: str) -> None:
        """Of a result that comes line by line; each is there at once."""
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        elif self._to == STDOUT:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def say(self, line: str, style: str = "") -> None:
        """`Text`, not a string: brackets in what ranks say are not markup."""
        self.console.print(Text(line, style=style), soft_wrap=True)
        self.console.file.flush()


def check_writable(file: Path, option: str) -> None:
    """Before anything is measured. What an earlier run has left there goes."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.touch()
        file.unlink()
    except OSError as error:
        raise typer.BadParameter(f"can't write {file}: {error.strerror}", param_hint=option) from None


def write_json(file: Path, result: Mapping[str, Any]) -> None:
    """All of it or nothing: who is ended meanwhile leaves what was there before."""
    draft = file.with_name(f".{file.name}.new")
    draft.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draft.replace(file)
