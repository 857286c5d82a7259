"""`gradsync bench`: one subject a command, collected here."""

from __future__ import annotations

import typer

from gradsync.cli.bench_engine import engine

bench = typer.Typer(help="Measure gradsync beside torch's DistributedDataParallel.", no_args_is_help=True)
bench.command()(engine)


@bench.callback()
def subjects() -> None:
    """Measure gradsync beside torch's DistributedDataParallel."""  # keeps `engine` a subcommand while it is alone
