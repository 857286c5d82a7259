"""The typer application: one command a file, collected here."""

from __future__ import annotations

import typer

from gradsync._version import __version__
from gradsync.cli.chaos.command import chaos
from gradsync.cli.demo import demo
from gradsync.cli.doctor.command import doctor
from gradsync.cli.style import add, make_app

ABOUT = "Keeps the replicas of a PyTorch module in step."

app = make_app("gradsync", ABOUT)
add(
    app,
    demo,
    "gradsync demo",
    "gradsync demo --elastic",
    "gradsync demo --ranks 4 --steps 200 --out runs/demo",
    "gradsync demo --steps 50 --json",
)


# Read by `gradsync.cli.main` itself; here for the list of commands.
def run(arguments: list[str] = typer.Argument(None)) -> None:
    """Train an unchanged script on gradsync's engine."""
    from gradsync import run as launcher

    launcher.main(arguments or [], prog="gradsync run")


add(app, run, context_settings={"ignore_unknown_options": True, "help_option_names": []})
add(
    app,
    doctor,
    "gradsync doctor",
    "gradsync doctor --ranks 8 --json doctor.json",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 -m gradsync doctor",
)
add(
    app,
    chaos,
    "gradsync chaos --minutes 1",
    "gradsync chaos --seed 7 --faults 20 --transport shared_memory --json seen.jsonl",
    "gradsync chaos --fault 'kill rank=1 phase=backward transport=process_group ranks=2 step=1 bucket=3'",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradsync {__version__}")
        raise typer.Exit


@app.callback(help=ABOUT)
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None: ...
