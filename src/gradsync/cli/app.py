"""The typer application: one command a file, collected here."""

from __future__ import annotations

import typer

from gradsync._version import __version__
from gradsync.cli.chaos.command import chaos
from gradsync.cli.demo import demo

app = typer.Typer(
    name="gradsync",
    help="Keeps the replicas of a PyTorch module in step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug should show Python's own traceback
)
app.command()(demo)
app.command()(chaos)


# Read by `gradsync.cli.main` itself; here for the list of commands.
@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
def run(arguments: list[str] = typer.Argument(None)) -> None:
    """Train an unchanged script on gradsync's engine: torchrun, with torch's data parallelism replaced."""
    from gradsync import run as launcher

    launcher.main(arguments or [], prog="gradsync run")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradsync {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Keeps the replicas of a PyTorch module in step."""
