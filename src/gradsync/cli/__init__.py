"""The `gradsync` command. The library itself never imports this package."""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("typer", "rich", "matplotlib")


def main() -> None:
    """Entry point of `gradsync` and of `python -m gradsync`."""
    if sys.argv[1:2] == ["run"]:  # its options are torchrun's, and it needs torch alone
        from gradsync import run

        run.main(sys.argv[2:], prog="gradsync run")
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"gradsync: the command line needs {', '.join(missing)}: pip install 'gradsync[cli]'")

    try:
        from gradsync.cli.app import app
    except KeyboardInterrupt:  # importing torch takes a second
        sys.exit(130)

    app(prog_name="gradsync")
