"""`gradsync doctor`: looks at this machine, or at all hosts of the job it is started in, and says what to do."""

from __future__ import annotations

import os

import typer

from gradsync.cli import launch
from gradsync.cli.display import count
from gradsync.cli.doctor import consultation
from gradsync.cli.doctor.consultation import Unreachable
from gradsync.cli.doctor.diagnosis import diagnose
from gradsync.cli.doctor.facts import Job
from gradsync.cli.doctor.show import show
from gradsync.cli.style import INTERRUPTED, JSON_HELP, Output

DEFAULT, LIMIT = 2, 60.0


def doctor(
    ranks: int | None = typer.Option(
        None, min=1, max=256, show_default=str(DEFAULT), help="How many to try on this machine."
    ),
    limit: float = typer.Option(LIMIT, min=1.0, help="Seconds to wait for ranks, before they are called missing."),
    json: str = typer.Option("", metavar="[FILE]", help=JSON_HELP),
) -> None:
    """Look at this machine before training, and say what to do.

    Versions, limits, memory, threads; real ranks are started, share memory and measure, as a training does. Inside a
    job (torchrun, srun, mpirun) its ranks are looked at instead, on all hosts, and rank 0 reports. The exit code is 1
    if training would not work; warnings don't count.
    """
    world, problem = consultation.launched(os.environ)
    if world is not None and ranks is not None:
        raise typer.BadParameter(f"a launcher has started {world.size} already; leave it out", param_hint="--ranks")
    output = Output(json if world is None or world.rank == 0 else "")
    seen: list[Job] = []
    try:
        with launch.interruptible():
            if world is None:
                with output.working(f"trying {count(ranks or DEFAULT, 'rank')} on this machine"):
                    seen.append(consultation.on_this_machine(ranks or DEFAULT, limit, problem, seen.append))
            elif (job := consultation.in_a_job(world, limit, seen.append)) is not None:
                seen.append(job)
            else:
                raise typer.Exit(0)
    except Unreachable as error:
        consultation.complain(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if seen:
            _tell(output, seen[-1])
        output.say("Stopped before all was tried; nothing was left running.")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if _tell(output, seen[-1]) else 1)


def _tell(output: Output, job: Job) -> bool:
    """Whether all is well."""
    found = diagnose(job)
    show(output.console, found)
    output.write(found.to_dict())
    return found.is_well
