"""What `gradsync.Elastic` and `gradsync run --elastic` can't take: one clear error, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync.errors import ElasticError, GradsyncError, InvalidOptionError, WrongTypeError
from gradsync.run import main
from tests.support.ranks import on_ranks


class NotCopied:
    def state_dict(self) -> dict[str, Any]:
        return {"lock": lambda: None}

    def load_state_dict(self, state: Any) -> None: ...


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return gradsync.replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)


def training_of(model: nn.Module, *others: Any, shards: int = 4, **options: Any) -> gradsync.Elastic:
    others = others or (torch.optim.SGD(model.parameters(), lr=0.1),)
    return gradsync.Elastic(model, *others, shards=shards, **options)


def batches(training: gradsync.Elastic) -> Callable[[int], list[torch.Tensor]]:
    return lambda step: [torch.full((2, 4), 1.0 + shard + step) for shard in training.shards.mine]


def loader(training: gradsync.Elastic) -> gradsync.data.Loader:
    return gradsync.data.Loader(TensorDataset(torch.randn(32, 4)), training.shards, batch_size=4)


def share_the_optimizer() -> None:
    model = build(share_parameters=True)
    training_of(model, gradsync.share_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


def step_in_backward() -> None:
    model = build()
    training_of(model, gradsync.overlap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def two_loops() -> None:
    training = training_of(build())
    training.steps(loader(training))
    training.steps(loader(training))


def other_shards() -> None:
    model = build()
    training = training_of(model)
    training.steps(gradsync.data.Loader(TensorDataset(torch.randn(32, 4)), gradsync.Shards(model, 4), batch_size=4))


def load_too_late() -> None:
    training = training_of(build())
    state = training.state_dict()
    training.steps(loader(training))
    training.load_state_dict(state)


def another_model() -> None:
    training_of(build()).load_state_dict(training_of(gradsync.replicate(nn.Linear(4, 4))).state_dict())


REFUSED: list[tuple[Callable[[], Any], type[GradsyncError], str]] = [
    (lambda: training_of(nn.Linear(2, 2)), InvalidOptionError, "needs a replicated module"),
    (lambda: training_of(build(), object()), WrongTypeError, "takes what has state_dict()"),
    (lambda: training_of(build(), NotCopied()), InvalidOptionError, "can't be copied to ranks that come later"),
    (lambda: training_of(build(), shards=1), InvalidOptionError, "2 ranks can't share 1 shards"),
    (lambda: training_of(build(share_parameters=True)), InvalidOptionError, "only copy of its host torn"),
    (share_the_optimizer, InvalidOptionError, "steps a share on each rank"),
    (step_in_backward, InvalidOptionError, "its optimizer steps in backward"),
    (two_loops, InvalidOptionError, "training.steps() was called before"),
    (other_shards, InvalidOptionError, "cuts its dataset for other shards"),
    (
        lambda: training_of(build()).steps(DataLoader(TensorDataset(torch.ones(4, 4)))),
        WrongTypeError,
        "can't be cut again",
    ),
    (lambda: training_of(build()).steps(lambda step: []), InvalidOptionError, "steps=1000"),
    (lambda: training_of(build()).steps(lambda step: [], steps=-1), InvalidOptionError, "steps must be 0 or more"),
    (load_too_late, InvalidOptionError, "before training.steps() is called"),
    (another_model, ElasticError, "has other parameters or buffers than the state"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: REFUSED[number][2])
@on_ranks(2)
def test_before_the_first_step(number: int) -> None:
    make, kind, text = REFUSED[number]
    with pytest.raises(kind) as caught:
        make()
    assert text in str(caught.value)


def without_block(training: gradsync.Elastic, model: nn.Module) -> None:
    for _ in training.steps(batches(training), steps=2):
        pass


def outside_of_block(training: gradsync.Elastic, model: nn.Module) -> None:
    for step in training.steps(batches(training), steps=2):
        for x in step:
            model(x).sum().backward()


def without_batches(training: gradsync.Elastic, model: nn.Module) -> None:
    for step in training.steps(batches(training), steps=2):
        with step:
            pass


def without_zero_grad(training: gradsync.Elastic, model: nn.Module) -> None:
    for step in training.steps(batches(training), steps=2):
        with step:
            for x in step:
                model(x).sum().backward()


def with_another_optimizer(training: gradsync.Elastic, model: nn.Module) -> None:
    another = torch.optim.Adam(model.parameters())
    for step in training.steps(batches(training), steps=2):
        with step:
            for x in step:
                model(x).sum().backward()
            another.step()


MISUSED = [
    (without_block, "was not begun as a block"),
    (outside_of_block, "was not begun as a block"),
    (without_batches, "nothing was computed in step 0"),
    (without_zero_grad, "has a gradient of an earlier step, which a rank that comes later does not have"),
    (with_another_optimizer, "Adam steps '0.weight', but was not given to gradsync.Elastic"),
]


@pytest.mark.parametrize(("loop", "text"), MISUSED, ids=lambda value: value if isinstance(value, str) else "")
@on_ranks(2)
def test_in_the_loop(loop: Callable[[gradsync.Elastic, nn.Module], None], text: str) -> None:
    model = build()
    with pytest.raises(InvalidOptionError) as caught:
        loop(training_of(model), model)
    assert text in str(caught.value)


@on_ranks(2)
def test_behind_the_loop_the_model_is_anybodys() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = training_of(model, optimizer)
    for step in training.steps(batches(training), steps=1):
        with step:
            for x in step:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.optim.Adam(model.parameters()).step()


@on_ranks(2)
def test_a_training_goes_on_from_its_state(tmp_path: Any) -> None:
    """Without the launcher too; and `resume` says whether there was a checkpoint."""

    def run(steps: int, resumes: bool) -> str:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        path = tmp_path / f"state{torch.distributed.get_rank()}.pt"
        training = training_of(model, optimizer, checkpoint=path)
        assert training.resume() == resumes
        for step in training.steps(batches(training), steps=steps):
            with step:
                for x in step:
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        training.save(path)
        assert training.step == steps
        return gradsync.fingerprint(model)

    run(3, resumes=False)
    gone_on = run(6, resumes=True)
    for file in tmp_path.glob(f"state{torch.distributed.get_rank()}*"):
        file.unlink()
    assert gone_on == run(6, resumes=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--ranks 2:4", "goes with --elastic"),
        ("--wait 3", "goes with --elastic"),
        ("--elastic --ranks 4:2", "more ranks at least than at most"),
        ("--elastic --ranks some", "must be a number, or LEAST:MOST"),
        ("--elastic --ranks 2:", "must be a number, or LEAST:MOST"),
        ("--elastic --ranks 0:2", "must be 1 or more"),
        ("--elastic --ranks 2 --wait -1", "--wait must be 0 s or more"),
        ("--elastic --ranks 2 --max-restarts -1", "--max-restarts must be 0 or more"),
        ("--elastic --ranks 2 --trace out", "--trace does not go together with --elastic"),
        ("--elastic --nnodes 3:1", "must be a number of hosts, or LEAST:MOST"),
        ("--elastic --nnodes 1:2 --nproc-per-node gpu", "--nproc-per-node must be a number of ranks"),
        ("--elastic --nnodes 1:2 --nproc-per-node 2", "--rdzv-backend c10d"),
        ("--elastic --nnodes 1:2 --nproc-per-node 2 --rdzv-backend c10d", "need --rdzv-endpoint"),
    ],
)
def test_options(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*options.split(), __file__], prog="gradsync run")
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
