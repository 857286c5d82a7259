"""`gradsync.Elastic`: training that goes on, to the same bits, when ranks die or come."""

from __future__ import annotations

import atexit
import hashlib
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsync import _torch, arguments, launchers
from gradsync.elastic import world
from gradsync.elastic.control import Control, Epoch, Over, has_failed, most_ranks
from gradsync.elastic.coordinator import FRESH
from gradsync.elastic.course import Course, course_of
from gradsync.elastic.state import State, Stateful
from gradsync.errors import ElasticError, InvalidOptionError, ReplicaLostError, RoundTimeoutError, WrongTypeError
from gradsync.invariant.shards import Shards
from gradsync.replica import engines_in, move_engine

# The launcher knows of a death at once; what a rank sees of it may come before.
_NEWS_SECONDS = 2.0
# And the other way round: the end of a process is seen by all ranks that are connected to it.
_SEEN_SECONDS = 0.3
_SHOWN = 500  # characters of an exception
# Whose errors may be those of ranks that are gone.
_OF_OTHERS = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}gradsync{os.sep}")


class Step:
    """One step, as a block: what happens in it counts if it comes to its end, and is taken back if a rank is lost."""

    def __init__(self, training: Elastic, number: int, epoch: int, batches: Sequence[Any]) -> None:
        self._training, self._batches = training, batches
        self.number, self.epoch = number, epoch
        """Counted from 0 over the whole training; `epoch`: how often the data were gone through before."""
        self.is_over = False
        self.is_done = False
        """Behind the block: whether it counts. If not, it was taken back, and comes again."""

    def __enter__(self) -> Step:
        self._training.step_begins(self)
        return self

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, one for each of its shards."""
        self._training.check_begun(self)
        yield from self._training.shards.each(self._batches)
        self._training.has_gradients()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """True if the step was taken back; the loop goes on with the same one."""
        self.is_over = True
        if error is None:
            self._training.step_ended(self)
            self.is_done = True
            return False
        return self._training.step_failed(self, error)


def _may_come_of_others(error: BaseException) -> bool:
    """An exception of the user's own code does not."""
    if not isinstance(error, Exception):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(mark in file for file in files[-2:] for mark in _OF_OTHERS)  # where it was raised


class Elastic:
    """Keeps a training going, to the same bits, when ranks die or come. Started by `gradsync run --elastic`.

        model = gradsync.replicate(model)
        optimizer = torch.optim.AdamW(model.parameters())
        training = gradsync.Elastic(model, optimizer, shards=8)
        loader = gradsync.data.Loader(dataset, training.shards, batch_size=16)
        for step in training.steps(loader, epochs=3):
            with step:                          # if a rank is lost in it, the step is made again
                for x, y in step:               # this rank's shards, one after the other
                    loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    Started in any other way, the same script trains with the ranks that it has, and a lost one ends it.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        *others: Stateful,
        shards: int,
        seed: int = 0,
        overlap: bool = True,
        checkpoint: str | os.PathLike[str] = "elastic.pt",
    ) -> None:
        """`module`: replicated, or several that are trained together. `others`: all else that training changes, with
        `state_dict()` and `load_state_dict()`: optimizers, schedules, scalers, a model's moving average.

        `shards`, `seed`, `overlap`: see `gradsync.Shards`; at least as many shards as there will ever be ranks.
        `checkpoint`: where the state is left when training can't go on; see `resume`.
        """
        modules = arguments.modules(module, "gradsync.Elastic()")
        self.shards = Shards(modules, shards, seed=seed, overlap=overlap)
        self._modules = modules
        self._engines = list(dict.fromkeys(engine for one in modules for engine in engines_in(one)))
        self._control = Control.from_environment() if launchers.is_elastic(os.environ) else None
        self._checkpoint = Path(checkpoint)
        self._check(others)
        self._optimizers = [one for one in others if isinstance(one, Optimizer)]
        named = {f"{number} ({type(one).__name__})": one for number, one in enumerate(others)}
        self._state = State(modules, named)
        self._state.check(self.rank)
        self._limit = _torch.timeout_of(self._engines[0].process_group)
        self._course: Course | None = None
        self._epoch: Epoch | None = None
        self._over = False
        self._has_left = False  # by an exception of its own, in a step
        self._is_fresh = True  # nothing was trained or loaded yet
        self._is_whole = True
        self._small: dict[str, Any] = {}
        self._current: Step | None = None
        self._blamed: list[int] = []
        self._hear_of_losses(False)

    @property
    def rank(self) -> int:
        """Of this process among those who train now. It may change from step to step."""
        return self._engines[0].transport.rank

    @property
    def ranks(self) -> int:
        """How many train now."""
        return self._engines[0].transport.size

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.shards.step

    # --- the loop ------------------------------------------------------------------------------------

    def steps(self, source: Any, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Step]:
        """The steps that are left, each to be used as a block: `with step:`.

        `source`: a `gradsync.data.Loader`, which is gone through `epochs` times; or a function that is given the
        number of a step and gives a list with a batch for each of `training.shards.mine`, and `steps=`, how many. Once
        in a training: what is to be done between epochs goes into the loop, behind the block.
        """
        if self._course is not None:
            raise InvalidOptionError(
                f"rank {self.rank}: training.steps() was called before. A rank that comes later begins the script from "
                "its start, and would be in another loop than the others: make one loop, with epochs=..., and "
                "ask step.epoch."
            )
        self._course = course_of(source, epochs, steps, self.shards, self.rank)
        return self._steps(self._course)

    def _steps(self, course: Course) -> Iterator[Step]:
        ended = False
        hook = register_optimizer_step_pre_hook(self._optimizer_steps)
        try:
            while True:
                if self._control is not None and self._epoch is None:
                    self._await_epoch(self._control, course)
                    if self._over:
                        break
                if self.step >= self._last(course):
                    if not self._finish(course):
                        continue
                    break
                if self._control is not None and not self._control.may_begin(self.step):
                    if (lost := self._control.lost) is not None:
                        self._tell_of_loss(lost[1], [lost[0]])
                    self._epoch = None
                    continue
                step = Step(self, self.step, course.epoch(self.step), course.batches(self.step))
                yield step
                if self._has_left:
                    raise ElasticError(
                        f"rank {self.rank}: step {step.number} has failed here, and the other ranks go on without this "
                        "one: let its exception end the script. A new rank comes in its place."
                    )
                if not step.is_over:
                    self.check_begun(step)
            ended = True
        finally:
            hook.remove()
            if not ended and self._control is not None:  # left by break, or by an exception
                atexit.register(self._finish_at_exit, course)

    def _tell_of_loss(self, how: str, ranks: Sequence[int]) -> None:
        """Others may be in a round, wait for this rank, and see nothing: ranks live on whose launcher is lost; and one
        that has left by sys.exit is missed at once by its neighbors only."""
        until = time.monotonic() + _SEEN_SECONDS
        for watch in {engine.transport.watch for engine in self._engines}:
            while watch is not None and watch.lost is None and time.monotonic() < until:
                time.sleep(0.002)
            if watch is not None and watch.lost is None:
                watch.give_up(f"it has heard that a rank is lost: {how}", ranks)

    def _last(self, course: Course) -> int:
        """The number of steps after which training is finished: for all, if one rank has left the loop."""
        if self._epoch is not None and self._epoch.ends is not None:
            return min(self._epoch.ends, course.steps)
        return course.steps

    def _finish(self, course: Course) -> bool:
        """Waits for those that are not as far; False if there is another epoch, in which they take over from here."""
        if self._control is None:
            return True
        self._await_epoch(self._control, course, finished=True)
        return self._over

    def _finish_at_exit(self, course: Course) -> None:
        if self._has_left or has_failed():
            return
        while not self._over and not self._finish(course):
            pass

    # --- a step --------------------------------------------------------------------------------------

    def step_begins(self, step: Step) -> None:
        if step.is_over or step.number != self.step:
            raise InvalidOptionError(f"rank {self.rank}: step {step.number} is over; each is made once: `with step:`.")
        self._small = self._state.small()
        self._hear_of_losses(True)
        self._current = step

    def check_begun(self, step: Step) -> None:
        """Before its first shard."""
        if self._current is not step:
            raise InvalidOptionError(
                f"rank {self.rank}: step {step.number} was not begun as a block: write `with step:` around what "
                "belongs to it, so that it can be taken back when a rank is lost."
            )
        for module in self._modules:
            for name, one in module.named_parameters():
                if one.grad is not None and bool(one.grad.any()):
                    raise InvalidOptionError(
                        f"rank {self.rank}: '{name}' has a gradient of an earlier step, which a rank that comes later "
                        "does not have. Call optimizer.zero_grad() in each step; to accumulate, run several backwards "
                        "in each shard."
                    )

    def has_gradients(self) -> None:
        """Nothing that follows in this step needs the other ranks: it is finished, even if one of them is lost now."""
        self._hear_of_losses(False)

    def step_ended(self, step: Step) -> None:
        self._current = None
        if self.step != step.number + 1:
            raise InvalidOptionError(
                f"rank {self.rank}: nothing was computed in step {step.number}: go over its batches, "
                "`for batch in step:`, to the end, once."
            )
        self._is_fresh, self._is_whole = False, True
        self._hear_of_losses(False)

    def step_failed(self, step: Step, error: BaseException) -> bool:
        """Whether it is made again: not if it has failed for a reason of its own."""
        self._current = None
        if self._control is None:
            return False
        if isinstance(error, (ReplicaLostError, RoundTimeoutError)):
            self._blamed = error.ranks
        elif not _may_come_of_others(error) or not self._control.has_lost(_NEWS_SECONDS):
            self._has_left = True
            self._control.fails(f"{type(error).__name__}: {error}"[:_SHOWN])
            return False
        lost = self._control.lost
        self._tell_of_loss(lost[1] if lost else str(error), [lost[0]] if lost else self._blamed)
        self._take_back(step.number)
        return True

    def _take_back(self, number: int) -> None:
        """As if this step had not been begun. If an optimizer has stepped in it, there is no way back."""
        if self._is_whole:
            self.shards.take_back(number)
            self._state.put_back(self._small)
        else:
            self.shards.drop_gradients()
            self.shards.go_to(number)
        self._epoch = None
        self._hear_of_losses(False)

    def _hear_of_losses(self, flag: bool) -> None:
        """But for the shards of a step nobody is waited for: a loss is heard of in the next one."""
        if self._control is not None:
            for engine in self._engines:
                engine.hear_of_losses(flag)

    def _optimizer_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before any optimizer's step. From here on until the block ends the model is neither old nor new."""
        if any(optimizer is one for one in self._optimizers):
            if self._current is not None:
                self._is_whole = False
            return
        trained = {id(one): name for module in self._modules for name, one in module.named_parameters()}
        for group in optimizer.param_groups:
            for one in group["params"]:
                if id(one) in trained:
                    raise InvalidOptionError(
                        f"rank {self.rank}: {type(optimizer).__name__} steps '{trained[id(one)]}', but was not given "
                        "to gradsync.Elastic(model, optimizer, ...): ranks that come later would not have its state."
                    )

    # --- an epoch ------------------------------------------------------------------------------------

    def _await_epoch(self, control: Control, course: Course, finished: bool = False) -> None:
        """Says how far this rank is, and begins the next epoch with those who are there."""
        while True:
            blamed, self._blamed = self._blamed, []
            done = FRESH if self._is_fresh else self.step
            told = control.await_epoch(done, self._is_whole, finished, self._described(course), blamed)
            if isinstance(told, Over):
                self._over = True
                if told.why:
                    self._give_up(told)
                return
            try:
                self._begin(control, told)
                course.look_again()
                return
            except (ElasticError, InvalidOptionError):
                raise
            except Exception as error:
                if isinstance(error, (ReplicaLostError, RoundTimeoutError)):
                    self._blamed = error.ranks
                elif not control.has_lost(_NEWS_SECONDS):
                    raise

    def _begin(self, control: Control, told: Epoch) -> None:
        def check() -> None:
            control.check(told.rank)

        device = next((one.device.type for one in self._modules[0].parameters()), "cpu")
        group = world.begin(told.number, told.rank, told.size, control.store, check, device, self._limit)
        for engine in self._engines:
            move_engine(engine, group, must=False)  # those who are left may be one on each host
        if told.behind:
            self._take_over(told)
        self.shards.go_to(told.step)
        self._is_fresh, self._epoch = False, told

    def _take_over(self, told: Epoch) -> None:
        transport = self._engines[0].transport
        state = self._state.send(transport, told.source, takes=told.rank in told.behind)
        if state is not None:
            self._is_whole = False
            self.shards.drop_gradients()
            self._state.load(state, told.rank)
            self._is_whole = True
        self._state.compare(transport, told.source)

    def _described(self, course: Course) -> str:
        """A digest of what must be alike on all ranks."""
        said = f"{self._state.kinds}\n{self.shards.state_dict() | {'step': 0}}\n{course.described()}"
        return hashlib.sha256(said.encode()).hexdigest()

    # --- when it can't go on -------------------------------------------------------------------------

    def _give_up(self, told: Over) -> None:
        saved = ""
        if told.leaves_checkpoint and self._is_whole and not self._is_fresh:
            self.save(self._checkpoint)
            saved = f" {self.step} steps are in {self._checkpoint}: training.resume() goes on from there."
        raise ElasticError(f"rank {self.rank}: training can't go on: {told.why}.{saved}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """`state_dict()` to a file, which is there whole or not at all."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(self.state_dict(), partial)
        partial.replace(path)

    def resume(self) -> bool:
        """Goes on from the checkpoint that an earlier job has left, if there is one. Before `steps()`."""
        if not self._checkpoint.exists():
            return False
        self.load_state_dict(torch.load(self._checkpoint, map_location="cpu", weights_only=False))
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything, of the steps that are done: model, what was given beside it, and the number of the step."""
        return {**self._state.all(), "shards": self.shards.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """On the ranks that a job begins with, before `steps()`."""
        if self._course is not None:
            raise InvalidOptionError(f"rank {self.rank}: load the state before training.steps() is called.")
        self._state.load(state, self.rank)
        self.shards.load_state_dict(state["shards"])
        self._is_fresh = False

    # --- what can't be -------------------------------------------------------------------------------

    def _check(self, others: Sequence[Stateful]) -> None:
        rank, most = self.rank, most_ranks() if self._control is not None else 1
        if most > self.shards.shards:
            raise InvalidOptionError(
                f"rank {rank}: gradsync run may have {most} ranks, but there are {self.shards.shards} shards: some "
                f"ranks would have none. Give shards={most} or more, or allow fewer ranks."
            )
        for one in others:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise WrongTypeError(
                    f"rank {rank}: gradsync.Elastic() takes what has state_dict() and load_state_dict(), but was given "
                    f"{arguments.shown(one)}."
                )
            if getattr(one, "steps_shares", False) or type(one).__name__ == "ZeroRedundancyOptimizer":
                raise InvalidOptionError(
                    f"rank {rank}: this {type(one).__name__} steps a share on each rank, so that nobody has a whole "
                    "state when one of them is lost. Give gradsync.Elastic a plain optimizer."
                )
        for engine in self._engines:
            name = type(engine.module).__name__
            refused = f"rank {rank}: {name} can't be trained elastically:"
            if engine.shared is not None:
                raise InvalidOptionError(
                    f"{refused} with share_parameters=True a rank that dies in the middle of a step leaves the only "
                    "copy of its host torn. Leave it out."
                )
            if engine.reducer.config.steps_in_backward:
                raise InvalidOptionError(
                    f"{refused} its optimizer steps in backward, so that a rank which is lost in one leaves all models "
                    "half stepped. Call optimizer.step() behind the shards."
                )
            if engine.policy.mesh is not None:
                raise InvalidOptionError(
                    f"{refused} it was replicated over a mesh, whose ranks stay. Replicate it without mesh=."
                )
