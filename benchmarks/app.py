"""`python -m benchmarks`: one subject a command, collected here."""

from __future__ import annotations

import typer

from benchmarks.bandwidth import bandwidth
from benchmarks.engine import engine
from benchmarks.footprint import footprint
from benchmarks.hosts import hosts
from benchmarks.records import records
from benchmarks.step import step
from benchmarks.watch import watch

app = typer.Typer(
    name="benchmarks",
    help="Measure gradsync beside torch's ways and MPI.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug should show Python's own traceback
)
for subject in (step, hosts, bandwidth, footprint, engine, watch, records):
    app.command()(subject)
