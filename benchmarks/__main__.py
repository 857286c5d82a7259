"""`python -m benchmarks`, from a checkout."""

from benchmarks.app import app

app(prog_name="python -m benchmarks")
