#!/usr/bin/env python3
"""`make conformance`: torch's own tests against gradsync's class, which must not get worse.

`passing.json` names the tests that pass. The run fails if one of them fails, twice; it says which
tests have begun to pass, and `--record` adds them. Nothing is ever taken off that list by machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PASSING = HERE / "passing.json"
IMPLEMENTATION = "gradsync:DistributedDataParallel"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="add tests that have begun to pass to passing.json")
    parser.add_argument("--jobs", default="2", metavar="N", help="tests at a time (%(default)s)")
    arguments = parser.parse_args()

    recorded = json.loads(PASSING.read_text())["tests"] if PASSING.exists() else []
    passing = run(["--jobs", arguments.jobs])
    if lost := sorted(set(recorded) - passing):
        print(f"\n{len(lost)} tests failed that are recorded as passing; once more, one at a time:", flush=True)
        names = "|".join(f"^{name}$" for name in lost)
        passing |= run(["--filter", names, "--verbose"])
    lost = sorted(set(recorded) - passing)
    gained = sorted(passing - set(recorded))
    print(f"\nconformance: {len(passing)} pass, {len(recorded)} are recorded as passing")
    for name in gained:
        print(f"  new: {name}")
    for name in lost:
        print(f"  LOST: {name}")
    if arguments.record and gained and not lost:
        tests = sorted({*recorded, *gained})
        PASSING.write_text(json.dumps({"count": len(tests), "tests": tests}, indent=1) + "\n")
        print(f"recorded in {PASSING.name}: {len(tests)}")
    elif gained and not lost:
        print("record them with: python tests/conformance/check.py --record")
    return 1 if lost else 0


def run(options):
    """The names of the tests that pass."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, str(HERE / "run.py"), "--impl", IMPLEMENTATION, "--against", "baseline"]
        subprocess.run([*command, "--json", str(results), *options], check=False)
        if not results.exists():
            raise SystemExit("the conformance run ended without results")
        return {test["name"] for test in json.loads(results.read_text())["tests"] if test["status"] == "pass"}


if __name__ == "__main__":
    sys.exit(main())
