"""`gradsync bench`: one subject a command, collected here."""

from __future__ import annotations

import typer

from gradsync.cli.bench.bandwidth import bandwidth
from gradsync.cli.bench.engine import engine
from gradsync.cli.bench.footprint import footprint
from gradsync.cli.bench.hosts import hosts
from gradsync.cli.bench.step import step

bench = typer.Typer(help="Measure gradsync beside torch's ways and MPI.", no_args_is_help=True)
for subject in (step, hosts, bandwidth, footprint, engine):
    bench.command()(subject)
