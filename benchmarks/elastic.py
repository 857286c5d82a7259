"""`python -m benchmarks elastic`: what it costs that ranks are killed, and that others come in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import RenderableType

from benchmarks import elastic_picture, elastic_rank, elastic_table, torchft_lighthouse, torchft_rank
from benchmarks.elastic_result import ElasticResult, ElasticTrack, make_track
from benchmarks.kills import Killer
from benchmarks.models import GPT_SHAPE
from benchmarks.names import read_names
from benchmarks.network import INTERFACE, PORT, Network, NoNetwork
from benchmarks.recovery import recoveries
from benchmarks.replaced import ReplacedRanks
from benchmarks.run import BenchRun
from gradsync.cli.launch import Ranks
from gradsync.cli.launched import LaunchedRanks, Launcher
from gradsync.cli.style import JSON_HELP

HOSTS, A_HOST = 2, 2
RESTARTS = ["--max-restarts", "1000000"]


@dataclass(frozen=True)
class Course:
    """Where ranks are killed."""

    key: str
    name: str
    ranks: int


COURSES = (
    Course("shared_memory", "shared memory", 3),
    Course("process_group", "process group", 3),
    Course("hosts", "two hosts", HOSTS * A_HOST),
    Course("torchft", "torchft", 3),
)
KEYS = [course.key for course in COURSES]


def elastic(
    tracks: list[str] = typer.Option([], help=f"Some of {', '.join(KEYS)}.", show_default="all"),
    kills: int = typer.Option(10, min=1, help="Ranks that are killed on each track, one after the other."),
    shards: int = typer.Option(4, min=4, help="Of each step; 4 windows of 64 characters each."),
    seed: int = typer.Option(0, help="Of who is killed, and where in a step."),
    json: Path = typer.Option(Path("bench-out/elastic.json"), metavar="[FILE]", help=JSON_HELP),
    file: Path = typer.Option(Path("bench-out/elastic.png"), "--picture", help="Loss over time, with the kills."),
    layers: int = typer.Option(GPT_SHAPE.layers, min=1, hidden=True),
) -> None:
    """The GPT is trained, and ranks are killed with kill -9, one after the other.

    How long the others take to go on, how long a rank that comes in its place takes to be in step, and what the others
    lose by it. Two hosts are network namespaces, which needs root and iproute2. torchft is measured if it is installed.
    """
    keys = read_names(tracks, KEYS, "--tracks")
    job = elastic_rank.Job(shards=shards, layers=layers)
    raise typer.Exit(ElasticBench(keys, kills, seed, job, json, file).run())


class Absent(Exception):
    """A track can't be measured here; the text says why."""


class ElasticBench(BenchRun):
    def __init__(
        self, keys: list[str], kills: int, seed: int, job: elastic_rank.Job, json: Path, picture: Path
    ) -> None:
        super().__init__(json, picture)
        self._courses = [course for course in COURSES if course.key in keys]
        self._kills, self._seed, self._job = kills, seed, job
        self._killers: dict[str, Killer] = {}
        self._absent: dict[str, str] = {}

    def measure(self) -> None:
        for course in self._courses:
            killer = Killer(course.ranks, self._kills, self._seed)
            try:
                with (
                    self.progress.part(f"{course.name}, {course.ranks} ranks", self._kills),
                    self._started(course) as ranks,
                ):
                    self._killers[course.key] = killer
                    self._watch(ranks, killer)
            except Absent as why:
                self._absent[course.name] = str(why)

    def _watch(self, ranks: Ranks, killer: Killer) -> None:
        for _, record in ranks.reports():
            if killer.take(record):
                self.progress.step()
            if killer.is_done:
                return
            self.keep()

    @contextmanager
    def _started(self, course: Course) -> Iterator[Ranks]:
        start: dict[str, Callable[[ExitStack, int], Ranks]] = {"hosts": self._on_hosts, "torchft": self._of_torchft}
        with ExitStack() as stack:
            if course.key in start:
                ranks = start[course.key](stack, course.ranks)
            else:
                options = ["--ranks", f"{course.ranks - 1}:{course.ranks}", *RESTARTS]
                launcher = Launcher(options, {"GRADSYNC_TRANSPORT": course.key})
                ranks = LaunchedRanks(elastic_rank.MODULE, self._job.to_json(), [launcher])
            yield stack.enter_context(ranks)

    def _on_hosts(self, stack: ExitStack, count: int) -> Ranks:
        try:
            network = stack.enter_context(Network(HOSTS))
        except NoNetwork as error:
            raise Absent(f"there can be no hosts here: {error}") from None
        common = ["--nnodes", f"1:{HOSTS}", "--nproc-per-node", str(A_HOST), *RESTARTS]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{network.address(0)}:{PORT}", "--rdzv-id", "bench"]
        launchers = [
            Launcher(
                [*common, *meeting, "--rdzv-conf", f"is_host={int(host == 0)}"],
                {"GLOO_SOCKET_IFNAME": INTERFACE},
                network.inside(host),
            )
            for host in range(HOSTS)
        ]
        return LaunchedRanks(elastic_rank.MODULE, self._job.to_json(), launchers)

    def _of_torchft(self, stack: ExitStack, count: int) -> Ranks:
        told = torchft_lighthouse.Job(least=count - 1).to_json()
        lighthouse = stack.enter_context(Ranks(torchft_lighthouse.MODULE, [told], ranks=1))
        _, answer = next(lighthouse.reports())
        if answer["event"] == torchft_lighthouse.ABSENT:
            raise Absent(answer["why"])
        shards, layers = self._job.shards, self._job.layers
        job = torchft_rank.Job(shards=shards, layers=layers, ranks=count, lighthouse=answer["value"])
        return ReplacedRanks(torchft_rank.MODULE, job.to_json(), ranks=count)

    def so_far(self) -> ElasticResult | None:
        tracks = [self._track(course) for course in self._courses if course.key in self._killers]
        tracks = [track for track in tracks if track.seconds]
        if not tracks and not self._absent:
            return None
        return ElasticResult(shards=self._job.shards, tracks=tracks, absent=self._absent)

    def _track(self, course: Course) -> ElasticTrack:
        seen = self._killers[course.key].seen
        found = recoveries(seen.steps, seen.ready, seen.lost, seen.kills, course.ranks)
        return make_track(course.key, course.name, course.ranks, seen.steps, seen.kills, found)

    def parts(self, result: ElasticResult) -> Iterable[RenderableType]:
        return elastic_table.parts(result)

    def draw(self, result: ElasticResult, path: Path) -> None:
        elastic_picture.draw(result, path)
