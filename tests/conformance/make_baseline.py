#!/usr/bin/env python3
"""Writes baseline.json: the tests that torch's own class passes, every time."""

import argparse
import collections
import json
import time

import run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2, metavar="N", help="runs to pass in (%(default)s)")
    times = parser.parse_args().times
    arguments = run.parse_arguments([])

    started = time.monotonic()
    implementation, cases = run.prepare(run.TORCHS_OWN)
    results = collections.defaultdict(list)
    for _ in range(times):
        for result in run.run_all(cases, implementation, arguments):
            results[result["name"]].append(result)
    seconds = (time.monotonic() - started) / times

    tests, out = [], []
    for name, outcomes in sorted(results.items()):
        reason = why_out(outcomes)
        known = {
            key: value for key, value in outcomes[0].items() if key not in ("status", "detail", "used_class")
        }
        (out if reason else tests).append(known | {"reason": reason} if reason else without_reason(known))

    import torch

    baseline = {
        "implementation": run.TORCHS_OWN,
        "torch": torch.__version__,
        "times": times,
        "seconds_a_time": round(seconds, 1),
        "totals": totals(tests, out),
        "tests": tests,
        "out": out,
    }
    run.BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")
    print(json.dumps(baseline["totals"], indent=1))


def why_out(outcomes):
    """Why a test is no measure of another class; None where it is one."""
    bad = [outcome for outcome in outcomes if outcome["status"] != "pass"]
    if bad:
        return (
            f"torch's own class: {bad[0]['status']} {len(bad)} of {len(outcomes)} times: {bad[0]['reason']}"
        )
    if not any(outcome["used_class"] for outcome in outcomes):
        return "never makes an object of the class"
    return None


def without_reason(test):
    return {key: value for key, value in test.items() if key != "reason"}


def totals(tests, out):
    categories = collections.defaultdict(collections.Counter)
    for test in tests:
        categories[test["category"]][test["kind"]] += 1
    return {
        "found": len(tests) + len(out),
        "in": len(tests),
        **collections.Counter(test["kind"] for test in tests),
        "out": len(out),
        "categories": {name: dict(count) for name, count in sorted(categories.items())},
        "internal_names": counted(tests, "internal_names"),
        "logging_fields": counted(tests, "logging_fields"),
        "private_helpers": counted(tests, "private_helpers"),
    }


def counted(tests, field):
    """How many tests have each name."""
    return dict(collections.Counter(name for test in tests for name in test[field]).most_common())


if __name__ == "__main__":
    main()
