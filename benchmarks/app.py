"""`python -m benchmarks`: one subject a command, collected here."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.bandwidth import bandwidth
from benchmarks.elastic import elastic
from benchmarks.engine import engine
from benchmarks.footprint import footprint
from benchmarks.hosts import hosts
from benchmarks.records import records
from benchmarks.shards import shards
from benchmarks.sharing import sharing
from benchmarks.step import step
from benchmarks.watch import watch
from gradsync.cli.style import add, make_app

PROGRAM = "python -m benchmarks"
EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    step: ("step --quick", "step --ranks 2 --models gpt,mlp --contenders shared_memory --json gpt.json"),
    sharing: ("sharing --quick", "sharing --ranks 2 --optimizers adamw --models mlp --width 0 --json mlp.json"),
    hosts: ("hosts --ranks 2 --rates 1gbit", "hosts --hosts 3 --models mlp,gpt --repetitions 3"),
    bandwidth: ("bandwidth", "bandwidth --ranks 4 --sizes 1,32 --json"),
    footprint: ("footprint", "footprint --width 0 --repetitions 3"),
    engine: ("engine", "engine --ranks 4 --parameters 100,1000"),
    watch: ("watch", "watch --ranks 4 --repetitions 50"),
    shards: ("shards", "shards --ranks 4 --shards-a-rank 2 --repetitions 10"),
    elastic: ("elastic", "elastic --tracks shared_memory,hosts --kills 30"),
    records: ("records", "records --ranks 4 --repetitions 50"),
}

app = make_app(PROGRAM, "Measure gradsync beside torch's ways and MPI.", completion=False)
for subject, examples in EXAMPLES.items():
    add(app, subject, *(f"{PROGRAM} {example}" for example in examples))
