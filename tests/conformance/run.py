#!/usr/bin/env python3
"""Runs the DistributedDataParallel tests that are inside the torch wheel against
any class of that kind, on the CPU over gloo."""

import argparse
import collections
import dataclasses
import gc
import importlib
import json
import os
import re
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "baseline.json"
POLL_SECONDS = 0.01
TORCHS_OWN = "torch.nn.parallel:DistributedDataParallel"


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", default=TORCHS_OWN, metavar="MODULE:CLASS", help="the class under test (%(default)s)")
    parser.add_argument("--filter", metavar="REGEX", help="only tests whose name matches")
    parser.add_argument("--kind", choices=("behaviour", "internal"), help="only tests of this kind")
    parser.add_argument("--category", metavar="REGEX", help="only tests of a category that matches")
    parser.add_argument(
        "--world-size",
        type=int,
        default=2,
        metavar="N",
        help="processes, where the test leaves it open (%(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=60, metavar="S", help="seconds a test has (%(default)g)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tests at a time (%(default)s)")
    parser.add_argument(
        "--against",
        metavar="BASELINE",
        help="only the tests of a baseline file ('baseline': the one beside this script); any failure is an error",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results to this file")
    parser.add_argument("--verbose", action="store_true", help="show in full why a test failed")
    parser.add_argument("--list", action="store_true", help="list the tests and run none")
    return parser.parse_args(arguments)


def load_class(spec):
    """The class named ``package.module:Class``."""
    module, _, name = spec.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise SystemExit(f"--impl {spec}: not a class")
    return found


def prepare(spec):
    """Loads torch, its tests and the class under test, once for all the tests.

    Returns the class and the cases.  What is loaded here the tests' processes,
    forked later, have without loading it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")
    sys.path.insert(0, str(HERE))
    sys.path.append(os.getcwd())
    warnings.simplefilter("ignore")
    import cpu_shim
    import suite

    modules = suite.load()
    cases = suite.cases(modules)
    implementation = load_class(spec)
    suite.substitute(implementation)
    cpu_shim.install()
    cpu_shim.without_devices(implementation)
    for module in modules:
        cpu_shim.lend_cpu_view(module)
    gc.collect()
    gc.freeze()  # keeps the collector, in the tests' processes, off what they share
    return implementation, cases


def chosen(cases, arguments, baseline):
    for case in cases:
        if baseline is not None and case.name not in baseline:
            continue
        if arguments.filter and not re.search(arguments.filter, case.name):
            continue
        if arguments.category and not re.search(arguments.category, case.category):
            continue
        if arguments.kind and case.kind != arguments.kind:
            continue
        yield case


def read_baseline(name):
    """The names of the tests in a baseline file."""
    path = BASELINE if name == "baseline" else Path(name)
    return {test["name"] for test in json.loads(path.read_text())["tests"]}


def describe(case):
    """What a results file says of a test, but for how it went."""
    fields = dataclasses.asdict(dataclasses.replace(case, test_class=None))
    for name in ("test_class", "method", "own_process_group", "exact_world_size", "world_size"):
        del fields[name]
    return fields


def run_all(cases, implementation, arguments):
    import ranks

    waiting, running, results = list(reversed(cases)), [], []
    try:
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                case = waiting.pop()
                running.append(ranks.Running(case, implementation, arguments.world_size, arguments.timeout))
            for test in list(running):
                outcome = test.poll()
                if outcome is None:
                    continue
                running.remove(test)
                print(line(test.case, outcome), flush=True)
                if arguments.verbose and outcome.detail:
                    print(outcome.detail, flush=True)
                results.append(describe(test.case) | dataclasses.asdict(outcome))
            time.sleep(POLL_SECONDS)
    finally:
        for test in running:
            test.close()
    return results


def line(case, outcome):
    reason = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.status:<7} {outcome.seconds:6.2f} s  {outcome.processes} ranks  {case.name}{reason}"


def summary(results, seconds):
    count = collections.Counter(result["status"] for result in results)
    failed = count["fail"] + count["timeout"]
    return f"{count['pass']} passed, {failed} failed, {count['skip']} skipped in {seconds:.0f} s"


def write_json(path, results, arguments, seconds):
    import torch

    report = {
        "implementation": arguments.impl,
        "torch": torch.__version__,
        "world_size": arguments.world_size,
        "seconds": round(seconds, 1),
        "tests": results,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def main():
    arguments = parse_arguments()
    started = time.monotonic()
    baseline = read_baseline(arguments.against) if arguments.against else None
    implementation, cases = prepare(arguments.impl)
    absent = sorted((baseline or set()) - {case.name for case in cases})
    if absent:
        raise SystemExit(f"this torch has no {absent[0]} ({len(absent)} tests of the baseline are absent)")
    cases = list(chosen(cases, arguments, baseline))
    if not cases:
        raise SystemExit("no test matches")
    if arguments.list:
        for case in cases:
            print(f"{case.kind:<9}  {case.category:<32}  {case.name}")
        print(f"{len(cases)} tests")
        return 0

    results = run_all(cases, implementation, arguments)
    seconds = time.monotonic() - started
    if arguments.json:
        write_json(arguments.json, results, arguments, seconds)
    print(summary(results, seconds))
    if baseline is None:
        return 0
    for kind in ("behaviour", "internal"):
        print(f"{kind}: {score(r for r in results if r['kind'] == kind)}")
    print(f"conformance: {score(results)}")
    return 0 if all(result["status"] == "pass" for result in results) else 1


def score(results):
    passed = [result["status"] == "pass" for result in results]
    return f"{sum(passed)}/{len(passed)}"


if __name__ == "__main__":
    sys.exit(main())
