"""`gradsync chaos`: ranks of a small training are killed, stopped, slowed, made to raise and cut off, on purpose."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import typer

from gradsync.cli import launch
from gradsync.cli.chaos import fault as faults
from gradsync.cli.chaos import worker
from gradsync.cli.chaos.display import Display
from gradsync.cli.chaos.fault import TRANSPORTS, BadFault, Fault
from gradsync.cli.chaos.hosts import Host, NotAllowed, make_hosts
from gradsync.cli.chaos.outcome import Observation
from gradsync.cli.chaos.plan import Choices
from gradsync.cli.chaos.tally import Tally
from gradsync.cli.launch import Rank, RankFailed, Ranks, environment, start_rank
from gradsync.cli.style import INTERRUPTED, JSON_HELP, Output

ALL = "all"
# Each of these libraries starts a pool of threads when it is loaded, and threads don't survive a fork.
_NO_POOLS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def chaos(
    seed: int = typer.Option(1, help="Which faults: the same seed means the same ones."),
    minutes: float = typer.Option(5.0, min=0.0, help="How long; a fault that has begun is brought to its end."),
    most: int | None = typer.Option(None, "--faults", min=1, help="How many, instead of how long."),
    transport: str = typer.Option(ALL, help=f"One of {', '.join(TRANSPORTS)}, {ALL}."),
    ranks: str = typer.Option("2:4", help="Fewest and most of them in a training."),
    jobs: int = typer.Option(1, min=1, max=32, help="Trainings at the same time."),
    json: str = typer.Option("", metavar="[FILE]", help=f"{JSON_HELP} An object a line, a line a fault."),
    single: str | None = typer.Option(None, "--fault", help="One fault, as a bad one is shown, instead of a plan."),
) -> None:
    """Make ranks of small trainings fail, and judge what the others do.

    All must go on, or all name the first cause in time, and leave nothing behind. Links are taken down between hosts,
    which are network namespaces: that needs root and iproute2, and is left out where they can't be had. The exit code
    is 1 if a promise was broken.
    """
    fewest, most_ranks = _read_range(ranks)
    if transport not in (*TRANSPORTS, ALL):
        raise typer.BadParameter(f"{transport!r} is none of {', '.join(TRANSPORTS)}, {ALL}", param_hint="--transport")
    chosen = TRANSPORTS if transport == ALL else (transport,)
    choices = Choices(transports=chosen, fewest=fewest, most=most_ranks)
    fault = None if single is None else _read_fault(single)
    run = Chaos(seed, choices, fault, jobs, Output(json))
    raise typer.Exit(run.run(most, None if most or single else 60 * minutes))


def _read_range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 2 <= fewest <= most <= 16:
        raise typer.BadParameter(f"{text!r} is no range such as 2:4 within 2 and 16", param_hint="--ranks")
    return fewest, most


def _read_fault(line: str) -> Fault:
    try:
        return faults.parse(line)
    except BadFault as error:
        raise typer.BadParameter(str(error), param_hint="--fault") from None


class Chaos:
    """One run of the command."""

    def __init__(self, seed: int, choices: Choices, single: Fault | None, jobs: int, output: Output) -> None:
        self._seed, self._choices, self._single, self._output = seed, choices, single, output
        self._jobs = 1 if single else jobs
        self._tally = Tally()
        self._display = Display(output.console, self._tally)

    def run(self, most: int | None, seconds: float | None) -> int:
        """The exit code."""
        try:
            with launch.interruptible(), ExitStack() as stack:
                hosts = self._make_hosts(stack)
                job = worker.Job(
                    seed=self._seed,
                    workers=self._jobs,
                    choices=self._choices_with(hosts),
                    hosts=tuple(hosts),
                    single=self._single,
                    most=1 if self._single else most,
                    seconds=seconds,
                )
                if self._single is None or self._single.hosts == 1 or hosts:
                    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-chaos-"))
                    self._listen(stack.enter_context(Workers(job, folder)))
        except KeyboardInterrupt:
            self._finish()
            self._display.say("Stopped; all ranks have ended.")
            return INTERRUPTED
        except RankFailed as failed:
            self._display.say(f"A process that runs the faults has failed: {failed}\n{failed.words}", "bold red")
            return 1
        self._finish()
        return 1 if self._tally.bad or not self._tally.cases else 0

    def _finish(self) -> None:
        self._display.finish()
        if self._output.file is not None and self._output.file.exists():
            self._display.say(f"wrote {self._output.file}")

    def _make_hosts(self, stack: ExitStack) -> Sequence[Host]:
        """Two for each job; none if they are not needed, or can't be had."""
        if not (self._choices.is_between_hosts if self._single is None else self._single.hosts > 1):
            return ()
        try:
            return stack.enter_context(make_hosts(2 * self._jobs))
        except NotAllowed as reason:
            self._display.say(f"No faults between hosts: no network namespaces can be made here ({reason}).")
            return ()

    def _choices_with(self, hosts: Sequence[Host]) -> Choices:
        chosen = self._choices
        return Choices(transports=chosen.transports, fewest=chosen.fewest, most=chosen.most, hosts=bool(hosts))

    def _listen(self, workers: Ranks) -> None:
        with self._display.running():
            for _, record in workers.reports():
                fault = Fault.from_json(record["fault"])
                if record["event"] == "began":
                    self._display.began(fault)
                    continue
                case = self._tally.add(record["number"], fault, Observation.from_json(record["seen"]))
                self._display.over(case)
                self._output.add_line(case.to_json())


class Workers(Ranks):
    """The processes that run the faults. None of theirs outlives them."""

    def __init__(self, job: worker.Job, folder: str) -> None:
        """`folder`: for all their files, since who is killed can't remove any."""
        self._variables = {**_NO_POOLS, "TMPDIR": folder}
        super().__init__(worker.MODULE, [job.to_json()], ranks=job.workers)

    def _start(self, module: str, arguments: Sequence[str], ranks: int, port: int) -> Iterator[Rank]:
        for number in range(ranks):
            yield start_rank(number, {**environment(number, ranks, port), **self._variables}, module, arguments)
