"""`python -m benchmarks hosts`: training steps on several hosts, which are network namespaces on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import RenderableType

from benchmarks import step_rank, step_table
from benchmarks.contenders import PLAIN, TORCH
from benchmarks.models import model
from benchmarks.names import read_names, read_numbers, words_of
from benchmarks.network import HostRanks, Network, NoNetwork
from benchmarks.step import MODEL_KEYS, StepBench
from benchmarks.step_result import Race, StepResult
from benchmarks.tables import target_table
from benchmarks.targets import Target
from gradsync.cli.style import JSON_HELP

CONTENDERS = [PLAIN.key, TORCH.key, "torch_best_25", "hierarchical", "process_group"]
# To torch's DDP with its defaults, by (ranks on a host, rate).
LIMITS = {(2, "1gbit"): 0.75, (4, "1gbit"): 0.65}


def hosts(
    hosts: int = typer.Option(2, min=2, help="How many."),
    ranks: list[str] = typer.Option(["2,4"], help="Numbers of processes on each host, each with one thread."),
    rates: list[str] = typer.Option(["1gbit,100mbit"], help="Speeds of each host's cable, as `tc` writes them."),
    models: list[str] = typer.Option(["mlp"], help=f"Some of {', '.join(MODEL_KEYS)}."),
    repetitions: int = typer.Option(7, min=1, help="Steps of each contender."),
    json: Path = typer.Option(Path("bench-out/hosts.json"), metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Training steps on several hosts, beside torch's DDP.

    gradsync has shared memory inside each host, or not. The hosts are network namespaces, so this needs root and
    iproute2; they share this machine's cores.
    """
    job = HostsBench(
        hosts=hosts,
        ranks=read_numbers(ranks, "--ranks"),
        rates=words_of(rates),
        models=read_names(models, MODEL_KEYS, "--models"),
        repetitions=repetitions,
        json=json,
    )
    raise typer.Exit(job.run())


class HostsBench(StepBench):
    def __init__(
        self, *, hosts: int, ranks: list[int], rates: list[str], models: list[str], repetitions: int, json: Path
    ) -> None:
        super().__init__(
            ranks=ranks, models=models, contenders=CONTENDERS, repetitions=repetitions, json=json, picture=None
        )
        self.hosts = hosts
        self.rates = rates

    def measure(self) -> None:
        try:
            for rate in self.rates:
                for ranks in self.ranks:
                    with Network(self.hosts, rate) as network:
                        for key in self.models:
                            self._race_on(network, key, ranks, rate)
        except NoNetwork as error:
            self.output.say(f"There can be no hosts here: {error}", "bold red")
            raise typer.Exit(1) from None

    def parts(self, result: StepResult) -> Iterable[RenderableType]:
        for rate in self.rates:
            for ranks in self.ranks:
                where = self._where(ranks, rate)
                if these := [race for race in result.races if race.where == where]:
                    yield step_table.ratio_table(these, f"torch DDP ({rate})", lambda race: TORCH.key)
                    yield target_table(self._targets(these, ranks, rate), where)

    def _where(self, ranks: int, rate: str) -> str:
        return f"{self.hosts} x {ranks} ranks, {rate}"

    def _race_on(self, network: Network, key: str, ranks: int, rate: str) -> None:
        job = step_rank.Job(model=key, contenders=self.contenders, repetitions=self.repetitions)
        total, where = ranks * self.hosts, self._where(ranks, rate)
        with (
            self.progress.part(f"{model(key).name}, {where}", self.repetitions),
            HostRanks(step_rank.MODULE, [job.to_json()], network=network, ranks=total) as started,
        ):
            self._listen(started, key, total, where)

    @staticmethod
    def _targets(races: list[Race], ranks: int, rate: str) -> list[Target]:
        limit = LIMITS.get((ranks, rate))
        if limit is None:
            return []
        return [
            Target(name=f"to torch DDP, {model(race.model).name}", value=found.median if found else None, limit=limit)
            for race in races
            for found in [race.ratio("hierarchical", TORCH.key)]
        ]
